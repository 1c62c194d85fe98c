# SPDX-License-Identifier: Apache-2.0
"""The layout of one call: the tokens of which sequences its rows hold, and how many came before.

    packed     x [t, 1, ...]    a0 a1 a2 b0 c0 c1        new 3 1 2: one sequence after the other, without padding
    in step    x [s, b, ...]    a0 b0 c0                 new 2 2 2: side by side, all at the same positions
                                a1 b1 c1

Documents of a packed batch have no past. In generation the past of a sequence is what its state holds of it: prompts of
unequal lengths are read packed, and go on packed, one token each; prompts of one length stay in step. With context
parallelism a layout has the tokens of all ranks, in the order of the sequence (context_parallel/sharding.py cuts them).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, groupby
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Segment(NamedTuple):
    """Tokens [first, end) of one document or chunk, which begins at `start`."""

    start: int
    first: int
    end: int


@dataclass(frozen=True)
class TokenLayout:
    """The sequences of one call and their tokens. Made on the host; on a device when first needed there."""

    new: tuple[int, ...]
    """Tokens of each sequence in this call, none of them 0."""
    past: tuple[int, ...]
    """Tokens of each sequence in the calls before."""
    is_packed: bool = True
    """True where sequences follow one another, [t, 1, ...]; otherwise all are in step, [s, b, ...]."""
    wanted: tuple[int, ...] | None = None
    """Of each sequence how many of its last tokens need logits, equally many where all are in step; None: all."""
    _kept: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of_documents(cls, bounds: Sequence[int]) -> TokenLayout:
        """Packed documents without a past. bounds: 0, ..., the length of the row, rising."""
        new = tuple(end - start for start, end in zip(bounds, bounds[1:], strict=False))
        return cls(new, (0,) * len(new))

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Beginnings of packed sequences, and the end of the last one."""
        return tuple(accumulate(self.new, initial=0))

    @cached_property
    def has_single_tokens(self) -> bool:
        """True where every sequence has one token in this call."""
        return max(self.new) == 1

    @property
    def length(self) -> int:
        """Tokens of all sequences in this call."""
        return self.bounds[-1]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence after this call."""
        return max(past + new for past, new in zip(self.past, self.new, strict=True))

    @cached_property
    def starts(self) -> Tensor:
        """For every packed token the place in the row where its sequence begins, int64 [t], on the host."""
        return torch.tensor(self.bounds[:-1]).repeat_interleave(torch.tensor(self.new))

    @cached_property
    def sequences(self) -> Tensor:
        """For every packed token the number of its sequence, int64 [t], on the host."""
        return torch.arange(len(self.new)).repeat_interleave(torch.tensor(self.new))

    @cached_property
    def positions(self) -> Tensor:
        """Positions in their sequences of the tokens along the first dimension: int64 [t] or, in step, [s]; on the
        host."""
        if not self.is_packed:
            return torch.arange(self.past[0], self.longest)
        return torch.arange(self.length) - self.starts + torch.tensor(self.past)[self.sequences]

    def move_places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`positions` and `sequences` of packed tokens on a device, copied once: places in memory of [positions,
        sequences, ...]."""
        positions, sequences = self.positions, self.sequences
        return self.keep(
            ("places", device),
            lambda: (positions.to(device, non_blocking=True), sequences.to(device, non_blocking=True)),
        )

    def segments(self, first: int, end: int, chunk: int | None = None) -> Iterator[Segment]:
        """The places [first, end) of a packed row, divided where documents end, and these into chunks of so many tokens
        from their beginning."""
        index = bisect_right(self.bounds, first) - 1
        while first < end:
            start, stop = self.bounds[index], min(end, self.bounds[index + 1])
            if chunk is not None:
                start = first - (first - start) % chunk
                stop = min(stop, start + chunk)
            yield Segment(start, first, stop)
            index += stop == self.bounds[index + 1]
            first = stop

    def group(self, x: Tensor) -> list[tuple[slice, Tensor]]:
        """The sequences by runs that have equally many tokens: which of them, and their part of x as [n, sequences,
        ...], n tokens of each. A single run where all are in step."""
        if not self.is_packed:
            return [(slice(0, len(self.new)), x)]
        found = []
        for tokens, members in groupby(range(len(self.new)), key=self.new.__getitem__):
            run = list(members)
            part = x[self.bounds[run[0]] : self.bounds[run[-1] + 1], 0]
            found.append((slice(run[0], run[-1] + 1), part.unflatten(0, (len(run), tokens)).transpose(0, 1)))
        return found

    def cut(self, x: Tensor, runs: Sequence[slice]) -> list[Tensor]:
        """The tokens of some sequences after the other, of equally many tokens each: [n, sequences of the run, ...]."""
        if not self.is_packed:
            return list(x.split([run.stop - run.start for run in runs], dim=1)) if len(runs) > 1 else [x]
        counts = [run.stop - run.start for run in runs]
        parts = x.split([self.bounds[run.stop] - self.bounds[run.start] for run in runs])
        return [
            part if count == 1 else part.unflatten(0, (count, -1)).squeeze(2).transpose(0, 1)
            for part, count in zip(parts, counts, strict=True)
        ]

    def split(self, x: Tensor) -> list[Tensor]:
        """The tokens of each sequence, [n, 1, ...]."""
        return list(x.split(self.new) if self.is_packed else x.split(1, dim=1))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `group` and of `split`: parts [n, sequences, ...] -> [t, 1, ...] or, in step, [s, b, ...]."""
        if not self.is_packed:
            return torch.cat(list(parts), dim=1) if len(parts) > 1 else parts[0]
        return torch.cat([x if x.shape[1] == 1 else x.transpose(0, 1).flatten(0, 1).unsqueeze(1) for x in parts])

    def join_tokens(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """The ids of each sequence as a model reads them: int64 [1, t] or, in step, [b, s]."""
        return torch.tensor([list(chain.from_iterable(tokens))] if self.is_packed else tokens)

    def take_last(self, x: Tensor, count: int) -> Tensor:
        """The last `count` tokens of each sequence: [count, sequences, ...]."""
        return torch.cat([part[-count:] for _, part in self.group(x)], dim=1)

    def take_wanted(self, x: Tensor) -> Tensor:
        """The tokens that need logits: [k, 1, ...], one sequence after the other, or in step [wanted, b, ...]."""
        if self.wanted is None or self.wanted == self.new:
            return x
        if not self.is_packed:
            return x[x.shape[0] - self.wanted[0] :]
        ends = self.bounds[1:]
        return torch.cat([x[end - count : end] for end, count in zip(ends, self.wanted, strict=True)])

    def keep(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result of `make`, made once for this layout: every layer needs the same, and it may be on a device."""
        if key not in self._kept:
            self._kept[key] = make()
        kept: T = self._kept[key]
        return kept
