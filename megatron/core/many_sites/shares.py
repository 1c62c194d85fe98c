# SPDX-License-Identifier: Apache-2.0
"""Division of the weights that a process updates into what is exchanged together, and who of a site exchanges it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.mapping import OUTER_PREFIX
from megatron.core.many_sites.formats import BLOCK, LOSSY, count_padded
from megatron.core.optimizer.group_state import GroupState
from megatron.core.optimizer.megatron_optimizer import MegatronOptimizer
from megatron.core.process_groups_config import Group

WEIGHT, MOMENTUM, RESIDUAL, MEAN = (OUTER_PREFIX + name for name in ("weight", "momentum", "residual", "mean"))
"""Outer state: float32 values of each weight that a process updates."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def name_outer_state(form: str, overlap_steps: int) -> list[str]:
    """The outer state of a run that exchanges in this format, beside so many steps."""
    return [WEIGHT, MOMENTUM, *([RESIDUAL] if form in LOSSY else []), *([MEAN] if overlap_steps else [])]


class OwnedSlice(NamedTuple):
    """A part of a parameter that this process updates."""

    state: GroupState
    piece: tuple[int, int]
    place: slice

    @property
    def values(self) -> Tensor:
        return self.state.values(self.piece, self.place)

    def companion(self, kind: str) -> Tensor:
        return self.state.companions[kind][self.place]


class Share:
    """Pieces of one fragment of which the same processes of a site have copies: the first of them exchanges."""

    def __init__(self, pieces: Sequence[OwnedSlice], copies: Group, form: str) -> None:
        self.pieces, self.copies, self.form = pieces, copies, form
        self.is_exchanged = copies.rank() == 0
        self._lengths = [piece.place.stop - piece.place.start for piece in pieces]
        self.numel = sum(count_padded(length, form) for length in self._lengths)

    def gather(self, read: Callable[[OwnedSlice], Tensor]) -> Tensor:
        """One float32 vector [numel] on the CPU."""
        flat, first = torch.zeros(self.numel), 0
        for piece, length in zip(self.pieces, self._lengths, strict=True):
            flat[first : first + length] = read(piece)
            first += count_padded(length, self.form)
        return flat

    def scatter(self, flat: Tensor, write: Callable[[OwnedSlice, Tensor], Any]) -> None:
        """The inverse: hand each piece its part, on its device."""
        first = 0
        for piece, length in zip(self.pieces, self._lengths, strict=True):
            write(piece, flat[first : first + length].to(piece.values.device))
            first += count_padded(length, self.form)


def count_longest_message(optimizer: MegatronOptimizer) -> int:
    """Bytes of the longest message of this process: its outer state, and some more."""
    owned = sum(stop - start for state in optimizer.states for start, stop in state.owned)
    pieces = sum(len(state.owned) + len(state.members) for state in optimizer.states)
    return 8 * (owned + BLOCK * pieces) + 2**20


def is_exchanging(optimizer: MegatronOptimizer) -> bool:
    """Return whether this process is the first of a site with some of its weights."""
    return any(state.buffer.reduction.copies.rank() == 0 for state in optimizer.states)


def _list_pieces(optimizer: MegatronOptimizer) -> Iterator[tuple[str, OwnedSlice, Group]]:
    """Yield what this process updates, parameter by parameter, and who has copies of it."""
    for state in optimizer.states:
        for member in state.members:
            for piece, place in state.pieces([(member.slot.start, member.slot.start + member.slot.numel)]):
                yield member.name, OwnedSlice(state, piece, place), state.buffer.reduction.copies


def divide(optimizer: MegatronOptimizer, fragments: int, form: str) -> list[list[Share]]:
    """The pieces of each fragment: layers in turn, what comes before them in the first, what follows in the last."""
    found: list[dict[int, tuple[Group, list[OwnedSlice]]]] = [{} for _ in range(fragments)]
    for name, piece, copies in _list_pieces(optimizer):
        layer = _LAYER.search(f".{name}")
        if layer is not None:
            fragment = int(layer[1]) % fragments
        else:
            fragment = 0 if "embedding" in name else fragments - 1
        found[fragment].setdefault(id(copies), (copies, []))[1].append(piece)
    return [[Share(pieces, copies, form) for copies, pieces in shares.values()] for shares in found]
