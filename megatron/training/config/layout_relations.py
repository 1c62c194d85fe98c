"""Rules between settings of different groups about how processes share the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.training.config.container import RunConfig

LAYOUT_RELATIONS: tuple[Callable[[RunConfig], Iterator[str]], ...] = ()
