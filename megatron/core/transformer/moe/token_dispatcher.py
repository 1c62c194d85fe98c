"""How tokens reach their experts on other processes, and how the outputs come back.

Every process has tokens of its own. The processes of one copy of the experts form the group tp_ep: expert parallelism
deals out the experts, expert tensor parallelism cuts each of them (neighbours in the group).

    allgather    every process gets all tokens of the group and works on those of its experts;
                 outputs are summed over the group while they are scattered
    alltoall     a process sends each token to the holders of its experts, to each of those that share one;
                 outputs go back the same way and are summed

With one process in the group both only sort. T: own tokens, k: experts of a token, n: rows for the local experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.collectives import all_gather_into_tensor, all_to_all_single
from megatron.core.process_groups_config import Group, ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.permutation import (
    combine,
    combine_reference,
    permute,
    permute_reference,
    sort_slots,
)
from megatron.core.transformer.moe.routing import Routing
from megatron.core.transformer.transformer_config import TransformerConfig


class Dispatched(NamedTuple):
    """What the local experts are to work on, and the way back."""

    rows: Tensor
    """[n, h], sorted by local expert."""
    weights: Tensor
    """[n]."""
    ends: Tensor
    """[local experts] int32, where each one's rows end."""
    bring_back: Callable[[Tensor], Tensor]
    """Outputs [n, h] -> sums for the own tokens [T, h]."""


class TokenDispatcher(ABC):
    """Base of the two ways."""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        assert config.num_moe_experts is not None
        self.group: Group = pg_collection.tp_ep
        self.num_experts = config.num_moe_experts
        self.sharers = pg_collection.expt_tp.size()
        self.local_experts = self.num_experts // pg_collection.ep.size()
        self.first_expert = pg_collection.ep.rank() * self.local_experts
        fused = config.moe_permute_fusion
        self.permute, self.combine = (permute, combine) if fused else (permute_reference, combine_reference)

    @abstractmethod
    def dispatch(self, x: Tensor, routing: Routing) -> Dispatched:
        """Tokens [T, h] of this process -> rows for its experts."""

    def _sorted_by_expert(self, x: Tensor, routing: Routing, is_ours: Tensor | None) -> Dispatched:
        """Rows for the local experts out of the given tokens. is_ours: bool [T, k], those that count; all if None."""
        tokens, k = routing.experts.shape
        local = (routing.experts - self.first_expert).flatten()
        kept = None
        if is_ours is not None:
            local = local.masked_fill(~is_ours.flatten(), self.local_experts)
            kept = int(is_ours.sum())
        order, ends = sort_slots(local, self.local_experts, kept)
        weights = routing.weights.flatten().index_select(0, order)

        def bring_back(outputs: Tensor) -> Tensor:
            return self.combine(outputs, order, tokens, k)

        return Dispatched(self.permute(x, order, k), weights, ends, bring_back)


class AllGatherDispatcher(TokenDispatcher):
    """Everyone gets all tokens."""

    def dispatch(self, x: Tensor, routing: Routing) -> Dispatched:
        """Tokens [T, h] of this process -> rows for its experts."""
        if self.group.size() == 1:
            return self._sorted_by_expert(x, routing, routing.kept)
        everyones = gather_from_sequence_parallel_region(x, self.group)
        weights = gather_from_sequence_parallel_region(routing.weights, self.group)
        experts = self._gathered(routing.experts)
        is_ours = (experts >= self.first_expert) & (experts < self.first_expert + self.local_experts)
        if routing.kept is not None:
            is_ours &= self._gathered(routing.kept.to(torch.uint8)).bool()
        found = self._sorted_by_expert(everyones, Routing(experts, weights), is_ours)

        def bring_back(outputs: Tensor) -> Tensor:
            return reduce_scatter_to_sequence_parallel_region(found.bring_back(outputs), self.group)

        return found._replace(bring_back=bring_back)

    def _gathered(self, rows: Tensor) -> Tensor:
        whole = rows.new_empty(self.group.size() * rows.shape[0], *rows.shape[1:])
        all_gather_into_tensor(whole, rows.contiguous(), self.group)
        return whole


class AllToAllDispatcher(TokenDispatcher):
    """Each token goes where its experts are. Everyone must know how many rows come, so the host waits for that once."""

    def dispatch(self, x: Tensor, routing: Routing) -> Dispatched:
        """Tokens [T, h] of this process -> rows for its experts."""
        if self.group.size() == 1:
            return self._sorted_by_expert(x, routing, routing.kept)
        members, tokens = self.group.size(), x.shape[0]
        # A destination is a member of the group and one of its experts; each of an expert's sharers gets the token.
        holder, expert = routing.experts // self.local_experts, routing.experts % self.local_experts
        shares = torch.arange(self.sharers, device=x.device)
        member = holder.unsqueeze(-1) * self.sharers + shares  # [T, k, sharers]
        destination = (member * self.local_experts + expert.unsqueeze(-1)).flatten(1)  # [T, k * sharers]
        slots = destination.shape[1]
        kept = None
        if routing.kept is not None:
            stays = routing.kept.repeat_interleave(self.sharers, dim=1)
            destination = destination.masked_fill(~stays, members * self.local_experts)
            kept = int(stays.sum())
        order, ends = sort_slots(destination.flatten(), members * self.local_experts, kept)
        weights = routing.weights.repeat_interleave(self.sharers, dim=1).flatten().index_select(0, order)
        sent = ends.diff(prepend=ends.new_zeros(1)).view(members, self.local_experts)
        received = torch.empty_like(sent)
        all_to_all_single(received, sent, self.group)
        sends, receives = torch.stack((sent, received)).sum(dim=2).tolist()

        rows = exchange(self.permute(x, order, slots), self.group, sends, receives)
        weights = exchange(weights, self.group, sends, receives)
        # Rows came sender by sender; the experts want them expert by expert.
        labels = torch.arange(self.local_experts, device=x.device).repeat(members)
        labels = labels.repeat_interleave(received.flatten(), output_size=sum(receives))
        by_expert, local_ends = sort_slots(labels, self.local_experts)

        def bring_back(outputs: Tensor) -> Tensor:
            as_received = self.combine(outputs, by_expert, len(by_expert), 1)
            returned = exchange(as_received, self.group, receives, sends)
            return self.combine(returned, order, tokens, slots)

        return Dispatched(self.permute(rows, by_expert, 1), weights.index_select(0, by_expert), local_ends, bring_back)


def build_token_dispatcher(config: TransformerConfig, pg_collection: ProcessGroupCollection) -> TokenDispatcher:
    """The dispatcher that the config names."""
    kinds = {"allgather": AllGatherDispatcher, "alltoall": AllToAllDispatcher}
    return kinds[config.moe_token_dispatcher_type](config, pg_collection)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sends: list[int], receives: list[int]) -> Tensor:
        ctx.group, ctx.sends, ctx.receives = group, sends, receives
        return _all_to_all(x, group, sends, receives)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _all_to_all(grad, ctx.group, ctx.receives, ctx.sends), None, None, None


def _all_to_all(x: Tensor, group: Group, sends: list[int], receives: list[int]) -> Tensor:
    received = x.new_empty(sum(receives), *x.shape[1:])
    all_to_all_single(received, x.contiguous(), group, receives, sends)
    return received


def exchange(x: Tensor, group: Group, sends: list[int], receives: list[int]) -> Tensor:
    """Send consecutive rows of x to the members, as many to each as `sends` says, and receive theirs."""
    result: Tensor = _Exchange.apply(x, group, sends, receives)
    return result
