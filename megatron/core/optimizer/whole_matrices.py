# SPDX-License-Identifier: Apache-2.0
"""Matrices whole, for rules that need them so, although slices of several processes may meet in one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megatron.core.collectives import all_reduce
from megatron.core.distributed.model_chunk import FlatBuffer
from megatron.core.flat_ranges import Range
from megatron.core.optimizer.group_state import FlatShard, GroupState, Member
from megatron.core.placement import Placement, Split
from megatron.core.process_groups_config import Group, ProcessGroupCollection


def locate_member(member: Member) -> Range:
    """Return where a parameter lies in its buffer."""
    return member.slot.start, member.slot.start + member.slot.numel


def is_cut(buffer: FlatBuffer, member: Member) -> bool:
    """Return whether the slices of several processes meet in the matrix."""
    first, last = locate_member(member)
    shards = buffer.reduction.shards.size()
    for start, stop, _ in buffer.layout.buckets:
        if start <= first < stop:
            # Each process owns an equal slice of every bucket, wherever parameters begin and end in it.
            share = (stop - start) // shards
            return (first - start) // share != (last - 1 - start) // share
    raise AssertionError(f"{member.name} is in no bucket")


def find_cutting_group(split: Split, groups: ProcessGroupCollection) -> Group:
    """The processes over which a matrix is cut: the tensor-parallel group, or the expert-tensor-parallel one."""
    return groups.expt_tp if split.axis == "etp" else getattr(groups, split.axis)


def take_single(placement: Placement) -> Placement:
    """Return the placement of one matrix of a stack: each process that has it has a part of it as the other dimensions
    are split."""
    splits = tuple(dataclasses.replace(split, dim=split.dim - 1) for split in placement.splits if split.dim > 0)
    return dataclasses.replace(placement, full_shape=placement.full_shape[1:], splits=splits)


def take_stack(placement: Placement, count: int) -> Placement:
    """Return the placement of `count` matrices of a stack that this process has, as a separate stack."""
    splits = tuple(split for split in placement.splits if split.dim > 0)
    return dataclasses.replace(placement, full_shape=(count, *placement.full_shape[1:]), splits=splits)


def is_ours(state: GroupState, member: Member) -> bool:
    """Return whether this process updates something of the matrix."""
    return any(True for _ in state.pieces([locate_member(member)]))


def assemble_matrices(
    state: GroupState, values: Callable[[FlatShard], Sequence[Tensor]], count: int
) -> Iterator[tuple[Member, list[Tensor]]]:
    """Every matrix of which this process updates something, with `count` tensors of its shape: what `values` makes of
    the pieces. Every process of the buffer's shards calls this."""
    # Also matrices of which this process has nothing: the sum is a collective, which all members must call alike.
    cut = [member for member in state.members if is_cut(state.buffer, member)]
    together = dict(zip((member.name for member in cut), _assemble(state, cut, values, count), strict=True))
    for member in state.members:
        if not is_ours(state, member):
            continue
        if member.name in together:
            tensors = list(together[member.name])
        else:
            tensors = _read_own(state, member, values)
        yield member, [tensor.view(member.param.shape) for tensor in tensors]


def _assemble(
    state: GroupState, cut: list[Member], values: Callable[[FlatShard], Sequence[Tensor]], count: int
) -> list[Tensor]:
    """Values of each matrix that several slices share, [count, elements]; by one sum in which each slice fills its
    place."""
    if not cut:
        return []
    sizes = [member.slot.numel for member in cut]
    flat = torch.zeros(count, sum(sizes), dtype=torch.float32, device=state.buffer.device)
    places = list(flat.split(sizes, dim=1))
    for member, place in zip(cut, places, strict=True):
        for (first, last), _ in state.pieces([locate_member(member)]):  # one or none: a slice is contiguous
            start = first - member.slot.start
            place[:, start : start + last - first] = torch.stack(_read_own(state, member, values))
    all_reduce(flat, state.buffer.reduction.shards)
    return places


def _read_own(state: GroupState, member: Member, values: Callable[[FlatShard], Sequence[Tensor]]) -> list[Tensor]:
    """Return what this process has of a matrix, flat."""
    pieces = [values(shard) for shard in state.shards([locate_member(member)])]
    return [torch.cat(parts) for parts in zip(*pieces, strict=True)]
