# SPDX-License-Identifier: Apache-2.0
"""Memory of a model's layers for the tokens of several sequences, so that each new token costs one position.

| kind        | example                                        | memory                                              |
|-------------|------------------------------------------------|-----------------------------------------------------|
| per token   | keys and values, latent vectors                | pages of 16 tokens, [pages * 16, ...] for each layer |
| recurrent   | a state space's state, a convolution's tail    | [...] for each sequence, whatever its length        |

Layers are grouped by how far they see: layers with the same window or chunk share separate pages, which are given back
as soon as no coming token sees them. Sequences that begin with the same tokens may share pages (`adopt`); a sequence
that writes into a shared page gets a copy of it first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.sequences.page_pool import PagePool
from megatron.core.sequences.token_layout import TokenLayout

PAGE_TOKENS = 16
"""Tokens of a page. Small, as no kernel asks for more, and half a page of each sequence is empty."""


class Reach(NamedTuple):
    """Distance back that a token of some layers sees; all tokens where both are None."""

    window: int | None = None
    """Tokens before itself."""
    chunk: int | None = None
    """Tokens of a chunk; a token sees its chunk from the first token on."""

    def find_first(self, position: int) -> int:
        """The first position that a token at this position sees."""
        first = 0 if self.chunk is None else position - position % self.chunk
        return first if self.window is None else max(first, position - self.window)

    def count_seen(self, tokens: int) -> int:
        """The most tokens that the last of so many sees."""
        limits = (tokens, self.chunk, None if self.window is None else self.window + 1)
        return min(limit for limit in limits if limit is not None)


class HeldSequence:
    """One sequence in a SequenceState: its length and its pages."""

    def __init__(self, groups: int) -> None:
        self.length = 0
        """Tokens that are held, including the call that was begun last."""
        self.tables: list[list[int | None]] = [[] for _ in range(groups)]
        """For each group of layers the pages in the order of the tokens; None for those that were given back."""
        self.recurrent: dict[int, tuple[Tensor, ...]] = {}
        self.noted = 0
        """Pages whose content was made known, or was known already."""


class _Span(NamedTuple):
    """Place of the tokens that a call reads of one sequence, a stretch of memory or pages that lie apart; or of several
    of one length, stretches that lie evenly spaced."""

    rows: slice
    first: int
    tokens: int
    pages: tuple[int, ...] | None
    distance: int = 0
    """From the first token of a sequence to the first of the next."""


class SequenceState:
    """Implements megatron.core.inference_context.InferenceContext; sequences have different lengths.

    `rows` are the sequences of a call, and `begin` says what it reads of each. Memory of a layer is taken when it first
    writes, in its shapes and dtype: keys and values take 2 * capacity * num_query_groups_per_rank * kv_channels
    elements, latent attention capacity * (kv_lora_rank + qk_pos_emb_head_dim) on each rank.
    """

    def __init__(
        self,
        sequences: int,
        max_tokens: int,
        *,
        reaches: Mapping[int, Reach] | None = None,
        capacity: int | None = None,
    ) -> None:
        """sequences: to begin with. max_tokens: of the longest sequence. reaches: of layers that do not see all tokens,
        by number. capacity: tokens of all sequences together; as many as they may have when None."""
        self.max_tokens = max_tokens
        self._reaches = reaches or {}
        self.groups = sorted({Reach(), *self._reaches.values()}, key=repr)
        self._group_of = {number: self.groups.index(reach) for number, reach in self._reaches.items()}
        self._all = self.groups.index(Reach())
        pages = -(-max_tokens // PAGE_TOKENS) * sequences if capacity is None else -(-capacity // PAGE_TOKENS)
        self.pools = [PagePool(pages) for _ in self.groups]
        self._layers: dict[int, tuple[Tensor, ...]] = {}
        self.is_recurrent = False
        """True where a layer has written a recurrent state."""
        self._rows_before: list[HeldSequence] = []  # of the call before, and of this one
        self._rows_now: list[HeldSequence] = []
        self._batched: dict[int, tuple[Tensor, ...]] = {}
        self.rows = [HeldSequence(len(self.groups)) for _ in range(sequences)]
        """The sequences of the next call, in its order."""

    # ---- sequences

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row, including the call that was begun last."""
        return [row.length for row in self.rows]

    @property
    def token_bytes(self) -> int:
        """Memory of a token in all layers that have written keys and values."""
        return sum(memory[0].nbytes for memory in self.list_memory())

    def add(self) -> HeldSequence:
        """A further sequence, which is empty and no row yet."""
        return HeldSequence(len(self.groups))

    def can_reserve(self, sequence: HeldSequence, length: int) -> bool:
        """Return True where every group has the pages that `reserve` would take."""
        return all(self._count(group, sequence, length) <= pool.num_available for group, pool in enumerate(self.pools))

    def reserve(self, sequence: HeldSequence, length: int, expected: int = 0) -> None:
        """Give a sequence pages for so many tokens, and copies of shared pages into which it would write. expected: how
        long it may become."""
        for group, pool in enumerate(self.pools):
            table = sequence.tables[group]
            start = sequence.length // PAGE_TOKENS
            if start < len(table) and (page := table[start]) is not None and not pool.may_write(page):
                own = _take(pool, None, 1)
                self._copy(group, page, own)
                pool.release(page)
                table[start] = own
            total = -(-length // PAGE_TOKENS)
            while len(table) < total:
                stretch = max(total, -(-expected // PAGE_TOKENS)) - len(table)
                table.append(_take(pool, table[-1] if table else None, stretch))

    def _count(self, group: int, sequence: HeldSequence, length: int) -> int:
        pool, table = self.pools[group], sequence.tables[group]
        start = sequence.length // PAGE_TOKENS
        copies = start < len(table) and (page := table[start]) is not None and not pool.may_write(page)
        return max(0, -(-length // PAGE_TOKENS) - len(table)) + copies

    def _copy(self, group: int, page: int, to: int) -> None:
        here, there = (slice(number * PAGE_TOKENS, (number + 1) * PAGE_TOKENS) for number in (page, to))
        for layer, held in self._layers.items():
            if self.find_group(layer) == group:
                for memory in held:
                    memory[there] = memory[here]

    def release(self, sequence: HeldSequence) -> None:
        """Give back all that a sequence holds."""
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            # From the end, so that the beginning of a reusable text is kept the longest.
            for page in reversed(table):
                if page is not None:
                    pool.release(page)
            table.clear()
        sequence.length = sequence.noted = 0
        sequence.recurrent = {}

    def free_memory(self) -> None:
        """Give back all memory, where no sequence holds anything; layers take it again when they next write."""
        self._layers, self._batched, self._rows_before, self._rows_now = {}, {}, [], []

    def give_back_unseen(self, sequence: HeldSequence) -> None:
        """Give back the pages that no token after the sequence's last one sees."""
        for pool, table, reach in zip(self.pools, sequence.tables, self.groups, strict=True):
            for index in range(reach.find_first(sequence.length) // PAGE_TOKENS - 1, -1, -1):
                page = table[index]
                if page is None:
                    break
                pool.release(page)
                table[index] = None

    # ---- content that serves again

    def note_content(self, sequence: HeldSequence, contents: Sequence[bytes]) -> None:
        """Make known what the full pages of a sequence hold; contents: `digest_pages` of its tokens."""
        full = min(sequence.length // PAGE_TOKENS, len(contents))
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            for page, content in zip(table[sequence.noted : full], contents[sequence.noted : full], strict=True):
                if page is not None:
                    pool.note(page, content)
        sequence.noted = max(sequence.noted, full)

    def adopt(self, sequence: HeldSequence, contents: Sequence[bytes], most: int) -> None:
        """Let an empty sequence begin with known pages: as many of its first as are known, except for tokens from
        `most` on, which are computed again."""
        for count in range(self.count_known(contents), 0, -1):
            length = min(count * PAGE_TOKENS, most)
            begins = [reach.find_first(length) // PAGE_TOKENS for reach in self.groups]
            found = [
                [pool.find(content) for content in contents[begin:count]]
                for pool, begin in zip(self.pools, begins, strict=True)
            ]
            if all(page is not None for pages in found for page in pages):
                break
        else:
            return
        for pool, table, begin, pages in zip(self.pools, sequence.tables, begins, found, strict=True):
            table[:] = [*[None] * begin, *pages]
            for page in pages:
                assert page is not None
                pool.share(page)
        sequence.length = length

    def count_known(self, contents: Sequence[bytes]) -> int:
        """Return how many pages from the first on are known to the layers that see all tokens."""
        pool = self.pools[self._all]
        return next((index for index, content in enumerate(contents) if pool.find(content) is None), len(contents))

    # ---- calls

    def begin(self, new: Sequence[int], wanted: Sequence[int] | None = None, *, is_packed: bool = False) -> TokenLayout:
        """Describe the next call, of so many tokens of each row, at least one; returned and kept as `layout`. wanted:
        see TokenLayout. is_packed: even where all rows are in step."""
        rows, past = self.rows, tuple(self.lengths)
        is_packed = is_packed or len(set(zip(past, new, wanted or new, strict=True))) > 1
        self.layout = TokenLayout(tuple(new), past, is_packed, None if wanted is None else tuple(wanted))
        longest = self.layout.longest
        assert longest <= self.max_tokens, f"{longest} tokens do not fit into a state of {self.max_tokens}"
        for row, more in zip(rows, new, strict=True):
            self.reserve(row, row.length + more, self.max_tokens)
            row.length += more
        self._rows_before, self._rows_now = self._rows_now, list(rows)
        self._places: dict[int, Tensor] = {}
        self._spans: dict[int, list[_Span]] = {}
        return self.layout

    def update(self, layer_number: int, *new: Tensor) -> list[tuple[slice, tuple[Tensor, ...]]]:
        """See InferenceContext; returns views where a sequence's pages lie side by side."""
        group, held = self.find_group(layer_number), self.find_memory(layer_number, new)
        if group not in self._spans:
            self._spans[group] = self._find_spans(group)
            self._places[group] = self._find_places(group).to(new[0].device, non_blocking=True)
        places = self._places[group]
        for memory, x in zip(held, new, strict=True):
            memory.index_copy_(0, places, x.flatten(0, 1))
        return [(span.rows, tuple([_read(memory, span) for memory in held])) for span in self._spans[group]]

    def find_group(self, layer_number: int) -> int:
        """The number of the group of layers to which one belongs."""
        return self._group_of.get(layer_number, self._all)

    def find_memory(self, layer_number: int, new: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return all of a layer's memory, [places, ...] each, taken now where it writes for the first time."""
        if layer_number not in self._layers:
            slots = self.pools[self.find_group(layer_number)].pages * PAGE_TOKENS
            self._layers[layer_number] = tuple(x.new_empty((slots, *x.shape[2:])) for x in new)
        return self._layers[layer_number]

    def list_memory(self) -> list[Tensor]:
        """List all that layers have taken."""
        return [memory for held in self._layers.values() for memory in held]

    def find_padding(self, layer_number: int) -> None:
        """See InferenceContext: there is none."""

    def _find_places(self, group: int) -> Tensor:
        """Return where in memory the tokens of the call go, int64, in their order in the call."""
        found: list[int] = []
        for row, past, new in zip(self.rows, self.layout.past, self.layout.new, strict=True):
            table = row.tables[group]
            for position in range(past, past + new):
                page = table[position // PAGE_TOKENS]
                assert page is not None, f"position {position} was given back"
                found.append(page * PAGE_TOKENS + position % PAGE_TOKENS)
        places = torch.tensor(found)
        return places if self.layout.is_packed else places.view(len(self.rows), -1).t().flatten()

    def _find_spans(self, group: int) -> list[_Span]:
        """Return what the tokens of a call see of each row; rows whose single tokens see stretches of one length that
        lie evenly spaced are one."""
        layout = self.layout
        spans: list[_Span] = []
        for index, (row, past, new) in enumerate(zip(self.rows, layout.past, layout.new, strict=True)):
            span = self._find_span(group, index, row, past)
            before = spans[-1] if spans else None
            if before is not None and new == 1 and layout.new[index - 1] == 1 and before.tokens == span.tokens:
                last = before.first + (index - 1 - before.rows.start) * before.distance
                distance = span.first - last
                if before.pages is span.pages is None and distance > 0 and before.distance in (0, distance):
                    spans[-1] = before._replace(rows=slice(before.rows.start, index + 1), distance=distance)
                    continue
            spans.append(span)
        return spans

    def _find_span(self, group: int, index: int, row: HeldSequence, past: int) -> _Span:
        """Return what the tokens of a call see of a row."""
        first = self.groups[group].find_first(past)
        begin = first // PAGE_TOKENS
        pages = [page for page in row.tables[group][begin : -(-row.length // PAGE_TOKENS)] if page is not None]
        offset, tokens = first - begin * PAGE_TOKENS, row.length - first
        if pages[-1] - pages[0] == len(pages) - 1 and pages == [*range(pages[0], pages[-1] + 1)]:
            return _Span(slice(index, index + 1), pages[0] * PAGE_TOKENS + offset, tokens, None)
        return _Span(slice(index, index + 1), offset, tokens, tuple(pages))

    def read_recurrent(self, layer_number: int, *initial: Tensor) -> tuple[Tensor, ...]:
        """See InferenceContext."""
        # The same sequences as in the call before, as in most calls: their states lie side by side already.
        if self._rows_before == self.rows and all(self.layout.past):
            return self._batched[layer_number]
        states = [
            row.recurrent[layer_number] if past else initial
            for row, past in zip(self.rows, self.layout.past, strict=True)
        ]
        return tuple(torch.stack(parts) for parts in zip(*states, strict=True))

    def write_recurrent(self, layer_number: int, *state: Tensor) -> None:
        """See InferenceContext."""
        self.is_recurrent = True
        self._batched[layer_number] = state
        for index, row in enumerate(self.rows):
            row.recurrent[layer_number] = tuple(x[index] for x in state)

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget all but the first tokens of each row, as many as `lengths` says; the next ones are written over them.
        Recurrent states cannot be rewound."""
        pairs = list(zip(lengths, self.lengths, strict=True))
        assert all(length <= held for length, held in pairs), f"(length, tokens held): {pairs}"
        is_kept = all(length in (0, held) for length, held in pairs)
        assert is_kept or not self.is_recurrent, "a recurrent state cannot be rewound, but to nothing"
        for row, length in zip(self.rows, lengths, strict=True):
            row.length = length

    def select(self, sequences: Sequence[int]) -> None:
        """Go on with these rows only, in this order; the others give back what they hold."""
        kept = [self.rows[index] for index in sequences]
        for row in self.rows:
            if row not in kept:
                self.release(row)
        self.rows = kept


def digest_pages(tokens: Sequence[int], before: Sequence[bytes] = (), reader: bytes = b"") -> list[bytes]:
    """Digests of the full pages of a text, each of all tokens up to its end. before: the digests of its first pages.
    reader: a name of the model that reads it, where several share the pages."""
    found = list(before)
    for index in range(len(found), len(tokens) // PAGE_TOKENS):
        page = tokens[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS]
        known = found[-1] if found else reader
        found.append(blake2b(known + b"".join(token.to_bytes(8, "little") for token in page), digest_size=16).digest())
    return found


def _read(memory: Tensor, span: _Span) -> Tensor:
    """[slots, ...] -> [tokens, sequences, ...]."""
    if span.pages is None:
        token, *inner = memory.stride()
        shape = (span.tokens, span.rows.stop - span.rows.start, *memory.shape[1:])
        return memory.as_strided(shape, (token, span.distance * token, *inner), span.first * token)
    pages = memory.unflatten(0, (-1, PAGE_TOKENS))[list(span.pages)]
    return pages.flatten(0, 1)[span.first : span.first + span.tokens].unsqueeze(1)


def _take(pool: PagePool, before: int | None, stretch: int) -> int:
    page = pool.take(before, stretch)
    assert page is not None, f"none of {pool.pages} pages is free"
    return page
