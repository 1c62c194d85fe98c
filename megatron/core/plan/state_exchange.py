# SPDX-License-Identifier: Apache-2.0
"""Division of the sequence of a mixer with a state over context-parallel ranks: what each sends, and the choice of the
lesser.

    tokens for heads   each rank exchanges the inputs of linear attention, and its output back, and has some heads of
                       whole sequences
    states             each rank computes its pieces from the states before them: what a piece adds to a state, and what
                       it makes of one, are gathered in float32

Mixers choose by it (core/ssm/pieces.py), and plans count what they chose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StateInput(NamedTuple):
    """One of the inputs of linear attention: queries, keys, values, decay, strength, what erases, in this order."""

    heads: int
    channels: int
    """Of a head; 1 where there is one number for it."""
    width: int
    """Bytes of a number."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return self.heads * self.channels * self.width


class Exchange(NamedTuple):
    """Bytes that context-parallel ranks could send for one layer, and the choice of the lesser."""

    heads_bytes: float
    """Of a rank, where tokens are exchanged for heads, and back."""
    states_bytes: float
    """Of a rank, where the changes of states are gathered, in float32."""
    undivided: int | None
    """A number of heads that the ranks do not divide."""

    @classmethod
    def weigh(cls, inputs: Sequence[StateInput], tokens: float, pieces: float, ranks: int) -> Exchange:
        """Count the bytes. inputs: of one tensor-parallel rank. tokens: of all pieces of a rank, sequences of a
        microbatch together; pieces: how many they are."""
        _, key, value, *_ = inputs
        # The output comes back in the format of the values. A rank keeps one share of what it exchanges.
        exchanged = tokens * sum(x.token_bytes for x in [*inputs, value]) / ranks
        undivided = next((x.heads for x in inputs if x.heads % ranks), None)
        change = value.heads * key.channels * (value.channels + key.channels)
        return cls(exchanged, 4 * pieces * change, undivided)

    @property
    def moves_heads(self) -> bool:
        """True where exchanging tokens for heads takes fewer bytes, and the heads divide."""
        return self.undivided is None and self.heads_bytes < self.states_bytes

    def describe(self) -> str:
        """Return the choice and its reason, for the log."""
        heads, states = (f"{count / 1e6:,.3g} MB" for count in (self.heads_bytes, self.states_bytes))
        if self.undivided is not None:
            return f"states handed over, {states} a layer (ranks do not divide {self.undivided} heads)"
        if self.moves_heads:
            return f"tokens exchanged for heads, {heads} a layer (states would be {states})"
        return f"states handed over, {states} a layer (heads would be {heads})"
