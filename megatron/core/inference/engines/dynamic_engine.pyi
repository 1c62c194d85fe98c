# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.upstream.inference import DynamicInferenceEngine as DynamicInferenceEngine
from typing import Any, NoReturn
class EngineState:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
