"""a2a: ranks exchange a part of the sequence for a part of the heads (Jacobs et al., "DeepSpeed Ulysses", 2023).

    [s/cp, b, n, d] on each rank  --all-to-all-->  [s, b, n/cp, d]  --attention-->  --all-to-all-->  [s/cp, b, n, d]

Between the exchanges each rank has whole sequences and some heads, so that any attention will do. Key-value heads that
the ranks cannot share evenly are repeated until they can: at most as many as there are query heads.

Hierarchical (a2a+p2p; Gu et al., "LoongTrain", 2024): the exchange is among neighbours, whose zigzag pieces together
are two larger contiguous pieces, the zigzag pieces of a ring of fewer ranks; the ring runs between the exchanges.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron.core.collectives import all_gather_into_tensor, all_to_all_single
from megatron.core.context_parallel.sharding import to_rank_order, to_sequence_order
from megatron.core.errors import ConfigError
from megatron.core.packed_seq_params import Documents
from megatron.core.process_groups_config import Group
from megatron.core.transformer.core_attention.base import SequenceAttention


class _AllToAll(torch.autograd.Function):
    """Slice i of dimension 0 goes to rank i; so do, in backward, the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        output = torch.empty_like(x, memory_format=torch.contiguous_format)
        all_to_all_single(output, x.contiguous(), group)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        output = torch.empty_like(grad, memory_format=torch.contiguous_format)
        all_to_all_single(output, grad.contiguous(), ctx.group)
        return output, None


class HeadExchangeAttention:
    """Attention over sequences whose zigzag shards the group's ranks hold.

    inner: attention over what the group's ranks hold together; a backend where that is the whole sequence.
    """

    def __init__(self, inner: SequenceAttention, group: Group) -> None:
        self.inner, self.group = inner, group
        self.name = f"sequence exchanged for heads among {group.size()} ranks, {inner.name}"

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
        query, key, value = self._whole_sequence(query, key, value)  # [s, b, heads / cp, d]
        mask = self._whole_mask(attention_mask) if isinstance(attention_mask, Tensor) else attention_mask
        own_sinks = None if sinks is None else sinks.chunk(self.group.size())[self.group.rank()]
        context = self.inner(query, key, value, mask, training, own_sinks)  # [s, b, n/cp * d]
        return self._own_tokens(context.unflatten(-1, query.shape[2:])).flatten(2)

    def _whole_sequence(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Heads for tokens, in one exchange: [s/cp, b, n, d], [s/cp, b, g, d] -> [s, b, n/cp, d], [s, b, g'/cp, d]."""
        size = self.group.size()
        repeats = math.lcm(key.shape[2], size) // key.shape[2]
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=2) for x in (key, value))
        shares = [x.unflatten(2, (size, -1)) for x in (query, key, value)]  # [s/cp, b, cp, heads / cp, d]
        heads = [share.shape[3] for share in shares]
        to_send = torch.cat(shares, dim=3).permute(2, 0, 1, 3, 4)  # [cp, s/cp, b, heads / cp, d]
        received: Tensor = _AllToAll.apply(to_send, self.group)
        query, key, value = to_sequence_order(received.flatten(0, 1), size).split(heads, dim=2)
        return query, key, value

    def _own_tokens(self, context: Tensor) -> Tensor:
        """Tokens for heads: [s, b, n/cp, d] -> [s/cp, b, n, d]."""
        size = self.group.size()
        to_send = to_rank_order(context, size).unflatten(0, (size, -1))  # [cp, s/cp, b, n/cp, d]
        received: Tensor = _AllToAll.apply(to_send, self.group)
        return received.permute(1, 2, 0, 3, 4).flatten(2, 3)  # [s/cp, b, cp * n/cp, d]

    def _whole_mask(self, mask: Tensor) -> Tensor:
        """[b, 1, s/cp, t] -> [b, 1, s, t]: the rows of the other ranks' queries."""
        own = mask.movedim(2, 0).contiguous()
        whole = own.new_empty(own.shape[0] * self.group.size(), *own.shape[1:])
        all_gather_into_tensor(whole, own, self.group)
        return to_sequence_order(whole, self.group.size()).movedim(0, 2)


def check_heads(heads: int, size: int, flag: str) -> None:
    """Raise ConfigError where `heads` query heads, those of one tensor-parallel rank, cannot be shared by `size`."""
    if heads % size:
        raise ConfigError(
            f"{flag}: {size} ranks cannot share {heads} query heads (--num-attention-heads / "
            f"--tensor-model-parallel-size) evenly; use a multiple of {size} heads on each tensor-parallel rank, or "
            "--cp-comm-type p2p"
        )
