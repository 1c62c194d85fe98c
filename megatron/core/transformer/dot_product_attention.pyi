# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.transformer.core_attention.dot_product_attention import DotProductAttention as DotProductAttention
