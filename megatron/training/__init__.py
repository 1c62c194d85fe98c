"""The training program: settings, set-up, step, loop and hooks. Names load when first used (PEP 562)."""

from __future__ import annotations

import importlib
from typing import Any

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
        raise AttributeError(f"megatron.training has no attribute {name!r}")
    return getattr(importlib.import_module(f"megatron.training.{_NAMES[name]}"), name)
