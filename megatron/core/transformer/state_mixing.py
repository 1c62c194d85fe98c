# SPDX-License-Identifier: Apache-2.0
"""Hidden state mixing: while it trains, a depth of multi-token prediction goes on from states of any depth before it.

    depth k continues token i from h_u[i + k - u], u drawn from {0, ..., k}: its newest state, h_k[i], or an earlier
    depth's state of the later token that has read as much

so that it learns to continue from the decoder's states and not only from drafts. What is after the end of a document is
replaced by h_k[i]. Draws are a hash of the sequence's tokens: the same in every layout, and after a resume, without
generators whose state would have to be kept.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.core.collectives import all_reduce
from megatron.core.context_parallel.sharding import shard_sequence
from megatron.core.process_groups_config import Group

# Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014; as torch's signed 64 bits.
_STEP, _FIRST, _SECOND = (n - 2**64 for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class StateMixing:
    """The states of one microbatch's depths, and the draws among them."""

    def __init__(self, tokens: Tensor, sequence: Group, shift: Callable[[Tensor], Tensor]) -> None:
        """tokens: [b, s] int64, the decoder's. sequence: the ranks that share it. shift: moves what belongs to its
        tokens, [b, s, ...], one place towards the beginning of their document, zeros after its end."""
        self._shift = shift
        self._present = torch.ones_like(tokens)
        place = torch.arange(tokens.shape[1] * sequence.size(), device=tokens.device)
        self._place = shard_sequence(place, sequence.rank(), sequence.size())
        # Of the whole sequence: a token's draw should not follow from the token.
        total = scramble(tokens + self._place * _STEP).sum(1, keepdim=True)
        if sequence.size() > 1:
            all_reduce(total, sequence)
        self._key = scramble(total)
        self._earlier: list[tuple[Tensor, Tensor]] = []
        """Of each depth its states and whether there is one, both moved to the token that may continue from them."""

    def mix(self, newest: Tensor) -> Tensor:
        """Return the states that the next depth continues from, given the states of the last one; [b, s, h] each."""
        self._earlier = [(self._shift(states), self._shift(present)) for states, present in self._earlier]
        depth = len(self._earlier)
        drawn = self.draw(depth)
        mixed = newest
        for earlier, (states, present) in enumerate(self._earlier):
            mixed = torch.where(((drawn == earlier) & (present > 0))[..., None], states, mixed)
        self._earlier.append((newest, self._present))
        return mixed

    def draw(self, depth: int) -> Tensor:
        """Draw a number of {0, ..., depth} for each token, [b, s] int64, all equally likely."""
        # Upper bits, without the sign: a remainder of a negative number would be another one on some devices.
        return (scramble(self._key + (self._place + 1) * _STEP + depth) >> 33 & 0x7FFFFFFF) % (depth + 1)


def scramble(x: Tensor) -> Tensor:
    """Hash int64 numbers: each bit of a result depends on all bits of its argument."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        x = (x ^ _shift_right(x, shift)) * factor
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Of 64 bits without a sign."""
    return x >> count & (1 << (64 - count)) - 1
