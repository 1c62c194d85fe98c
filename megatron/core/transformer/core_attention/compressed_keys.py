# SPDX-License-Identifier: Apache-2.0
"""Attention of each query to the tokens of a window and to some compressed entries, with one key for all heads, which
is its value, too, and a sink for each head (DeepSeek-V4, 2026, section 2.3).

Everything works on blocks of queries, so that nothing has the size of the square of a sequence; backward computes
scores again.

s: queries, t: tokens, e: entries, b: batch, n: heads, c: channels, k: entries that a query chooses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.core.tensor_parallel.products import at_least_float32, wide_dtype
from megatron.core.transformer.core_attention.block_kernels import (
    PlainKernel,
    Rule,
    add_sinks,
    compute_sinks_grad,
    find_shared_gradients,
)
from megatron.core.transformer.core_attention.chosen_keys import QueryBlock

_BLOCK_ELEMENTS = 2**22
"""Scores of a block."""
_FEWEST_ROWS = 64
"""Queries of a block, where there are so many: a short window would make blocks of few."""


class Sight(NamedTuple):
    """Bounds of what each query may see, int64 [s] each, on the host."""

    place: np.ndarray
    """Place of the query's token among the tokens."""
    first: np.ndarray
    """The first token that it sees."""
    begin: np.ndarray
    """The first entry that it may see."""
    end: np.ndarray
    """Behind the last one."""


class EntryPlaces:
    """Queries of a process with what they see, block by block."""

    def __init__(self, sight: Sight, entries: int, device: torch.device) -> None:
        """entries: of the whole sequence."""
        self.sight, self.entries, self.device = sight, entries, device
        self.most_seen = int((sight.end - sight.begin).max())
        """Entries that a query may see at most."""
        self._window = int((sight.place - sight.first).max()) + 1
        # Pieces of context-parallel ranks do not follow one another.
        breaks = np.flatnonzero(np.diff(sight.place) != 1) + 1
        self._bounds = [0, *breaks.tolist(), len(sight.place)]

    def blocks(self, elements: int) -> Iterator[QueryBlock]:
        """Yield blocks of queries, with entries for keys. elements: numbers that a query needs for each entry."""
        for rows in self._list_rows(max(1, _BLOCK_ELEMENTS // (elements * max(1, self.entries)))):
            entries = self._list_entries(rows)
            yield QueryBlock(rows, entries, self._is_within(entries, self.sight.begin, self.sight.end, rows))

    def blocks_of_keys(self, elements: int) -> Iterator[tuple[slice, slice, slice, Tensor, Tensor]]:
        """Yield queries, tokens and entries of a block, and which of these each query may see, bool [rows, tokens] and
        [rows, entries]."""
        place, first = self.sight.place, self.sight.first
        size = max(1, _BLOCK_ELEMENTS // (elements * (self._window + self.entries)))
        for rows in self._list_rows(min(size, max(self._window, _FEWEST_ROWS))):
            tokens = slice(int(first[rows].min()), int(place[rows.stop - 1]) + 1)
            entries = self._list_entries(rows)
            seen = self._is_within(tokens, first, place + 1, rows)
            yield rows, tokens, entries, seen, self._is_within(entries, self.sight.begin, self.sight.end, rows)

    def _list_rows(self, size: int) -> Iterator[slice]:
        for start, stop in zip(self._bounds, self._bounds[1:], strict=False):
            yield from (slice(at, min(at + size, stop)) for at in range(start, stop, size))

    def _list_entries(self, rows: slice) -> slice:
        return slice(int(self.sight.begin[rows.start]), int(self.sight.end[rows.stop - 1]))

    def _is_within(self, keys: slice, first: np.ndarray, end: np.ndarray, rows: slice) -> Tensor:
        numbers = torch.arange(keys.start, keys.stop, device=self.device)
        bounds = torch.tensor([first[rows].tolist(), end[rows].tolist()]).to(self.device, non_blocking=True)
        return (numbers >= bounds[0, :, None]) & (numbers < bounds[1, :, None])


class Attended(NamedTuple):
    """Result of attention."""

    output: Tensor
    """[s, b, n, c]."""
    log_sum: Tensor
    """Logarithm of the softmax's denominator, [s, b, n] float32; without a gradient."""


class EntryKeys(NamedTuple):
    """Keys of attention."""

    tokens: Tensor
    """[t, b, c]."""
    entries: Tensor
    """[e, b, c]."""
    sinks: Tensor
    """Scores of further keys without values, [n] float32."""


def attend_entries(
    query: Tensor, keys: EntryKeys, chosen: Tensor | None, places: EntryPlaces, scale: float
) -> Attended:
    """Attend from query [s, b, n, c] to the tokens and entries that places show. chosen: int32 [s, b, k], the entries
    that each query takes of them, -1 for none; all when None."""
    return Attended(*_AttendEntries.apply(query, *keys, chosen, places, scale))


class _AttendEntries(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, tokens: Tensor, entries: Tensor, sinks: Tensor, chosen: Tensor | None,
        places: EntryPlaces, scale: float,
    ) -> Any:  # fmt: skip
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        log_sum = query.new_empty(query.shape[:3], dtype=wide_dtype(query))
        kernel = PlainKernel(scale)
        for rows, _, _, inputs, rule in _cut(query, tokens, entries, chosen, places):
            part, logs = add_sinks(*kernel.forward(*inputs, rule), sinks)
            output[rows], log_sum[rows] = part.permute(2, 0, 1, 3), logs.permute(2, 0, 1)
        # Scores are not kept: with the denominators backward computes the same ones again.
        ctx.places, ctx.scale = places, scale
        ctx.save_for_backward(query, tokens, entries, sinks, chosen, output, log_sum)
        ctx.mark_non_differentiable(log_sum)
        return output, log_sum

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, _: Tensor) -> Any:
        query, tokens, entries, sinks, chosen, output, log_sum = ctx.saved_tensors
        kernel = PlainKernel(ctx.scale)
        grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
        grad_tokens, grad_entries = (torch.zeros(x.shape, dtype=wide_dtype(x), device=x.device)
                                     for x in (tokens, entries))  # fmt: skip
        grad_sinks = torch.zeros_like(sinks)
        for rows, seen, among, inputs, rule in _cut(query, tokens, entries, chosen, ctx.places):
            grad, merged = (x[rows].permute(1, 2, 0, 3).contiguous() for x in (grad_output, output))
            logs = log_sum[rows].permute(1, 2, 0).contiguous()
            of_query, of_keys = find_shared_gradients(kernel, grad, inputs[:2], (merged, logs), rule)
            grad_query[rows] = of_query.permute(2, 0, 1, 3)
            added = at_least_float32(of_keys).squeeze(1).transpose(0, 1)  # [t + e, b, c]
            of_tokens, of_entries = added.split([seen.stop - seen.start, among.stop - among.start])
            grad_tokens[seen] += of_tokens
            grad_entries[among] += of_entries
            grad_sinks += compute_sinks_grad(grad, merged, logs, sinks).to(sinks.dtype)
        return grad_query, grad_tokens.to(tokens.dtype), grad_entries.to(entries.dtype), grad_sinks, None, None, None


def _cut(
    query: Tensor, tokens: Tensor, entries: Tensor, chosen: Tensor | None, places: EntryPlaces
) -> Iterator[tuple[slice, slice, slice, tuple[Tensor, Tensor, Tensor], Rule]]:
    """Queries, tokens and entries of each block, and what a kernel multiplies: query [b, n, rows, c], key [b, 1, t + e,
    c], which is the value, too."""
    _, batch, heads, _ = query.shape
    for rows, seen, among, sees_tokens, sees_entries in places.blocks_of_keys(batch * heads):
        key = torch.cat((tokens[seen], entries[among])).transpose(0, 1).unsqueeze(1)
        sees_entries = sees_entries.expand(batch, -1, -1)
        if chosen is not None:
            sees_entries = _mark(chosen[rows].transpose(0, 1), among)
        sees = torch.cat((sees_tokens.expand(batch, -1, -1), sees_entries), dim=-1)
        inputs = query[rows].permute(1, 2, 0, 3).contiguous(), key, key
        yield rows, seen, among, inputs, Rule(False, mask=~sees.unsqueeze(1))


def _mark(chosen: Tensor, among: slice) -> Tensor:
    """Numbers of chosen keys [..., k], -1 for none -> bool [..., keys] for the keys of a slice."""
    count = among.stop - among.start
    places = (chosen.long() - among.start).masked_fill(chosen < 0, count)
    marks = torch.zeros(*chosen.shape[:-1], count + 1, dtype=torch.bool, device=chosen.device)
    return marks.scatter_(-1, places, True)[..., :count]
