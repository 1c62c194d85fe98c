# SPDX-License-Identifier: Apache-2.0
"""An exchange under way: when it began, what this site gives, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class Position(NamedTuple):
    """Position of a run."""

    iteration: int
    consumed_samples: int


@dataclass
class Pending:
    """An exchange under way."""

    fragment: int
    began: Position
    began_at: float
    deltas: list[Tensor]
    """Of this site, share by share, as the others see them."""
    lost: list[Tensor] = field(default_factory=list)
    """Rounding errors of these, which are added next time if the exchange succeeds."""
    means: list[Tensor] = field(default_factory=list)
    """Over the sites, share by share; empty until they are known."""
    is_over: bool = False
    """Nothing more will come: without means there is no outer step."""

    @property
    def topic(self) -> str:
        return str(self.fragment)
