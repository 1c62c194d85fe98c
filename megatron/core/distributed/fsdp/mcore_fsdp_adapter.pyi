# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.distributed import FullyShardedDataParallel as FullyShardedDataParallel
from typing import Any, NoReturn
class FullyShardedDataParallelV1:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
class FullyShardedDataParallelV2:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
