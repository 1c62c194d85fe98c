# SPDX-License-Identifier: Apache-2.0
"""Record of a router's choices in the microbatches of a step, one after the other: noted, or given back from an earlier
run."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron.core.errors import CheckpointError


class RouteLog:
    """The microbatches of one step, as a router passes them.

    given: the experts [T, k] of each microbatch, which take the place of the router's choice; None to let it choose.
    """

    def __init__(self, given: Sequence[Tensor] | None = None) -> None:
        self._given = given
        self._taken = 0
        self.shapes: list[tuple[int, int]] = []
        """Of each microbatch, [s, b] of its tokens."""
        self.experts: list[Tensor] = []
        """Of each, [T, k] int64."""
        self.logits: list[Tensor] = []
        """Of each, [T, E] as the router computed them."""
        self.hidden_states: list[Tensor] = []
        """Of each, [T, h] as the router read them."""

    def take(self) -> Tensor | None:
        """Return the experts of the next microbatch; None where the router is to choose.

        Raises CheckpointError where the earlier run had fewer microbatches in its step.
        """
        if self._given is None:
            return None
        if self._taken == len(self._given):
            raise CheckpointError(f"the recorded step has {self._taken} microbatches of this rank, this one has more")
        self._taken += 1
        return self._given[self._taken - 1]

    def note(self, hidden_states: Tensor, logits: Tensor, experts: Tensor) -> None:
        """Keep what a microbatch was: hidden states [s, b, h], logits [T, E], experts [T, k]."""
        self.shapes.append((hidden_states.shape[0], hidden_states.shape[1]))
        self.experts.append(experts.detach())
        self.logits.append(logits.detach())
        self.hidden_states.append(hidden_states.detach().flatten(0, 1))
