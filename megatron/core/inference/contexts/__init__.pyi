# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.upstream.inference import DynamicInferenceContext as DynamicInferenceContext, StaticInferenceContext as StaticInferenceContext
from typing import Any, NoReturn
class BaseInferenceContext:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
