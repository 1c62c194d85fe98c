"""Gradients of what several shards hold whole: keys and values where tensor-parallel ranks outnumber the query groups.

Each holder attends with queries of its own, so its gradient of the common part is a partial sum. The sum over the
holders is one all-reduce over the whole axis, in which every part has its own place; who does not hold it adds zeros:

    parts        | k0 v0 | k1 v1 |
    rank 0, 1    | dk dv |  0  0 |      afterwards every holder of a part has the same sum, bit for bit
    rank 2, 3    |  0  0 | dk dv |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from megatron.core.collectives import all_reduce
from megatron.core.placement import Placement, Split
from megatron.core.process_groups_config import Group, ProcessGroupCollection


def sum_replicated_grads(grads: Iterable[tuple[Placement, Tensor]], groups: ProcessGroupCollection) -> None:
    """Sum, in place, the parts that several shards hold over those shards.

    grads: placement and gradient (this process's shard) of every parameter, in the same order on all processes.
    """
    by_axis: dict[str, list[tuple[Placement, Split, Tensor]]] = defaultdict(list)
    for placement, grad in grads:
        for split in placement.splits:
            if split.replicated_parts(placement.full_shape[split.dim]):
                by_axis[split.axis].append((placement, split, grad))
    for axis, found in by_axis.items():
        _sum(found, getattr(groups, axis))


def _sum(found: list[tuple[Placement, Split, Tensor]], group: Group) -> None:
    """One all-reduce for all parameters."""
    places: list[tuple[Tensor | None, int]] = []  # (the part in this shard's gradient, its elements)
    for placement, split, grad in found:
        elements_per_index = grad.numel() // grad.shape[split.dim]
        for length, start in split.replicated_parts(placement.full_shape[split.dim]):
            part = None if start is None else grad.narrow(split.dim, start, length)
            places.append((part, length * elements_per_index))
    first = found[0][2]
    flat = torch.zeros(sum(numel for _, numel in places), dtype=first.dtype, device=first.device)
    slots = flat.split([numel for _, numel in places])
    for (part, _), slot in zip(places, slots, strict=True):
        if part is not None:
            slot.view(part.shape).copy_(part)
    all_reduce(flat, group)
    for (part, _), slot in zip(places, slots, strict=True):
        if part is not None:
            part.copy_(slot.view(part.shape))
