# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.upstream.checkpoints import TorchDistLoadShardedStrategy as TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy as TorchDistSaveShardedStrategy
from typing import Any, NoReturn
def get_async_strategy(*args: Any, **kwargs: Any) -> NoReturn: ...
