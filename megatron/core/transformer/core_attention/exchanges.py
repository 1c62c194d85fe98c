# SPDX-License-Identifier: Apache-2.0
"""Attention among the ranks of a context-parallel group by one collective there, and one back.

Both classes take zigzag shards of the sequence (context_parallel/sharding.py) and wrap any implementation of core
attention.

all_gather: every rank keeps its queries and gathers all keys and values (Dubey et al., "The Llama 3 Herd of Models",
2024, section 3.3.2). Causal attention then is two ordinary calls, because a rank's tokens are two contiguous pieces:

    queries of piece j  x  keys of pieces 0 .. j        the queries being the last of those positions

In backward the gradients of keys and values are summed while they are scattered. They take the memory of the full
sequence, in one layer at a time; with grouped queries they are few.

a2a: ranks exchange a part of the sequence for a part of the heads (Jacobs et al., "DeepSpeed Ulysses", 2023).

    [s/cp, b, n, d] on each rank  --all-to-all-->  [s, b, n/cp, d]  --attention-->  --all-to-all-->  [s/cp, b, n, dv]

Between the exchanges each rank has whole sequences and some heads, so that any attention will do. Key-value heads that
the ranks cannot share evenly are repeated until they can: at most as many as there are query heads.

Hierarchical (a2a+p2p; Gu et al., "LoongTrain", 2024): the exchange is among neighbours, whose zigzag pieces together
are two larger contiguous pieces, the zigzag pieces of a ring of fewer ranks; the ring runs between the exchanges.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.collectives import all_gather_into_tensor, all_to_all_single
from megatron.core.context_parallel.sharding import list_pieces_of_rank, to_rank_order, to_sequence_order
from megatron.core.process_groups_config import Group
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.core_attention.interface import AttentionInputs, CoreAttention


class GatheredKeysAttention:
    """Attention of each rank's queries to the keys and values of all ranks, which are gathered (all_gather)."""

    def __init__(self, backend: CoreAttention, group: Group) -> None:
        """backend: attention of some queries over all keys on one rank."""
        self.backend, self.group = backend, group
        self.name = f"keys and values gathered from {group.size()} ranks, {backend.name}"

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        """See CoreAttention."""
        key, value = self._gather(inputs.key, inputs.value)  # [s, b, g, d], [s, b, g, dv]
        inputs = dataclasses.replace(inputs, key=key, value=value)
        if not inputs.visible.causal:
            return self.backend(inputs)
        # Two calls instead of one with a mask: kernels skip what the causal rule hides, but compute what a mask hides.
        length = inputs.query.shape[0] // 2
        contexts = []
        for index, piece in enumerate(list_pieces_of_rank(self.group.rank(), self.group.size())):
            rows, seen = slice(index * length, (index + 1) * length), slice(0, (piece + 1) * length)
            contexts.append(self.backend(inputs.cut(rows, seen)))
        return torch.cat(contexts)

    def _gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [s/cp, b, g, d] and values of every rank -> of the full sequence [s, b, g, d], in its order.

        Both travel in one collective, a token's key next to its value.
        """
        # One collective instead of two: for a few key-value heads its latency counts more than the copy.
        token = torch.cat((key.flatten(1), value.flatten(1)), dim=1)  # [s/cp, b * g * (d + dv)]
        whole = to_sequence_order(gather_from_sequence_parallel_region(token, group=self.group), self.group.size())
        keys, values = whole.split([x[0].numel() for x in (key, value)], dim=1)
        return keys.unflatten(1, key.shape[1:]), values.unflatten(1, value.shape[1:])


class HeadExchangeAttention:
    """Attention of some heads on each rank over the tokens of all ranks, after an all-to-all of tokens for heads
    (a2a)."""

    def __init__(self, inner: CoreAttention, group: Group) -> None:
        """inner: attention over what the group's ranks hold together; a backend where that is the whole sequence."""
        self.inner, self.group = inner, group
        self.name = f"sequence exchanged for heads among {group.size()} ranks, {inner.name}"

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        """See CoreAttention."""
        query, key, value = self._exchange_tokens_for_heads(inputs.query, inputs.key, inputs.value)
        visible, sinks = inputs.visible, inputs.sinks
        # A rank's mask has its tokens' rows; after the exchange it holds the queries of all.
        if visible.mask is not None and visible.mask.shape[2] > 1:  # one row is for all queries alike
            visible = dataclasses.replace(visible, mask=self._take_rows(visible.mask))
        if sinks is not None:  # of the heads that this rank gets
            # The all-to-all gives rank i the i-th run of heads, so the sinks' chunk of the same number belongs to it.
            sinks = sinks.chunk(self.group.size())[self.group.rank()]
        whole = dataclasses.replace(inputs, query=query, key=key, value=value, visible=visible, sinks=sinks)
        context = self.inner(whole)  # [s, b, n/cp * dv]
        return exchange_heads_for_tokens(context, self.group)

    def _exchange_tokens_for_heads(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """[s/cp, b, heads, width] each -> [s, b, heads / cp, width] each, in one exchange."""
        size = self.group.size()
        # All ranks need equally many key-value heads, including the ones of their query heads: the fewest copies.
        repeats = math.lcm(key.shape[2], size) // key.shape[2]
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=2) for x in (key, value))
        return exchange_tokens_for_heads([query, key, value], self.group)

    def _take_rows(self, mask: Tensor) -> Tensor:
        """[b, 1, s/cp, t] -> [b, 1, s, t]: the rows of the other ranks' queries."""
        # An all-gather joins along dimension 0, so the rows move there and back.
        own = mask.movedim(2, 0).contiguous()
        whole = own.new_empty(own.shape[0] * self.group.size(), *own.shape[1:])
        all_gather_into_tensor(whole, own, self.group)
        return to_sequence_order(whole, self.group.size()).movedim(0, 2)


def exchange_tokens_for_heads(tensors: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Exchange [s/cp, b, heads, ...] each for [s, b, heads / cp, ...] each, all of one format, in one all-to-all."""
    size = group.size()
    shares = [x.unflatten(2, (size, -1)) for x in tensors]  # [s/cp, b, cp, heads / cp, width]
    shapes = [share.shape[3:] for share in shares]
    # What goes to one rank of a token: its heads of queries, keys and values one after another, of any widths.
    to_send = torch.cat([share.flatten(3) for share in shares], dim=3).permute(2, 0, 1, 3)  # [cp, s/cp, b, ...]
    received: Tensor = _AllToAll.apply(to_send, group)
    whole = to_sequence_order(received.flatten(0, 1), size)  # [s, b, all of them]
    parts = whole.split([shape.numel() for shape in shapes], dim=2)
    return [part.unflatten(2, shape) for part, shape in zip(parts, shapes, strict=True)]


def exchange_heads_for_tokens(context: Tensor, group: Group) -> Tensor:
    """Exchange [s, b, n/cp * dv] for [s/cp, b, n * dv]."""
    size = group.size()
    # Ranks hold zigzag pieces, so that the slice for a rank is not one stretch of the sequence.
    to_send = to_rank_order(context, size).unflatten(0, (size, -1))  # [cp, s/cp, b, n/cp * dv]
    received: Tensor = _AllToAll.apply(to_send, group)
    return received.permute(1, 2, 0, 3).flatten(2)  # [s/cp, b, cp * n/cp * dv]


class _AllToAll(torch.autograd.Function):
    """All-to-all: slice i of dimension 0 goes to rank i; in backward the gradients go the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _exchange(grad, ctx.group), None


def _exchange(x: Tensor, group: Group) -> Tensor:
    # The collective moves memory, not elements: both sides have to be in the order of their indices.
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    all_to_all_single(output, x.contiguous(), group)
    return output
