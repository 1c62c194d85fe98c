# SPDX-License-Identifier: Apache-2.0
"""The training program: settings, set-up, step, loop and hooks. Names load when first used (PEP 562)."""

from __future__ import annotations

import importlib
from typing import Any

from megatron.training.upstream.table import TRAINING_NAMES

# Loading when first used keeps `import megatron.training` free of torch, which takes seconds.
_NAMES = {
    "pretrain": "training",
    "get_args": "global_vars",
    "get_timers": "global_vars",
    "get_tokenizer": "global_vars",
    "print_rank_0": "global_vars",
}

__all__ = list(_NAMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        return _upstream(name)
    return getattr(importlib.import_module(f"megatron.training.{_NAMES[name]}"), name)


_upstream = TRAINING_NAMES.lookup(__name__)
TRAINING_NAMES.install()
