# SPDX-License-Identifier: Apache-2.0
"""The global norm: over all processes, every element of the model exactly once.

What a process counts follows from each parameter's Placement:

| the parameter is                         | counted                                        |
|------------------------------------------|------------------------------------------------|
| cut over tensor-parallel processes       | every shard                                    |
| held whole by them                       | by the first of them                           |
| cut, with parts that several shards hold | those parts by the first that holds them       |
| a copy of one on another stage           | not at all                                     |
| a weight of experts                      | every shard, by each process that holds one    |

Data-parallel replicas hold equal values after synchronisation, so each replica computes the norm for itself; where
they divide the optimizer's state, each counts the slices that it updates. Experts are laid out over other groups of
processes than dense layers (mesh.py), so that their part is summed by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.collectives import all_reduce
from megatron.core.distributed.bucket import Reduction
from megatron.core.distributed.model_chunk import FlatBuffer
from megatron.core.flat_ranges import Range, find_ranges, intersect_ranges, merge_ranges
from megatron.core.placement import Placement, get_placement
from megatron.core.process_groups_config import Group, ProcessGroupCollection

# One float32 accumulator over millions of elements loses the fourth digit on CPU (measured: 6e-4 over 15 million).
# Rows of this length summed in float32, and the rows' norms in float64, cost the same and agree to 1e-9.
_ROW = 512


@dataclass(frozen=True)
class ModelSum:
    """Sums over the full model of what each process counts of it.

    shards: for dense weights (False) and, in a model that has any, for experts' weights (True): the replicas that count
    together because they divide the optimizer's state, or a group of one.
    """

    groups: ProcessGroupCollection
    shards: Mapping[bool, Group]

    @classmethod
    def build(cls, reductions: Mapping[bool, Reduction], groups: ProcessGroupCollection, has_experts: bool) -> ModelSum:
        """reductions: a model chunk's, for weights of experts (True) and all others. has_experts: whether any process
        of the model has experts."""
        # Each by itself: experts may have replicas where dense weights have none, as with tensor parallelism alone.
        return cls(groups, {kind: reductions[kind].shards for kind in ((False, True) if has_experts else (False,))})

    def __call__(self, own: Mapping[bool, Tensor]) -> Tensor:
        """The sum over all processes. own: this one's part, for every key of `shards`; overwritten."""
        for of_experts, shards in self.shards.items():
            # First over the shards of one copy of the model, then over the replicas that divide the state. Replicas
            # that do not divide it hold equal gradients, and adding them would count every element several times.
            all_reduce(own[of_experts], self.groups.get_model_copy(of_experts))
            all_reduce(own[of_experts], shards)
        total = own[False]
        return total + own[True] if True in self.shards else total


def find_counted_ranges(buffer: FlatBuffer, groups: ProcessGroupCollection) -> list[Range]:
    """The flat ranges of a buffer that together are what this process counts, in ascending order.

    Neighbouring parameters that are counted whole come as one range, with the zeros between them.
    """
    found: list[Range] = []
    for name, param, slot in zip(buffer.names, buffer.params, buffer.layout.slots, strict=True):
        placement = get_placement(param, name)
        if not is_counted(placement, groups):
            continue
        blocks = placement.pieces()
        # Up to the padded end: the gap holds zeros, and so neighbours merge into one long range for one kernel.
        if all(block.owned for block in blocks):
            found.append((slot.start, slot.padded_end))
        else:
            inside = (find_ranges(param.shape, block.local_box) for block in blocks if block.owned)
            found += [(slot.start + start, slot.start + stop) for ranges in inside for start, stop in ranges]
    return intersect_ranges(merge_ranges(found), buffer.owned)


def is_counted(placement: Placement, groups: ProcessGroupCollection) -> bool:
    """Return whether this process counts its shard of the parameter, or what it owns of it."""
    axis, group = ("etp", groups.expt_tp) if placement.is_expert else ("tp", groups.tp)
    return not placement.is_copy and (axis in placement.axes or group.rank() == 0)


def view_counted(buffer: FlatBuffer, flat: Tensor, groups: ProcessGroupCollection) -> list[Tensor]:
    """Views of a flat tensor laid out like `buffer` that together hold what this process counts."""
    return [flat[start:stop] for start, stop in find_counted_ranges(buffer, groups)]


def compute_global_norm(tensors: Iterable[tuple[bool, Tensor]], model_sum: ModelSum, device: torch.device) -> Tensor:
    """L2 norm of everything that the processes of one model replica count; a float32 scalar on `device`.

    tensors: what this process counts, each with whether it is of experts.
    """
    # float64, because a float32 sum of so many rows would lose the small ones.
    totals = {of_experts: torch.zeros((), dtype=torch.float64, device=device) for of_experts in model_sum.shards}
    for of_experts, tensor in tensors:
        totals[of_experts] += sum_squares(tensor)
    return model_sum(totals).sqrt().float()


def compute_clip_divisor(norm: Tensor, max_norm: float) -> Tensor | None:
    """Return what gradients are divided by to bring their norm down to `max_norm`, 1 where it is smaller; None for a
    `max_norm` of 0, which means no clipping.

    Same formula as torch.nn.utils.clip_grad_norm_, upside down; a scalar on the device, so that asking does not wait.
    """
    # torch adds the 1e-6 as well; without it the numbers would differ from a run that clips with its function.
    return None if max_norm == 0 else ((norm + 1e-6) / max_norm).clamp(min=1.0)


def sum_squares(tensor: Tensor) -> Tensor:
    """Sum of the squares of all elements; a float64 scalar on the tensor's device."""
    flat = tensor.flatten()
    body, wide = flat.numel() // _ROW * _ROW, torch.promote_types(flat.dtype, torch.float32)
    norms = torch.linalg.vector_norm(flat[:body].view(-1, _ROW), dim=1, dtype=wide)
    rest = torch.linalg.vector_norm(flat[body:], dtype=wide)
    return torch.cat([norms, rest[None]]).double().square().sum()
