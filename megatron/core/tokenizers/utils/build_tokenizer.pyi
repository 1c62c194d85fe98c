# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.upstream.tokenizers import build_tokenizer as build_tokenizer, vocab_size_with_padding as vocab_size_with_padding
