# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.upstream.inference import InferenceConfig as InferenceConfig, KVCacheManagementMode as KVCacheManagementMode, MambaInferenceStateConfig as MambaInferenceStateConfig
from typing import Any, NoReturn
class PrefixCachingCoordinatorPolicy:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
