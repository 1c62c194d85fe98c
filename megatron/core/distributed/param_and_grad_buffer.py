# SPDX-License-Identifier: Apache-2.0
"""Flat memory for parameters and gradients of one dtype, and the place of each parameter in it.

    param_data   [numel]  parameter.data is a view of it
    grad_data    [numel]  parameter.main_grad is a view of it, at the same place

    | weight A .. weight B .. | weight C .. weight D .. | vectors: bias, norm, .. |
    | bucket                  | bucket                  | bucket                  |
     ^ every parameter starts at a multiple of ALIGNMENT elements; buckets end at a multiple of what they are padded to

Zeroing, reducing, clipping and updating then are a few large operations instead of several for each parameter. Gaps
left by the alignment hold zeros in both and stay zero under every update.

Vectors (biases, norms, scales) come after everything else, because optimizers treat them alike: what is updated in one
way then is one contiguous slice, which one fused kernel updates, one reduction takes the norm of and one copy casts. A
bucket is what one collective carries; it lies on one side of that border.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.collectives import broadcast
from megatron.core.distributed.bucket import Bucket, Reduction
from megatron.core.flat_ranges import Range, merge_ranges
from megatron.core.placement import get_placement
from megatron.core.process_groups_config import Group
from megatron.core.stacked_parameters import bind_parts

NamedParams = Sequence[tuple[str, nn.Parameter]]
"""(name in the whole model, parameter)."""
ALIGNMENT = 64
"""Elements; 256 bytes in float32, enough for vector loads and for NCCL in any dtype."""
HIGH_BANDWIDTH_PADDING = 2**16
"""Elements a bucket is padded to where NCCL's rings and trees run fastest over sizes divisible by a power of two."""


class Slot(NamedTuple):
    """One parameter's place: elements [start, start + numel) of the flat memory, then zeros up to `padded_end`."""

    start: int
    numel: int

    @property
    def padded_end(self) -> int:
        """First position where the next parameter may start."""
        return self.start + _padded(self.numel, ALIGNMENT)


class BucketRange(NamedTuple):
    """Elements [start, stop) of the flat memory, and the parameters in them: indices in the given order, ascending."""

    start: int
    stop: int
    params: tuple[int, ...]


class BufferLayout(NamedTuple):
    """Places of all parameters (in the given order), and the buckets, in elements."""

    slots: list[Slot]
    vectors_start: int
    """Position of the first vector."""
    buckets: list[BucketRange]
    numel: int


def lay_out(
    sizes: Sequence[int],
    are_vectors: Sequence[bool],
    *,
    bucket_size: int | None = None,
    padding: int = ALIGNMENT,
    alone: Collection[int] = (),
) -> BufferLayout:
    """Places for parameters of these sizes, in elements: first the others, then the vectors, else in the given order.

    bucket_size: elements after which a bucket is full; None: one bucket on each side of the border. padding: each
    bucket's length is a multiple of it; a multiple of ALIGNMENT. alone: parameters, by index, that get a separate
    bucket.
    """
    slots: dict[int, Slot] = {}
    buckets: list[BucketRange] = []
    end = vectors_start = 0
    for of_vectors in (False, True):
        vectors_start = end
        members = [index for index, is_vector in enumerate(are_vectors) if is_vector == of_vectors]
        # Each side of the border has separate buckets.
        for bucket in _divide_into_buckets(members, sizes, bucket_size, alone):
            start = end
            for index in bucket:
                slots[index] = Slot(end, sizes[index])
                end = slots[index].padded_end
            # So that the slices of all processes are equally long, which reduce-scatter and all-gather require.
            end = start + _padded(end - start, padding)
            buckets.append(BucketRange(start, end, tuple(bucket)))
    return BufferLayout([slots[index] for index in range(len(sizes))], vectors_start, buckets, end)


def view_slot(flat: Tensor, slot: Slot, shape: Sequence[int]) -> Tensor:
    """The part of a flat tensor at this place, in the parameter's shape."""
    return flat[slot.start : slot.start + slot.numel].view(tuple(shape))


def _divide_into_buckets(
    members: list[int], sizes: Sequence[int], bucket_size: int | None, alone: Collection[int]
) -> Iterator[list[int]]:
    """Full buckets from the end, where backward begins, so that what is left for the last reduction is small."""
    buckets: list[list[int]] = []
    filled: int | None = None  # elements in the newest bucket; None: the next parameter opens another
    for index in reversed(members):
        if filled is None or index in alone:
            buckets.append([])
            filled = 0
        # The walk is backwards; inside a bucket the module's order stays.
        buckets[-1].insert(0, index)
        filled += sizes[index]
        # A parameter is never cut here: the last one may make a bucket longer than its size.
        if index in alone or (bucket_size is not None and filled >= bucket_size):
            filled = None
    return reversed(buckets)


def _padded(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


class ParamAndGradBuffer:
    """Moves the parameters into flat memory and gives each its `main_grad`.

    named_params: (name in the whole model, parameter), all of one dtype and device, each once; values are kept.
    grad_dtype: dtype in which gradients are accumulated and reduced. reduction: how gradients are combined. layout:
    where each parameter lies; every bucket divisible by the shards of the reduction.
    """

    def __init__(
        self,
        named_params: NamedParams,
        grad_dtype: torch.dtype,
        reduction: Reduction,
        layout: BufferLayout | None = None,
    ) -> None:
        first = named_params[0][1]
        self.names = [name for name, _ in named_params]
        self.params = [param for _, param in named_params]
        self.reduction = reduction
        self.is_expert = get_placement(first, self.names[0]).is_expert
        """True if these are weights of experts, which have separate buffers."""
        self.layout = layout or lay_out(
            [param.numel() for param in self.params],
            [get_placement(param, name).is_vector for name, param in named_params],
            padding=ALIGNMENT * reduction.shards.size(),
        )
        self.dtype = self.model_dtype = first.dtype
        self.device = first.device
        self.is_updated_as_it_is = False
        self.starts = [0] * len(self.params)
        """First element of each parameter that is stored here, counted in the flattened parameter."""
        # Zeros, not empty memory: the gaps take part in norms and updates and must not bring in nan.
        self.param_data = torch.zeros(self.layout.numel, dtype=first.dtype, device=first.device)
        self.grad_data = torch.zeros(self.layout.numel, dtype=grad_dtype, device=first.device)
        for param, slot in zip(self.params, self.layout.slots, strict=True):
            view = view_slot(self.param_data, slot, param.shape)
            view.copy_(param.detach())
            # The same Parameter object with other memory: modules, optimizers and hooks that hold it need not know.
            param.data = view
            param.main_grad = view_slot(self.grad_data, slot, param.shape)  # type: ignore[attr-defined]
            bind_parts(param)
        self.buckets = [
            Bucket(self.grad_data[start:stop], self.param_data[start:stop], reduction)
            for start, stop, _ in self.layout.buckets
        ]

    @property
    def owned(self) -> list[Range]:
        """Elements that this process updates: its slice of every bucket, where the optimizer's state is divided, else
        all."""
        shards = self.reduction.shards
        slices = []
        for start, stop, _ in self.layout.buckets:
            share = (stop - start) // shards.size()
            slices.append((start + shards.rank() * share, start + (shards.rank() + 1) * share))
        # Undivided, the buckets touch and are one range for one kernel; slices of several buckets never touch.
        return merge_ranges(slices) if shards.size() == 1 else slices

    def values(self, start: int, stop: int) -> Tensor:
        """Elements of the parameters, inside one of the ranges that are `owned`: a view."""
        return self.param_data[start:stop]

    def bucket_params(self) -> Iterator[tuple[Bucket, list[nn.Parameter]]]:
        """Every bucket with the parameters that lie in it."""
        # Indices, because the layout is arithmetic that knows no parameters.
        for bucket, (_, _, indices) in zip(self.buckets, self.layout.buckets, strict=True):
            yield bucket, [self.params[index] for index in indices]

    def named_views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, part of a flat tensor that is laid out like this buffer, in the parameter's shape)."""
        for name, param, slot in zip(self.names, self.params, self.layout.slots, strict=True):
            yield name, view_slot(flat, slot, param.shape)

    def zero_grad(self) -> None:
        """Clear all gradients."""
        self.grad_data.zero_()

    def broadcast_params(self, group: Group) -> None:
        """Replace the parameters by the values of the group's first process."""
        broadcast(self.param_data, group)
