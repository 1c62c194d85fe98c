# SPDX-License-Identifier: Apache-2.0
"""p2p: every rank keeps its queries, and keys and values go round (Liu et al., "Ring Attention", 2023).

Rank r at step i holds the keys and values of rank j = r - i, and with the zigzag split (context_parallel/sharding.py)
sees of them

    j = r    its own: causal               j < r    the first piece, with all queries: no mask
                                           j > r    both pieces, with the queries of its second piece: no mask

so that every step after the first is half a square, on every rank. The next block travels while this one is computed.
Backward goes round once more, and the gradients of keys and values travel with them until they are home.

A given mask [b or 1, 1, s, t] replaces the causal one: then all queries meet all keys, and its columns are cut to the
block's. Documents, chunks and sliding windows hide more of a block, or all of it: then it is only passed on. A kernel
that takes bands computes what is left without a mask, piece by piece: of two pieces only the document that spans both
meets, a rectangle of its queries and keys, of which a window leaves a band.

                 keys of an earlier piece
    queries     |. . . d d d|               d: the document that has begun in the earlier piece and goes on here
    of a        |. . . . d d|               window: the first queries see furthest back, later ones nothing at all
    later one   |. . . . . .|
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.collectives import pass_on
from megatron.core.context_parallel.sharding import list_pieces_of_rank, list_positions_of_rank, shard_sequence
from megatron.core.process_groups_config import Group
from megatron.core.transformer.core_attention.block_kernels import (
    Band,
    BlockKernel,
    MergedBlocks,
    Rule,
    Sequences,
    add_sinks,
    compute_sinks_grad,
    draw_seed,
)
from megatron.core.transformer.core_attention.interface import AttentionInputs, Visible

# In backward both are on their way between the same two ranks at once: a tag keeps a gradient from being received as a
# block of keys.
_KEYS_TAG, _GRADS_TAG = 1, 2
_ALL = slice(None)


class RingAttention:
    """Attention over sequences whose zigzag shards the group's ranks hold."""

    def __init__(self, kernel: BlockKernel, group: Group, *, draws_dropout: bool = False) -> None:
        """kernel: attention of some queries over some keys. draws_dropout: whether it has dropout in training."""
        self.kernel, self.group, self.draws_dropout = kernel, group, draws_dropout
        self.name = f"keys and values passed around {group.size()} ranks, {kernel.name}"

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        """See CoreAttention."""
        seed = draw_seed() if self.draws_dropout and inputs.training else None
        call = _RingCall(self.kernel, self.group, inputs.visible, seed)
        result: Tensor = _RingAttention.apply(inputs.query, inputs.key, inputs.value, inputs.sinks, call)
        return result.flatten(2)  # [s/cp, b, n, dv] -> [s/cp, b, n * dv]


class RingBlock(NamedTuple):
    """Choice of the rank's queries and of the keys at hand in one step, and the mask between them.

    queries, keys: stretches of the tokens that a rank holds. causal: query and key of one index are at one position.
    mask: bool, True where a key is hidden, broadcastable to [b, n, queries, keys]. band: instead of a mask.
    """

    queries: slice
    keys: slice
    causal: bool
    mask: Tensor | None = None
    band: Band | None = None

    def rule(self, seed: int | None) -> Rule:
        """For the kernel. seed: of the dropout."""
        return Rule(self.causal, self.mask, self.band, seed)


def choose_causal_block(rank: int, source: int, length: int) -> RingBlock:
    """Return what the queries of `rank` see of the keys of `source` under a causal mask; both hold `length` tokens."""
    half = length // 2
    if source == rank:
        # Within a rank's two pieces a later index is a later position, so that the triangle is the usual one.
        return RingBlock(_ALL, _ALL, True)
    if source < rank:
        # All its tokens come after the first piece of `source`, and before the second one.
        return RingBlock(_ALL, slice(0, half), False)
    # The source's two pieces lie between ours: after our first piece, and before our second one.
    return RingBlock(slice(half, None), _ALL, False)


def list_blocks_in_bands(ranks: tuple[int, int], size: int, query: Tensor, visible: Visible) -> list[RingBlock]:
    """Return what the queries [s, b, n, d] of one rank see of the keys of another one, by pieces, where documents,
    chunks or a window hide some. ranks: these two, of `size`."""
    rank, source = ranks
    half = query.shape[0] // 2
    held = [list_pieces_of_rank(each, size) for each in (rank, source)]
    blocks = []
    if rank == source:
        # Both pieces see themselves, in one call: where the second one begins, so does a segment.
        lengths = [
            end - begin for piece in held[0] for _, begin, end in visible.segments(piece * half, (piece + 1) * half)
        ]
        window = visible.window if visible.window is not None and visible.window < max(lengths) - 1 else None
        lengths *= query.shape[1]
        blocks.append(RingBlock(_ALL, _ALL, True, band=Band(window, Sequences.build(lengths, lengths, query.device))))
    for row, piece in enumerate(held[0]):
        for column, earlier in enumerate(held[1]):
            if earlier < piece:
                for queries, keys, window in _meet(visible, piece * half, earlier * half, half):
                    blocks.append(
                        RingBlock(
                            slice(row * half + queries.start, row * half + queries.stop),
                            slice(column * half + keys.start, column * half + keys.stop),
                            False,
                            band=None if window is None else Band(window),
                        )
                    )
    return blocks


def _meet(visible: Visible, first: int, first_key: int, length: int) -> Iterator[tuple[slice, slice, int | None]]:
    """Yield which queries of the piece at position `first` see which keys of the earlier piece at `first_key`, both of
    `length` tokens, and within which window of the last ones; nothing where none sees any."""
    # Only what begins before the queries' piece can have keys there; every later segment begins within it.
    start, _, stop = next(visible.segments(first, first + length))
    begin, end = max(start, first_key), first_key + length
    if visible.window is None:
        if begin < end:
            yield slice(0, stop - first), slice(begin - first_key, length), None
        return
    # The first query sees furthest back; the last that sees a key here sees the last one.
    begin, stop = max(begin, first - visible.window), min(stop, end + visible.window)
    if begin >= end or stop <= first:
        return
    queries, keys = slice(0, stop - first), slice(begin - first_key, length)
    if stop - 1 - visible.window <= begin:  # even the last query sees all of them
        yield queries, keys, None
        return
    # Counted as if the last query stood at the last key's position.
    window = visible.window - (first - begin) + (end - begin) - (stop - first)
    # The flash kernel ends a band without an end as many keys after the query's position as there are keys: of many
    # queries and few keys, the first queries would miss keys. They see all, and are computed without a band.
    if stop - first > end - begin + 1:
        seeing_all = begin + visible.window + 1 - first
        yield slice(0, seeing_all), keys, None
        queries = slice(seeing_all, stop - first)
    yield queries, keys, window


@dataclass(frozen=True)
class _RingCall:
    """Settings of one call of ring attention besides its tensors; the same in forward and backward."""

    kernel: BlockKernel
    group: Group
    visible: Visible
    seed: int | None

    def find_source(self, step: int) -> int:
        """The rank whose keys and values this rank holds in this step."""
        return (self.group.rank() - step) % self.group.size()

    def derive_seed(self, step: int) -> int | None:
        """Seed of the dropout of one step, or None. By the source of the step only: backward, which meets the same
        blocks in the same steps, draws the same elements."""
        return None if self.seed is None else self.seed + self.find_source(step)

    def blocks(self, step: int, query: Tensor) -> list[RingBlock]:
        """Return which queries and keys meet in one step, of this rank's queries [s, b, n, d] and another's keys; none
        where no query sees any key."""
        visible = self.visible
        hides_more = visible.documents is not None or visible.window is not None or visible.chunk is not None
        if hides_more and self.kernel.takes_bands and visible.causal and visible.mask is None:
            ranks, size = (self.group.rank(), self.find_source(step)), self.group.size()

            def build() -> list[RingBlock]:
                return list_blocks_in_bands(ranks, size, query, visible)

            # Documents belong to a micro-batch, in which all layers have the same blocks.
            key = ("ring", ranks, size, query.shape[:2], query.device, visible.window, visible.chunk)
            return build() if visible.documents is None else visible.documents.keep(key, build)
        block = self._block(step, query.shape[0], query.device)
        return [] if block is None else [block]

    def _block(self, step: int, tokens: int, device: torch.device) -> RingBlock | None:
        """The same as one block, with a mask where not all of it is seen."""
        rank, size, source = self.group.rank(), self.group.size(), self.find_source(step)
        visible, whole = self.visible, tokens * self.group.size()
        if visible.mask is not None or not visible.causal:
            # A mask has all keys in the order of the sequence, and the block's columns are the source's zigzag pieces.
            mask = None if visible.mask is None else shard_sequence(visible.mask, source, size, dim=-1)
            if visible.causal:
                queries, keys = (list_positions_of_rank(whole, each, size, device) for each in (rank, source))
                own = queries.unsqueeze(1)
                outside = (keys > own) | (keys < visible.find_first_seen(queries).unsqueeze(1))
                mask = outside if mask is None else mask | outside
            return RingBlock(_ALL, _ALL, False, mask)
        block = choose_causal_block(rank, source, tokens)
        if visible.documents is None and visible.window is None and visible.chunk is None:
            return block
        # On the host, where the documents' bounds are: to look at a result on a device would mean to wait for it, in
        # every step of every layer.
        queries = list_positions_of_rank(whole, rank, size)[block.queries]
        keys = list_positions_of_rank(whole, source, size)[block.keys]
        firsts = visible.find_first_seen(queries)
        # Every query begins to see after the last of these keys: nothing to compute.
        if firsts.min() > keys.max():
            return None
        if firsts.max() <= keys.min():  # nothing more is hidden, and a kernel without a mask will do
            return block
        # Made where it is used: the positions that are copied are few.
        seen, firsts = keys.to(device, non_blocking=True), firsts.to(device, non_blocking=True)
        return block._replace(mask=seen < firsts.unsqueeze(1))


class _KeysAndValues:
    """Keys [s, b, g, d] and values [s, b, g, dv] of one rank in one stretch of memory, to be sent as one message."""

    def __init__(self, flat: Tensor, shapes: tuple[torch.Size, torch.Size]) -> None:
        self.flat, self.shapes = flat, shapes
        keys, values = flat.split([shape.numel() for shape in shapes])
        self.keys, self.values = keys.view(shapes[0]), values.view(shapes[1])

    @classmethod
    def pack(cls, key: Tensor, value: Tensor) -> _KeysAndValues:
        """Copy keys and values into one stretch of memory."""
        return cls(torch.cat((key.reshape(-1), value.reshape(-1))), (key.shape, value.shape))

    def zeros(self) -> _KeysAndValues:
        """Zeros of the same shapes in float32, to which the ranks add their gradients."""
        return _KeysAndValues(torch.zeros_like(self.flat, dtype=torch.float32), self.shapes)

    def blocks(self, keys: slice) -> tuple[Tensor, Tensor]:
        """Keys [b, g, t, d] and values [b, g, t, dv] of some tokens, as views that may be added to."""
        return _heads_first(self.keys)[:, :, keys], _heads_first(self.values)[:, :, keys]


class _RingTransfer:
    """Keys and values, or their gradients, on their way to the next rank, and those coming from the previous one."""

    def __init__(self, sent: _KeysAndValues, group: Group, tag: int) -> None:
        self.sent, self.received = sent, torch.empty_like(sent.flat)
        # `sent` is held by this object until the transfer is over: its memory must not be used again before.
        self.works = pass_on(sent.flat, self.received, group, tag)

    def wait(self) -> _KeysAndValues:
        """Wait for both transfers; return what the previous rank sent."""
        for work in self.works:
            work.wait()
        return _KeysAndValues(self.received, self.sent.shapes)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, call: _RingCall) -> Tensor:
        q, size = _heads_first(query), call.group.size()
        # A copy, because the caller's keys and values are saved for backward and are not next to each other in memory.
        merged, at_hand = MergedBlocks(q, value.shape[-1]), _KeysAndValues.pack(key, value)
        for step in range(size):
            # Sent before they are computed with, so that the next block is here when this one is done. The last block
            # need not go on: backward begins with the local keys again.
            passing = _RingTransfer(at_hand, call.group, _KEYS_TAG) if step < size - 1 else None
            for block in call.blocks(step, query):
                k, v = at_hand.blocks(block.keys)
                rule = block.rule(call.derive_seed(step))
                merged.add(block.queries, *call.kernel.forward(q[:, :, block.queries], k, v, rule))
            at_hand = passing.wait() if passing is not None else at_hand
        out, log_sum = merged.out, merged.log_sum
        if sinks is not None:
            # After the last merge, and only once: a sink in every block would count it once for every rank.
            out, log_sum = add_sinks(out, log_sum, sinks)
        # In the order in which the next layer reads it, which would otherwise keep a copy.
        turned = out.permute(2, 0, 1, 3)  # [b, n, s, dv] -> [s, b, n, dv]
        output = torch.empty(turned.shape, dtype=query.dtype, device=query.device).copy_(turned)
        ctx.call = call
        ctx.save_for_backward(query, key, value, sinks, output, log_sum)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        query, key, value, sinks, output, log_sum = ctx.saved_tensors
        call: _RingCall = ctx.call
        size = call.group.size()
        q, out, grad = (_heads_first(x) for x in (query, output, grad_output))
        # Queries stay at home, so that their gradient only adds up over the steps; in float32, one addend for each
        # rank.
        grad_q = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        at_hand = _KeysAndValues.pack(key, value)
        grads_under_way: _RingTransfer | None = None
        for step in range(size):
            passing = _RingTransfer(at_hand, call.group, _KEYS_TAG) if step < size - 1 else None
            additions: list[tuple[slice, Tensor, Tensor]] = []
            for block in call.blocks(step, query):
                rows = block.queries
                k, v = at_hand.blocks(block.keys)
                result, rule = (out[:, :, rows], log_sum[:, :, rows]), block.rule(call.derive_seed(step))
                add_q, *add = call.kernel.backward(grad[:, :, rows], (q[:, :, rows], k, v), result, rule)
                grad_q[:, :, rows] += add_q
                additions.append((block.keys, add[0], add[1]))
            # The gradients of this block, as the ranks before have left them, were under way during the products.
            grads = at_hand.zeros() if grads_under_way is None else grads_under_way.wait()
            # Added after the receive: what came holds the sums of all ranks that had this block before.
            for keys, *addition in additions:
                for target, part in zip(grads.blocks(keys), addition, strict=True):
                    target += part
            # After the last step the block's owner is the next rank: one more stage, and the gradients are home.
            grads_under_way = _RingTransfer(grads, call.group, _GRADS_TAG)
            at_hand = passing.wait() if passing is not None else at_hand
        assert grads_under_way is not None
        own = grads_under_way.wait()
        grad_sinks = None if sinks is None else compute_sinks_grad(grad, out, log_sum, sinks)
        grad_query = grad_q.permute(2, 0, 1, 3).to(query.dtype)
        return grad_query, own.keys.to(key.dtype), own.values.to(value.dtype), grad_sinks, None


def _heads_first(x: Tensor) -> Tensor:
    """[s, b, n, d] -> [b, n, s, d], a view."""
    return x.permute(1, 2, 0, 3)
