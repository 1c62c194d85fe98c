# SPDX-License-Identifier: Apache-2.0
"""The optimizer: update rules over flat buffers, clipping, main parameters. Names load when first used (PEP 562)."""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "get_megatron_optimizer": "megatron_optimizer",
    "MegatronOptimizer": "megatron_optimizer",
    "OptimizerConfig": "optimizer_config",
    "UpdateResult": "megatron_optimizer",
}

__all__ = list(_NAMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"megatron.core.optimizer has no attribute {name!r}")
    return getattr(importlib.import_module(f"megatron.core.optimizer.{_NAMES[name]}"), name)
