# SPDX-License-Identifier: Apache-2.0
"""Transformer layers, their parts, and their config.

Names of upstream, imported when they are asked for; inside megatron/ import the defining module.
"""

from __future__ import annotations

from megatron.core.lazy_names import load_when_used

_DEFINED_IN = {
    "TransformerConfig": "transformer_config",
    "MegatronModule": "module",
    "ModuleSpec": "spec_utils",
    "build_module": "spec_utils",
    "TransformerBlock": "transformer_block",
    "TransformerLayer": "transformer_layer",
    "TransformerLayerSubmodules": "transformer_layer",
}
__all__ = list(_DEFINED_IN)
__getattr__ = load_when_used(__name__, _DEFINED_IN)
