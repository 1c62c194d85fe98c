# SPDX-License-Identifier: Apache-2.0
"""Boxes of a tensor, and the ranges of its flat memory that they are: arithmetic only.

    [4, 3]   0  1  2        range [2, 10) = box (0, 2:3), rows 1 to 2, box (3, 0:1)
             3  4  5        box (1:3, 0:2) = ranges [3, 5) and [6, 8)
             6  7  8
             9 10 11

The distributed optimizer cuts flat memory without regard to rows; checkpoints store boxes, and the gradient norm counts
blocks of a parameter. Both meet here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from megatron.core.placement import Box

Range = tuple[int, int]
"""(start, stop) in elements."""


def find_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The elements [start, stop) of a contiguous tensor as boxes, in their order; each box is contiguous, too.

    At most 2 n - 1 boxes for n dimensions: the end of one row, whole rows, the beginning of another, and so inside.
    """
    if start >= stop:
        return []
    # A scalar is one element, in a box without dimensions.
    if not shape:
        return [()]
    row = math.prod(shape[1:])
    # `stop` is exclusive: where it is a row's first element, `last` is a row that holds nothing of the range.
    first, last = start // row, stop // row
    if first == last:
        return _in_row(shape, first, start, stop)
    head = _in_row(shape, first, start, (first + 1) * row) if start % row else []
    whole = first + 1 if start % row else first
    middle = [((whole, last - whole), *((0, size) for size in shape[1:]))] if whole < last else []
    return head + middle + _in_row(shape, last, last * row, stop)


def find_ranges(shape: Sequence[int], box: Box) -> list[Range]:
    """The flat ranges that a box of a contiguous tensor is, in ascending order; neighbours are merged."""
    if any(length == 0 for _, length in box):
        return []
    whole = len(shape)  # dimensions from here on are taken whole, so that the box is contiguous over them
    while whole > 0 and box[whole - 1] == (0, shape[whole - 1]):
        whole -= 1
    if whole == 0:
        return [(0, math.prod(shape))]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    outer = [range(start * stride, (start + length) * stride, stride) for (start, length), stride in
             zip(box[: whole - 1], strides, strict=False)]  # fmt: skip
    start, length = box[whole - 1]
    stride = strides[whole - 1]
    first = [sum(offsets) + start * stride for offsets in itertools.product(*outer)]
    return merge_ranges((begin, begin + length * stride) for begin in first)


def merge_ranges(ranges: Iterable[Range]) -> list[Range]:
    """The ranges in ascending order, those that touch joined."""
    joined: list[Range] = []
    # Touching, not overlapping: callers' ranges are disjoint.
    for start, stop in sorted(ranges):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def intersect_ranges(first: Iterable[Range], second: Sequence[Range]) -> list[Range]:
    """Return what both lists of ranges hold, each list ascending and without overlaps; pieces stay apart where either
    cuts."""
    found: list[Range] = []
    position = 0
    for start, stop in first:
        while position < len(second) and second[position][1] <= start:
            position += 1
        # Both lists ascend: what ends before this range starts is never looked at again.
        for other_start, other_stop in itertools.islice(second, position, None):
            if other_start >= stop:
                break
            found.append((max(start, other_start), min(stop, other_stop)))
    return found


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Box]:
    """Boxes of elements that all lie in one index of the first dimension."""
    offset = row * math.prod(shape[1:])
    return [((row, 1), *box) for box in find_boxes(shape[1:], start - offset, stop - offset)]
