# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding as MultimodalRotaryEmbedding, RotaryEmbedding as RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding as YarnRotaryEmbedding
from megatron.core.transformer.config_fields.positions import compute_yarn_magnitude as _yarn_get_mscale
__all__ = ['MultimodalRotaryEmbedding', 'RotaryEmbedding', 'YarnRotaryEmbedding']
