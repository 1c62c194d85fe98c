# SPDX-License-Identifier: Apache-2.0
"""Exchange of tokens with experts on other ranks: the way there (dispatch), and the way back of the outputs (combine).

Every rank has different tokens. The ranks of one copy of the experts form the group tp_ep: expert parallelism deals out
the experts, expert tensor parallelism splits each of them over `ranks_per_expert` neighbours in the group.

    allgather    dispatch: all-gather of the group's tokens, of which each rank takes its experts' tokens
                 combine: reduce-scatter of the outputs
    alltoall     dispatch: all-to-all that sends each token to the ranks of its experts
                 combine: all-to-all back, and a sum over each token's experts

In a group of one both only permute. T: local tokens, k: experts of a token, n: rows for the local experts, which are as
many as the local experts were chosen.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.collectives import all_gather_into_tensor, all_to_all_single
from megatron.core.device import current_device
from megatron.core.exchange_gap import ExchangeGap
from megatron.core.process_groups_config import Group, ProcessGroupCollection
from megatron.core.taken_arguments import take_arguments
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.permutation import (
    Sorted,
    choose_permutation,
    pad_slots,
    permute,
    permute_reference,
    sort_slots,
    unpermute,
    unpermute_reference,
)
from megatron.core.transformer.moe.routing import Routing, compute_capacity
from megatron.core.transformer.moe.row_exchange import RowExchange
from megatron.core.transformer.transformer_config import TransformerConfig

_QUANTIZATION_ROWS = 16
"""Of their multiples the matrices of FP8 products have rows."""


class Dispatched(NamedTuple):
    """Tokens that the local experts are to work on, and the way back. Weights belong to outputs in a token's sum."""

    rows: Tensor
    """[n, h], sorted by local expert."""
    weights: Tensor
    """[n]."""
    ends: Tensor
    """[local experts] int32: where each one's rows end, that is, tokens per expert summed up."""
    combine: Callable[[Tensor], Tensor]
    """Weighted outputs [n, h] -> their sums for the local tokens [T, h]."""


class TokenDispatcher(ABC):
    """Base of both dispatchers: permutes what this rank has by expert."""

    # Which experts are here follows from the groups.
    @take_arguments("num_local_experts=... local_expert_indices=... config pg_collection")
    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        pg_collection = pg_collection if pg_collection is not None else ProcessGroupCollection.current()
        assert config.num_moe_experts is not None
        self.group: Group = pg_collection.tp_ep
        self.exchange_gap = ExchangeGap()
        self.evaluates = False
        """True while the layer is in evaluation mode."""
        self.packs_tokens = config.moe_dispatch_fwd_dtype == "mxfp8"
        self.packs_grads = config.moe_combine_bwd_dtype == "mxfp8"
        self.num_experts = config.num_moe_experts
        self.ranks_per_expert = pg_collection.expt_tp.size()
        self.local_experts = self.num_experts // pg_collection.ep.size()
        self.first_expert = pg_collection.ep.rank() * self.local_experts
        self.config, self.ranks_of_microbatch = config, pg_collection.tp_cp.size()
        self.has_equal_rows = config.moe_pad_expert_input_to_capacity
        self.multiple = _QUANTIZATION_ROWS if config.moe_router_padding_for_quantization else 1
        self.pads = self.has_equal_rows or config.moe_router_padding_for_quantization
        fused = choose_permutation(config, current_device()).is_fused
        self.permute: Callable[..., Tensor] = permute if fused else permute_reference
        self.unpermute: Callable[..., Tensor] = unpermute if fused else unpermute_reference
        if self.pads:
            self.permute = functools.partial(self.permute, padded=True)
            self.unpermute = functools.partial(self.unpermute, padded=True)

    @abstractmethod
    def dispatch(self, x: Tensor, routing: Routing, meanwhile: Callable[[], None] | None = None) -> Dispatched:
        """Send the tokens x [T, h] of this process to their experts; returns the rows for this process's experts, and
        the function that combines their outputs. meanwhile: called while the tokens travel, where they do by
        all-to-all."""

    def _permute_to_experts(self, x: Tensor, routing: Routing, is_ours: Tensor | None) -> Dispatched:
        """Rows for the local experts out of tokens [T, h]. is_ours: bool [T, k], the choices that count; all if
        None."""
        tokens, k = routing.experts.shape
        local = routing.experts.flatten()
        if self.first_expert:
            local = local - self.first_expert
        kept = None
        if is_ours is not None:
            # A number after the last expert sorts to the end, where `kept` cuts it off.
            local = local.masked_fill(~is_ours.flatten(), self.local_experts)
            if not self.has_equal_rows:
                kept = int(is_ours.sum())  # the host waits: how many rows there are decides shapes
        found = sort_slots(local, self.local_experts, kept)
        order, ends = self._pad(found, local.numel(), tokens // self.group.size())
        weights = self._copy_weights(routing.weights.flatten(), order)

        def combine(outputs: Tensor) -> Tensor:
            return self.unpermute(outputs, order, tokens, k)

        return Dispatched(self.permute(x, order, k), weights, ends, combine)

    def _pad(self, found: Sorted, slots: int, own_tokens: int) -> Sorted:
        """The slots of the local experts with rows of zeros between them, where the config asks for such. slots: their
        number, which stands for no slot. own_tokens: T."""
        if not self.pads:
            return found
        if not self.has_equal_rows:
            return pad_slots(found, slots, multiple=self.multiple)
        return pad_slots(found, slots, rows_each=self._count_equal_rows(own_tokens))

    def _count_equal_rows(self, own_tokens: int) -> int:
        """Return how many rows an expert may get at most from the whole group, where each rank has so many tokens."""
        ranks, divided = self.group.size(), self.ranks_of_microbatch
        capacity = min(compute_capacity(own_tokens * divided, self.config), own_tokens * divided)
        if ranks % divided == 0:
            # Each microbatch's rows end at a multiple, too, so that they may come by themselves.
            return ranks // divided * (-(-capacity // self.multiple) * self.multiple)
        # A part of a microbatch, or parts of several: one more where they do not begin together.
        microbatches = 1 if divided % ranks == 0 else ranks // divided + 2
        rows = min(ranks * own_tokens, microbatches * capacity)
        return -(-rows // self.multiple) * self.multiple

    def _copy_weights(self, weights: Tensor, order: Tensor) -> Tensor:
        """Weights of all slots -> weights of the rows; zero for rows without a slot."""
        if self.pads:
            weights = torch.cat((weights, weights.new_zeros(1)))
        return weights.index_select(0, order)


class AllGatherDispatcher(TokenDispatcher):
    """Every rank gets all tokens: cheap where the group is small, or a token goes to many ranks anyway."""

    def dispatch(self, x: Tensor, routing: Routing, meanwhile: Callable[[], None] | None = None) -> Dispatched:
        """Gather the tokens of the group from x [T, h] of each rank, and take those that chose experts of this rank."""
        if self.group.size() == 1:
            return self._permute_to_experts(x, routing, routing.kept)
        # A step's microbatches are equally long on all ranks; texts that are evaluated need not be. Rows up to a
        # capacity follow from the lengths without asking, and are recorded in graphs.
        if not self.evaluates or self.has_equal_rows:
            return self._dispatch_equal(x, routing)
        return self._dispatch_padded(x, routing)

    def _dispatch_padded(self, x: Tensor, routing: Routing) -> Dispatched:
        """Dispatch where ranks may have different numbers of tokens: each adds rows that no expert keeps."""
        tokens = x.shape[0]
        # The host waits: shapes depend on how many tokens the others have.
        lack = int(self._gather(torch.tensor([tokens], device=x.device)).max()) - tokens

        def pad(rows: Tensor) -> Tensor:
            return F.pad(rows, (0, 0, 0, lack))

        kept = torch.ones_like(routing.experts, dtype=torch.bool) if routing.kept is None else routing.kept
        padded = Routing(pad(routing.experts), pad(routing.weights), pad(kept))
        dispatched = self._dispatch_equal(pad(x), padded)
        return dispatched._replace(combine=lambda outputs: dispatched.combine(outputs)[:tokens])

    def _dispatch_equal(self, x: Tensor, routing: Routing) -> Dispatched:
        gathered = gather_from_sequence_parallel_region(x, group=self.group)  # [ranks * T, h]
        weights = gather_from_sequence_parallel_region(routing.weights, group=self.group)
        # Numbers of experts have no gradient, so that a plain collective will do.
        experts = self._gather(routing.experts)
        # Ranks that share an expert (expert tensor parallelism) both take its tokens, and both make a part of the
        # output.
        is_ours = (experts >= self.first_expert) & (experts < self.first_expert + self.local_experts)
        if routing.kept is not None:
            is_ours &= self._gather(routing.kept.to(torch.uint8)).bool()  # not every backend gathers bool
        local = self._permute_to_experts(gathered, Routing(experts, weights), is_ours)

        def combine(outputs: Tensor) -> Tensor:
            # Sums over this rank's experts, then over the ranks: each token's experts may be anywhere.
            return reduce_scatter_to_sequence_parallel_region(local.combine(outputs), self.group)

        return local._replace(combine=combine)

    def _gather(self, rows: Tensor) -> Tensor:
        whole = rows.new_empty(self.group.size() * rows.shape[0], *rows.shape[1:])
        all_gather_into_tensor(whole, rows.contiguous(), self.group)
        return whole


class AllToAllDispatcher(TokenDispatcher):
    """Each token goes where its experts are. The host waits once: it must know how many rows come from every rank."""

    def dispatch(self, x: Tensor, routing: Routing, meanwhile: Callable[[], None] | None = None) -> Dispatched:
        """Send each of this rank's tokens x [T, h] to the ranks of its experts, and receive those for the experts
        here."""
        if self.group.size() == 1:
            return self._permute_to_experts(x, routing, routing.kept)
        members, tokens = self.group.size(), x.shape[0]
        destination = self._list_destinations(routing)
        weights = routing.weights.repeat_interleave(self.ranks_per_expert, dim=1).flatten()
        # Where each rank has different microbatches, the capacity also bounds what it sends.
        if self.has_equal_rows and self.ranks_of_microbatch == 1:
            return self._exchange_equal_rows(x, destination, weights, meanwhile)
        slots = destination.shape[1]
        order, ends = sort_slots(destination.flatten(), members * self.local_experts)
        # Tokens per rank and expert, which the ranks tell each other first; one copy to the host brings both sums.
        sent = ends.diff(prepend=ends.new_zeros(1)).view(members, self.local_experts)
        received = torch.empty_like(sent)
        all_to_all_single(received, sent, self.group)
        sends, receives = torch.stack((sent, received)).sum(dim=2).tolist()
        order = order[: sum(sends)]  # slots that go nowhere are after the others
        weights = weights.index_select(0, order)

        # The weights travel with the rows: the expert applies them, so that what comes back needs only a sum.
        there = RowExchange(self.group, sends, receives, self.exchange_gap, packs_forward=self.packs_tokens)
        ticket = there.start(self.permute(x, order, slots), weights)
        if meanwhile is not None:
            meanwhile()
        rows, weights = there.finish(ticket)
        # Rows came rank by rank, and inside a rank expert by expert; the products want all of an expert together.
        labels = torch.arange(self.local_experts, device=x.device).repeat(members)
        labels = labels.repeat_interleave(received.flatten(), output_size=sum(receives))
        by_expert, local_ends = self._pad(sort_slots(labels, self.local_experts), len(labels), tokens)

        def combine(outputs: Tensor) -> Tensor:
            # The way of dispatch in reverse: order of arrival, all-to-all back, sum over each token's slots.
            as_received = self.unpermute(outputs, by_expert, len(labels), 1)
            back = RowExchange(self.group, receives, sends, self.exchange_gap, packs_backward=self.packs_grads)
            returned = back.run(as_received)
            return self.unpermute(returned, order, tokens, slots)

        return Dispatched(self.permute(rows, by_expert, 1), self._copy_weights(weights, by_expert), local_ends, combine)

    def _list_destinations(self, routing: Routing) -> Tensor:
        """Return where the slots of each token go, [T, k * ranks_per_expert]: a rank of the group and one of its
        experts, in one number; one after the last where a full expert drops the token."""
        # Every rank that has a part of an expert gets the token, and makes a part of the output; combine sums them like
        # outputs of different experts.
        holder, expert = routing.experts // self.local_experts, routing.experts % self.local_experts
        shares = torch.arange(self.ranks_per_expert, device=expert.device)
        member = holder.unsqueeze(-1) * self.ranks_per_expert + shares  # [T, k, ranks_per_expert]
        destination = (member * self.local_experts + expert.unsqueeze(-1)).flatten(1)
        if routing.kept is None:
            return destination
        stays = routing.kept.repeat_interleave(self.ranks_per_expert, dim=1)
        return destination.masked_fill(~stays, self.group.size() * self.local_experts)

    def _exchange_equal_rows(
        self, x: Tensor, destination: Tensor, weights: Tensor, meanwhile: Callable[[], None] | None
    ) -> Dispatched:
        """Send each expert of each rank as many rows as its capacity allows: no rank needs to know how many are used.

        x: [T, h]. destination: [T, slots]. weights: [T * slots].
        """
        members, experts, (tokens, slots) = self.group.size(), self.local_experts, destination.shape
        found = sort_slots(destination.flatten(), members * experts)
        rows_each = self._count_equal_rows(tokens) // members
        order, _ = pad_slots(found, tokens * slots, rows_each=rows_each)
        sends = [experts * rows_each] * members
        there = RowExchange(self.group, sends, sends, self.exchange_gap, packs_forward=self.packs_tokens)
        ticket = there.start(self.permute(x, order, slots), self._copy_weights(weights, order))
        if meanwhile is not None:
            meanwhile()

        def swap(rows: Tensor, outer: int, inner: int) -> Tensor:
            # Rank by rank and inside a rank expert by expert, or the other way round.
            return rows.unflatten(0, (outer, inner, rows_each)).transpose(0, 1).flatten(0, 2)

        rows, weights = (swap(arrived, members, experts) for arrived in there.finish(ticket))
        step = members * rows_each
        ends = torch.arange(step, experts * step + 1, step, device=x.device, dtype=torch.int32)

        def combine(outputs: Tensor) -> Tensor:
            back = RowExchange(self.group, sends, sends, self.exchange_gap, packs_backward=self.packs_grads)
            returned = back.run(swap(outputs, experts, members))
            return self.unpermute(returned, order, tokens, slots)

        return Dispatched(rows, weights, ends, combine)


def build_token_dispatcher(config: TransformerConfig, pg_collection: ProcessGroupCollection) -> TokenDispatcher:
    """Build the dispatcher that config.moe_token_dispatcher_type names."""
    kinds = {"allgather": AllGatherDispatcher, "alltoall": AllToAllDispatcher}
    return kinds[config.moe_token_dispatcher_type](config=config, pg_collection=pg_collection)


MoEAlltoAllTokenDispatcher = AllToAllDispatcher  # upstream's name
