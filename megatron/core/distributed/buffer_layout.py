"""Where each parameter lies in a flat buffer, and how the buffer is cut into buckets: arithmetic only.

    | decayed: weight A .. weight B .. | weight C .. weight D .. | not decayed: bias, norm, .. |
    | bucket                           | bucket                  | bucket                      |
     ^ every parameter starts at a multiple of ALIGNMENT elements; buckets end at a multiple of what they are padded to

The optimizer's parameter groups decide the order, so that each group is one contiguous slice: one fused kernel updates
it, one reduction takes its norm, one copy casts it. A bucket is what one collective carries; it lies inside one group.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

ALIGNMENT = 64
"""Elements; 256 bytes in float32, enough for vector loads and for NCCL in any number format."""
HIGH_BANDWIDTH_PADDING = 2**16
"""Elements a bucket is padded to where NCCL's rings and trees run fastest over sizes divisible by a power of two."""


class GroupKey(NamedTuple):
    """What the optimizer's parameter groups are told apart by."""

    has_weight_decay: bool


class Slot(NamedTuple):
    """One parameter's place: elements [start, start + numel) of the buffer, then zeros up to `padded_end`."""

    start: int
    numel: int

    @property
    def padded_end(self) -> int:
        """Where the next parameter may start."""
        return self.start + _padded(self.numel, ALIGNMENT)


class BucketRange(NamedTuple):
    """Elements [start, stop) of the buffer, and the parameters in them: indices in the given order, ascending."""

    start: int
    stop: int
    params: tuple[int, ...]


class BufferLayout(NamedTuple):
    """Places of all parameters (in the given order), the slice of each group, and the buckets, in elements."""

    slots: list[Slot]
    segments: dict[GroupKey, slice]
    buckets: list[BucketRange]
    numel: int


def group_key(name: str, shape: Sequence[int]) -> GroupKey:
    """The group of a parameter: biases and one-dimensional weights (norms) get no weight decay."""
    return GroupKey(has_weight_decay=not (name.endswith(".bias") or len(shape) == 1))


def lay_out(
    params: Sequence[tuple[str, Sequence[int]]],
    *,
    bucket_size: int | None = None,
    padding: int = ALIGNMENT,
    alone: Collection[int] = (),
) -> BufferLayout:
    """Places for parameters given as (name, shape): group by group, decayed ones first, in the given order inside.

    bucket_size: elements after which a bucket is full; None: one bucket for each group. padding: each bucket's length
    is a multiple of it; a multiple of ALIGNMENT. alone: parameters, by index, that get a bucket of their own.
    """
    keys = [group_key(name, shape) for name, shape in params]
    sizes = [math.prod(shape) for _, shape in params]
    slots: dict[int, Slot] = {}
    segments: dict[GroupKey, slice] = {}
    buckets: list[BucketRange] = []
    end = 0
    for key in sorted(set(keys), reverse=True):
        first = end
        members = [index for index in range(len(params)) if keys[index] == key]
        for bucket in _divide(members, sizes, bucket_size, alone):
            start = end
            for index in bucket:
                slots[index] = Slot(end, sizes[index])
                end = slots[index].padded_end
            end = start + _padded(end - start, padding)
            buckets.append(BucketRange(start, end, tuple(bucket)))
        segments[key] = slice(first, end)
    return BufferLayout([slots[index] for index in range(len(params))], segments, buckets, end)


def _divide(
    members: list[int], sizes: Sequence[int], bucket_size: int | None, alone: Collection[int]
) -> Iterator[list[int]]:
    """Full buckets from the end, where backward begins, so that what is left for the last reduction is small."""
    buckets: list[list[int]] = []
    filled: int | None = None  # elements in the newest bucket; None: the next parameter opens another
    for index in reversed(members):
        if filled is None or index in alone:
            buckets.append([])
            filled = 0
        buckets[-1].insert(0, index)
        filled += sizes[index]
        if index in alone or (bucket_size is not None and filled >= bucket_size):
            filled = None
    return reversed(buckets)


def _padded(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple
