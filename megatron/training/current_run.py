# SPDX-License-Identifier: Apache-2.0
"""Run that get_args(), get_tokenizer() and get_timers() show to scripts written for upstream. Nothing of ours reads
it."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any, ClassVar

from megatron.core.timers import Timers

if TYPE_CHECKING:
    from megatron.core.tokenizers.base import Tokenizer
    from megatron.training.config.container import RunConfig


class CurrentRun:
    """The run that pretrain() is in. Outside of it there is nothing, and get_args() says so."""

    # Class attributes, hence global: that is what upstream's functions without arguments ask for, and why nothing of
    # ours uses them.
    config: ClassVar[RunConfig | None] = None
    additions: ClassVar[dict[str, Any]] = {}
    """Settings that upstream adds while it starts."""
    args: ClassVar[Namespace | None] = None
    """Made of both when first asked for; the script may change it."""
    tokenizer: ClassVar[Tokenizer | None] = None
    timers: ClassVar[Timers | None] = None

    @classmethod
    def show(cls, **parts: Any) -> None:
        """Set any of the attributes above, by name."""
        for name, value in parts.items():
            setattr(cls, name, value)

    @classmethod
    def forget(cls) -> None:
        """Clear all attributes: the run is over."""
        cls.show(config=None, additions={}, args=None, tokenizer=None, timers=None)
