# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core import dist_checkpointing as dist_checkpointing, parallel_state as mpu, parallel_state as parallel_state, tensor_parallel as tensor_parallel
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel as DistributedDataParallel
from megatron.core.model_parallel_config import ModelParallelConfig as ModelParallelConfig
from megatron.core.timers import Timers as Timers
from typing import Any, NoReturn
class InferenceParams:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
__version__: str
OWN_VERSION: str
__all__ = ['DistributedDataParallel', 'ModelParallelConfig', 'Timers', 'dist_checkpointing', 'mpu', 'parallel_state', 'tensor_parallel']
