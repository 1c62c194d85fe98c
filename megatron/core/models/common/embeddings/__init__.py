# SPDX-License-Identifier: Apache-2.0
"""Token and position embeddings. Names load when first used (PEP 562)."""

from __future__ import annotations

from megatron.core.lazy_names import load_when_used

_NAMES = {
    "MultimodalRotaryEmbedding": "rotary_pos_embedding",
    "RotaryEmbedding": "rotary_pos_embedding",
    "YarnRotaryEmbedding": "yarn_rotary_pos_embedding",
}

__all__ = list(_NAMES)  # noqa: PLE0605
__getattr__ = load_when_used(__name__, _NAMES)
