"""p2p: every rank keeps its queries, and keys and values go round (Liu et al., "Ring Attention", 2023).

Rank r at step i holds the keys and values of rank j = r - i, and with the zigzag split (sharding.py) sees of them

    j = r    its own: causal               j < r    the first piece, with all queries: no mask
                                           j > r    both pieces, with the queries of its second piece: no mask

so that every step after the first is half a square, on every rank. The next block travels while this one is computed.
Backward goes round once more, and the gradients of keys and values travel with them until they are home.

A given mask [b or 1, 1, s, t] replaces the causal one: then all queries meet all keys, and its columns are cut to the
block's. Documents and sliding windows hide more of a block, or all of it: then it is only passed on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.collectives import pass_on
from megatron.core.context_parallel.sharding import positions_of_rank, shard_sequence
from megatron.core.packed_seq_params import Documents
from megatron.core.process_groups_config import Group
from megatron.core.transformer.core_attention.block_attention import BlockKernel, Merged, grad_of_sinks, with_sinks

_KEYS_TAG, _GRADS_TAG = 1, 2
_ALL = slice(None)


class Block(NamedTuple):
    """What of the queries and of the keys at hand meet."""

    queries: slice
    keys: slice
    causal: bool


def visible_block(rank: int, source: int, length: int) -> Block:
    """What the queries of `rank` see of the keys of `source` under a causal mask; both hold `length` tokens."""
    half = length // 2
    if source == rank:
        return Block(_ALL, _ALL, True)
    if source < rank:
        return Block(_ALL, slice(0, half), False)
    return Block(slice(half, None), _ALL, False)


class _Passing:
    """A tensor on its way to the next rank, and the one that comes from the previous rank."""

    def __init__(self, sent: Tensor, group: Group, tag: int) -> None:
        self.sent, self.received = sent.contiguous(), torch.empty_like(sent, memory_format=torch.contiguous_format)
        self.works = pass_on(self.sent, self.received, group, tag)

    def wait(self) -> Tensor:
        """What has come."""
        for work in self.works:
            work.wait()
        return self.received


@dataclass(frozen=True)
class _Call:
    """What one call of ring attention is about, besides its tensors."""

    kernel: BlockKernel
    group: Group
    mask: Tensor | Documents | None
    window: int | None
    seed: int | None

    def block(self, step: int, like: Tensor) -> tuple[Block, dict[str, Any]] | None:
        """The block of one step, for tokens [s/cp, ...], and the kernel's options for it; None for nothing to see."""
        rank, size = self.group.rank(), self.group.size()
        source = (rank - step) % size
        options: dict[str, Any] = {"seed": None if self.seed is None else self.seed + source}
        whole = like.shape[0] * size
        if isinstance(self.mask, Tensor):
            mask = shard_sequence(self.mask, source, size, dim=-1)
            if self.window is not None:
                queries, keys = (positions_of_rank(whole, r, size, like.device) for r in (rank, source))
                own = queries.unsqueeze(1)
                mask = mask | (keys > own) | (keys < own - self.window)
            return Block(_ALL, _ALL, False), options | {"causal": False, "mask": mask}
        block = visible_block(rank, source, like.shape[0])
        if self.mask is not None or self.window is not None:
            positions = (positions_of_rank(whole, r, size) for r in (rank, source))
            queries, keys = (own[part] for own, part in zip(positions, block[:2], strict=True))
            firsts = self._first_visible(queries)
            if firsts.min() > keys.max():
                return None
            if firsts.max() > keys.min():
                options["mask"] = (keys < firsts.unsqueeze(1)).to(like.device, non_blocking=True)
        return block, options | {"causal": block.causal}

    def _first_visible(self, queries: Tensor) -> Tensor:
        """For each of these positions the first that it sees, by its document and by the window."""
        firsts = torch.zeros_like(queries) if self.window is None else queries - self.window
        return torch.maximum(firsts, self.mask.starts[queries]) if isinstance(self.mask, Documents) else firsts


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, call: _Call) -> Tensor:
        q = _heads_first(query)
        size = call.group.size()
        merged, at_hand = Merged(q), torch.stack((key, value))  # [2, s, b, g, d]
        for step in range(size):
            passing = _Passing(at_hand, call.group, _KEYS_TAG) if step < size - 1 else None
            visible = call.block(step, query)
            if visible is not None:
                (rows, keys, _), options = visible
                k, v = (_heads_first(x)[:, :, keys] for x in at_hand)
                merged.add(rows, *call.kernel.forward(q[:, :, rows], k, v, **options))
            at_hand = passing.wait() if passing is not None else at_hand
        out, log_sum = merged.out, merged.log_sum
        if sinks is not None:
            out, log_sum = with_sinks(out, log_sum, sinks)
        output = out.permute(2, 0, 1, 3).to(query.dtype)  # [b, n, s, d] -> [s, b, n, d]
        ctx.call = call
        ctx.save_for_backward(query, key, value, sinks, output, log_sum)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        query, key, value, sinks, output, log_sum = ctx.saved_tensors
        call: _Call = ctx.call
        size = call.group.size()
        q, out, grad = (_heads_first(x) for x in (query, output, grad_output))
        grad_q = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        at_hand = torch.stack((key, value))
        grads_under_way: _Passing | None = None
        for step in range(size):
            passing = _Passing(at_hand, call.group, _KEYS_TAG) if step < size - 1 else None
            visible = call.block(step, query)
            additions: list[Tensor] = []
            if visible is not None:
                (rows, keys, _), options = visible
                k, v = (_heads_first(x)[:, :, keys] for x in at_hand)
                result = (out[:, :, rows], log_sum[:, :, rows])
                add_q, *additions = call.kernel.backward(grad[:, :, rows], (q[:, :, rows], k, v), result, **options)
                grad_q[:, :, rows] += add_q
            if grads_under_way is None:
                grads = torch.zeros(at_hand.shape, dtype=torch.float32, device=q.device)
            else:
                grads = grads_under_way.wait()
            for target, addition in zip(grads, additions, strict=False):
                _heads_first(target)[:, :, keys] += addition
            # After the last step the block's owner is the next rank: one more stage, and the gradients are home.
            grads_under_way = _Passing(grads, call.group, _GRADS_TAG)
            at_hand = passing.wait() if passing is not None else at_hand
        assert grads_under_way is not None
        grad_key, grad_value = grads_under_way.wait().to(key.dtype)
        grad_sinks = None if sinks is None else grad_of_sinks(grad, out, log_sum, sinks)
        return grad_q.permute(2, 0, 1, 3).to(query.dtype), grad_key, grad_value, grad_sinks, None


class RingAttention:
    """Attention over sequences whose zigzag shards the group's ranks hold."""

    def __init__(
        self, kernel: BlockKernel, group: Group, *, draws_dropout: bool = False, window: int | None = None
    ) -> None:
        self.kernel, self.group, self.draws_dropout, self.window = kernel, group, draws_dropout, window
        self.name = f"keys and values passed around {group.size()} ranks, {kernel.name}"

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | Documents | None,
        training: bool,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See SequenceAttention."""
        # From the stream that the caller chose, on the CPU: nothing has to wait for the device.
        seed = int(torch.randint(2**40, ())) if self.draws_dropout and training else None
        call = _Call(self.kernel, self.group, attention_mask, self.window, seed)
        result: Tensor = _RingAttention.apply(query, key, value, sinks, call)
        return result.flatten(2)  # [s/cp, b, n, d] -> [s/cp, b, n * d]


def _heads_first(x: Tensor) -> Tensor:
    """[s, b, n, d] -> [b, n, s, d], a view."""
    return x.permute(1, 2, 0, 3)
