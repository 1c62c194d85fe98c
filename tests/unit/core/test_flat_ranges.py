# SPDX-License-Identifier: Apache-2.0
"""Boxes and flat ranges, against tensors that hold their own indices."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.flat_ranges import find_boxes, find_ranges, intersect_ranges, merge_ranges

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


def indices(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).view(shape)


def elements(ranges: list[tuple[int, int]]) -> list[int]:
    return [index for start, stop in ranges for index in range(start, stop)]


@given(shapes, st.data())
def test_a_range_is_few_boxes_that_hold_its_elements_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    boxes = find_boxes(shape, start, stop)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    found = [indices(shape)[tuple(slice(s, s + n) for s, n in box)].flatten() for box in boxes]
    assert torch.cat([torch.empty(0, dtype=torch.long), *found]).tolist() == list(range(start, stop))


@given(shapes, st.data())
def test_a_box_is_the_ranges_that_hold_its_elements(shape: tuple[int, ...], data: st.DataObject) -> None:
    starts = [data.draw(st.integers(0, size)) for size in shape]
    box = tuple((start, data.draw(st.integers(0, size - start))) for start, size in zip(starts, shape, strict=True))
    expected = indices(shape)[tuple(slice(s, s + n) for s, n in box)].flatten().tolist()
    ranges = find_ranges(shape, box)
    assert elements(ranges) == expected
    assert merge_ranges(ranges) == ranges


def cuts() -> st.SearchStrategy[list[tuple[int, int]]]:
    points = st.lists(st.integers(0, 40), max_size=12, unique=True).map(sorted)
    return points.map(lambda found: [(a, b) for a, b in zip(found[::2], found[1::2], strict=False)])


@given(cuts(), cuts())
def test_common_is_the_intersection(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    assert elements(intersect_ranges(first, second)) == sorted(set(elements(first)) & set(elements(second)))


def test_examples_of_the_module() -> None:
    assert find_boxes((4, 3), 2, 10) == [((0, 1), (2, 1)), ((1, 2), (0, 3)), ((3, 1), (0, 1))]
    assert find_ranges((4, 3), ((1, 2), (0, 2))) == [(3, 5), (6, 8)]
    assert intersect_ranges([(0, 10)], [(0, 4), (4, 10)]) == [(0, 4), (4, 10)]
