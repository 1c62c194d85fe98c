"""Where each parameter lies in a flat buffer, and how the buffer is cut into buckets: arithmetic only.

    | weight A .. weight B .. | weight C .. weight D .. | vectors: bias, norm, .. |
    | bucket                  | bucket                  | bucket                  |
     ^ every parameter starts at a multiple of ALIGNMENT elements; buckets end at a multiple of what they are padded to

Vectors (biases, norms, scales) lie behind everything else, because optimizers treat them alike: what is updated in one
way then is one contiguous slice, which one fused kernel updates, one reduction takes the norm of and one copy casts. A
bucket is what one collective carries; it lies on one side of that border.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

ALIGNMENT = 64
"""Elements; 256 bytes in float32, enough for vector loads and for NCCL in any number format."""
HIGH_BANDWIDTH_PADDING = 2**16
"""Elements a bucket is padded to where NCCL's rings and trees run fastest over sizes divisible by a power of two."""


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
    """Places of all parameters (in the given order), and the buckets, in elements."""

    slots: list[Slot]
    vectors_start: int
    """Where the vectors begin."""
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
    bucket's length is a multiple of it; a multiple of ALIGNMENT. alone: parameters, by index, that get a bucket of
    their own.
    """
    slots: dict[int, Slot] = {}
    buckets: list[BucketRange] = []
    end = vectors_start = 0
    for of_vectors in (False, True):
        vectors_start = end
        members = [index for index, is_vector in enumerate(are_vectors) if is_vector == of_vectors]
        for bucket in _divide(members, sizes, bucket_size, alone):
            start = end
            for index in bucket:
                slots[index] = Slot(end, sizes[index])
                end = slots[index].padded_end
            end = start + _padded(end - start, padding)
            buckets.append(BucketRange(start, end, tuple(bucket)))
    return BufferLayout([slots[index] for index in range(len(sizes))], vectors_start, buckets, end)


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
