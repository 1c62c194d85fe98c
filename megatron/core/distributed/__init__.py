# SPDX-License-Identifier: Apache-2.0
"""Data parallelism: flat buffers, replicas, gradient synchronisation. Names load when first used (PEP 562)."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from megatron.core.lazy_names import load_when_used

_NAMES = {
    "DistributedDataParallel": "distributed_data_parallel",
    "DistributedDataParallelConfig": "distributed_data_parallel_config",
    "ModelChunk": "model_chunk",
    "TorchFullyShardedDataParallel": "torch_fully_sharded_data_parallel",
    "finalize_model_grads": "finalize_model_grads",
}

__all__ = list(_NAMES)  # noqa: PLE0605
__getattr__ = load_when_used(__name__, _NAMES)


class _Package(ModuleType):
    """Importing the submodule finalize_model_grads would put the module where the function of that name belongs."""

    def __setattr__(self, name: str, value: Any) -> None:
        is_namesake = isinstance(value, ModuleType) and name == "finalize_model_grads"
        super().__setattr__(name, value.finalize_model_grads if is_namesake else value)


sys.modules[__name__].__class__ = _Package
