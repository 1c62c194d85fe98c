# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.tensor_parallel.cross_entropy import fused_vocab_parallel_cross_entropy as fused_vocab_parallel_cross_entropy
