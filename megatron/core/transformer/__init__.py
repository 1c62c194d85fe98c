# SPDX-License-Identifier: Apache-2.0
"""Transformer layers, their parts, and their config.

Names of upstream, imported when they are asked for; inside megatron/ import the defining module.
"""

from __future__ import annotations

import importlib
from typing import Any

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


def __getattr__(name: str) -> Any:
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_DEFINED_IN[name]}"), name)
