"""Data parallelism: flat buffers, replicas, gradient synchronisation. Names load when first used (PEP 562)."""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "DistributedDataParallel": "distributed_data_parallel",
    "DistributedDataParallelConfig": "distributed_data_parallel_config",
    "ModelChunk": "model_chunk",
    "TorchFullyShardedDataParallel": "torch_fully_sharded_data_parallel",
    "finalize_model_grads": "finalize_model_grads",
}

__all__ = list(_NAMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"megatron.core.distributed has no attribute {name!r}")
    value = getattr(importlib.import_module(f"megatron.core.distributed.{_NAMES[name]}"), name)
    globals()[name] = value  # also where a submodule of the same name was just imported
    return value
