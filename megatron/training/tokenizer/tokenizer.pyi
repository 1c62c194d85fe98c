# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.upstream.tokenizers import vocab_size_with_padding as _vocab_size_with_padding
