# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel as DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig as DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads as finalize_model_grads
from megatron.core.distributed.model_chunk import ModelChunk as ModelChunk
from megatron.core.distributed.torch_fully_sharded_data_parallel import TorchFullyShardedDataParallel as TorchFullyShardedDataParallel
from typing import Any, NoReturn
class FullyShardedDataParallel:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
__all__ = ['DistributedDataParallel', 'DistributedDataParallelConfig', 'ModelChunk', 'TorchFullyShardedDataParallel', 'finalize_model_grads']
