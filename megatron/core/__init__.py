# SPDX-License-Identifier: Apache-2.0
"""Megatron Core: models and engines as a library.

Importing this package costs nothing: its names are loaded when they are first used (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import Any

from megatron.core.upstream.table import CORE_NAMES

__version__ = "0.17.0"
"""Upstream's release whose interface is offered: programs choose their way by it."""
OWN_VERSION = "0.2.0"
"""The release of this project."""

_MODULES = ("parallel_state", "tensor_parallel", "dist_checkpointing")
_NAMES = {
    "mpu": "parallel_state:",
    "DistributedDataParallel": "distributed.distributed_data_parallel",
    "ModelParallelConfig": "model_parallel_config",
    "Timers": "timers",
}

__all__ = ["DistributedDataParallel", "ModelParallelConfig", "Timers", "dist_checkpointing", "mpu", "parallel_state",
           "tensor_parallel"]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"megatron.core.{name}")
    if name in _NAMES:
        module, colon, _ = _NAMES[name].partition(":")
        loaded = importlib.import_module(f"megatron.core.{module}")
        return loaded if colon else getattr(loaded, name)
    return _upstream(name)


_upstream = CORE_NAMES.lookup(__name__)
CORE_NAMES.install()
