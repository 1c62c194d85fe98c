# SPDX-License-Identifier: Apache-2.0
"""Collectives that cost nothing in a group of one and behave alike on gloo and NCCL.

Each works in place on contiguous tensors and returns the handle to wait for when `async_op` is set (None when there is
nothing to wait for). `op` is "sum", "max", "min" or "avg"; gloo has no average, so there it is a sum and a division.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist

from megatron.core.process_groups_config import (
    Group,
    MeteredGroup,
    PretendGroup,
    SingleRankGroup,
    group_ranks,
    torch_group,
)
from megatron.core.traffic import Kind

Op = Literal["sum", "max", "min", "avg"]
T = TypeVar("T")

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "avg": dist.ReduceOp.AVG}


# torch's names of the two since 2.13; the earlier ones warn there.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Handle(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Block until the result may be used."""


class _Average:
    """A sum under way that is divided when it has arrived."""

    def __init__(self, work: Handle, tensor: torch.Tensor, divisor: int) -> None:
        self.work, self.tensor, self.divisor = work, tensor, divisor

    def wait(self) -> None:
        self.work.wait()
        self.tensor.div_(self.divisor)


def all_reduce(tensor: torch.Tensor, group: Group, op: Op = "sum", async_op: bool = False) -> Handle | None:
    """Combine the tensors of all members, element by element; every member gets the result."""
    if isinstance(group, SingleRankGroup):
        return None
    counted = _count_call(group, "all_reduce", tensor)
    reduce_op, divide = _choose_reduce_op(counted, op)
    work = dist.all_reduce(tensor, op=reduce_op, group=counted, async_op=async_op)
    return _finish(work, tensor, group.size() if divide else 1)


def reduce_scatter_tensor(
    output: torch.Tensor, input: torch.Tensor, group: Group, op: Op = "sum", async_op: bool = False
) -> Handle | None:
    """Combine all members' inputs; each gets its slice of dimension 0: input [n * size, ...] -> output [n, ...]."""
    if isinstance(group, SingleRankGroup):
        _copy(output, input)
        return None
    # The whole tensor is what traffic.py calls B, not the slice that is left.
    counted = _count_call(group, "reduce_scatter", input)
    reduce_op, divide = _choose_reduce_op(counted, op)
    work = _reduce_scatter_single(output, input, op=reduce_op, group=counted, async_op=async_op)
    return _finish(work, output, group.size() if divide else 1)


def all_gather_into_tensor(
    output: torch.Tensor, input: torch.Tensor, group: Group, async_op: bool = False
) -> Handle | None:
    """Put the members' tensors one after another along dimension 0: input [n, ...] -> output [n * size, ...]."""
    if isinstance(group, SingleRankGroup):
        _copy(output, input)
        return None
    counted = _count_call(group, "all_gather", output)
    work: Handle | None = _all_gather_single(output, input, group=counted, async_op=async_op)
    return work


def reduce_scatter_in_place(
    tensor: torch.Tensor, group: Group, op: Op = "sum", async_op: bool = False
) -> Handle | None:
    """Combine all members' tensors [n * size]; this member's slice, in group order, holds its part of the result.

    The other slices are undefined afterwards. gloo sends less for a whole all-reduce than for its reduce-scatter.
    """
    if isinstance(group, SingleRankGroup):
        return None
    if dist.get_backend(torch_group(group)) == "gloo":
        return all_reduce(tensor, group, op, async_op)
    return reduce_scatter_tensor(tensor.chunk(group.size())[group.rank()], tensor, group, op, async_op)


class _WideSum:
    """Everyone's versions of our slice under way; waiting sums them in float32."""

    def __init__(self, work: Handle | None, versions: torch.Tensor, slice_: torch.Tensor, divisor: int) -> None:
        self.work, self.versions, self.slice, self.divisor = work, versions, slice_, divisor

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        # Summed in the order of the ranks, so that the result does not depend on which message came first.
        total = self.versions.view(-1, self.slice.numel()).sum(dim=0, dtype=torch.float32)
        self.slice.copy_(total.div_(self.divisor))


def reduce_scatter_in_fp32(tensor: torch.Tensor, group: Group, op: Op = "sum", async_op: bool = False) -> Handle | None:
    """As reduce_scatter_in_place for one-dimensional tensors in 16 bits ("sum" or "avg"), but summed in float32.

    What is sent is as large; only the result is rounded, not each partial sum.
    """
    if isinstance(group, SingleRankGroup):
        return None
    versions = torch.empty_like(tensor)
    work = all_to_all_single(versions, tensor, group, async_op=True)
    own = tensor.chunk(group.size())[group.rank()]
    handle = _WideSum(work, versions, own, group.size() if op == "avg" else 1)
    if async_op:
        return handle
    handle.wait()
    return None


def all_gather_in_place(tensor: torch.Tensor, group: Group, async_op: bool = False) -> Handle | None:
    """Every member has filled its slice, in group order, of a tensor [n * size]; give it everyone's."""
    if isinstance(group, SingleRankGroup):
        return None
    return all_gather_into_tensor(tensor, tensor.chunk(group.size())[group.rank()], group, async_op)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    group: Group,
    output_splits: list[int] | None = None,
    input_splits: list[int] | None = None,
    async_op: bool = False,
) -> Handle | None:
    """Send the i-th slice of dimension 0 to member i; the slices are equal, or as long as the splits say."""
    if isinstance(group, SingleRankGroup):
        _copy(output, input)
        return None
    # An equal share stays here, or as many rows as the splits say.
    rows, size = input.shape[0], group.size()
    # What a rank sends to itself does not touch the network.
    stays = rows // size if input_splits is None else input_splits[group.rank()]
    counted = _count_call(group, "all_to_all", input, share=(rows - stays) / max(rows, 1))
    work: Handle | None = dist.all_to_all_single(
        output, input, output_splits, input_splits, group=counted, async_op=async_op
    )
    return work


def broadcast(tensor: torch.Tensor, group: Group, source: int = 0, async_op: bool = False) -> Handle | None:
    """Overwrite every member's tensor with the tensor of `source`, a rank within the group."""
    if isinstance(group, SingleRankGroup):
        return None
    counted = _count_call(group, "broadcast", tensor)
    work: Handle | None = dist.broadcast(tensor, src=group_ranks(group)[source], group=counted, async_op=async_op)
    return work


def send(tensor: torch.Tensor, group: Group, to: int, tag: int = 0) -> Handle:
    """Begin to send to a rank within the group, which must receive as much under the same tag."""
    assert not isinstance(group, SingleRankGroup), "a group of one has nobody to send to"
    work: Handle = dist.isend(tensor, group=_count_call(group, "send", tensor), group_dst=to, tag=tag)  # type: ignore[assignment]
    return work


def receive(tensor: torch.Tensor, group: Group, source: int, tag: int = 0) -> Handle:
    """Begin to receive from a rank within the group; the tensor is overwritten."""
    assert not isinstance(group, SingleRankGroup), "a group of one has nobody to receive from"
    work: Handle = dist.irecv(tensor, group=torch_group(group), group_src=source, tag=tag)  # type: ignore[assignment]
    return work


def pass_on(sent: torch.Tensor, received: torch.Tensor, group: Group, tag: int = 0) -> list[Handle]:
    """Begin to send to the next member and to receive from the previous one, in a ring."""
    assert not isinstance(group, SingleRankGroup), "a ring of one passes nothing on"
    rank, size = group.rank(), group.size()
    return send_and_receive((sent, (rank + 1) % size), (received, (rank - 1) % size), group, tag)


def send_and_receive(
    outgoing: tuple[torch.Tensor, int] | None, incoming: tuple[torch.Tensor, int] | None, group: Group, tag: int = 0
) -> list[Handle]:
    """Begin to send a tensor to one member and to overwrite another with what a member sends: (tensor, rank within the
    group) each, or None."""
    assert not isinstance(group, SingleRankGroup), "a group of one has nobody to send to"
    ranks, calls = group_ranks(group), []
    if outgoing is not None:
        # What arrives is counted where it is sent.
        counted = _count_call(group, "send", outgoing[0])
        calls.append(dist.P2POp(dist.isend, outgoing[0], ranks[outgoing[1]], counted, tag))
    if incoming is not None:
        calls.append(dist.P2POp(dist.irecv, incoming[0], ranks[incoming[1]], torch_group(group), tag))
    # In one batch: NCCL would hang where every member sends before it receives.
    return list(dist.batch_isend_irecv(calls))


def barrier(group: Group) -> None:
    """Wait until every member has come here."""
    if not isinstance(group, SingleRankGroup):
        dist.barrier(group=torch_group(group))


def all_gather_object(value: T, group: Group) -> list[T]:
    """Everyone's value, in group order. Values are pickled: only for small objects, between the processes of a run."""
    if isinstance(group, SingleRankGroup):
        return [value]
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=torch_group(group))
    return values


def broadcast_object(value: T | None, group: Group, source: int = 0) -> T:
    """The value of `source`, a rank within the group, on every member."""
    values: list[Any] = [value]
    if not isinstance(group, SingleRankGroup):
        dist.broadcast_object_list(values, src=group_ranks(group)[source], group=torch_group(group))
    result: T = values[0]
    return result


def _count_call(
    group: dist.ProcessGroup | MeteredGroup | PretendGroup, kind: Kind, tensor: torch.Tensor, share: float = 1.0
) -> dist.ProcessGroup:
    """torch's group; where traffic is counted, count this call. share: how much of the tensor the call is about."""
    if isinstance(group, MeteredGroup):
        group.traffic.add(group.axis, kind, round(tensor.nbytes * share), group.size())
    return torch_group(group)


def _choose_reduce_op(group: dist.ProcessGroup, op: Op) -> tuple[Any, bool]:
    """torch's operation, and whether the result must still be divided by the group's size."""
    # NCCL averages natively.
    divide = op == "avg" and dist.get_backend(group) == "gloo"
    return _OPS["sum" if divide else op], divide


def _finish(work: Handle | None, result: torch.Tensor, divisor: int) -> Handle | None:
    if divisor == 1:
        return work
    # The sum is not there yet, so that its division has to wait.
    if work is not None:
        return _Average(work, result, divisor)
    result.div_(divisor)
    return None


def _copy(output: torch.Tensor, input: torch.Tensor) -> None:
    # A caller that works in place hands over the same memory twice.
    if output.data_ptr() != input.data_ptr():
        output.copy_(input)
