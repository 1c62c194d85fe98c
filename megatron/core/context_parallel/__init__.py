# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: ranks that share each sequence. `sharding.py` cuts it, `planning.py` shares out conversations;
attention across the pieces is in `transformer/core_attention`.

Names of upstream, imported when they are asked for; inside megatron/ import the defining module.
"""

from __future__ import annotations

import importlib
from typing import Any

_DEFINED_IN = {
    "get_batch_on_this_cp_rank": "sharding",
}
__all__ = list(_DEFINED_IN)


def __getattr__(name: str) -> Any:
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_DEFINED_IN[name]}"), name)
