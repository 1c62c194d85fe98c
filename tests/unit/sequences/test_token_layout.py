# SPDX-License-Identifier: Apache-2.0
"""The layout of a call: positions, segments, and sequences taken apart and put together again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.sequences.state import SequenceState
from megatron.core.sequences.token_layout import TokenLayout


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=6))
def test_packed_sequences(sizes: list[tuple[int, int]]) -> None:
    new, past = zip(*sizes, strict=True)
    layout = TokenLayout(new, past)
    assert layout.length == sum(new) and layout.longest == max(a + b for a, b in sizes)
    owners = [row for row, count in enumerate(new) for _ in range(count)]
    places = [past[row] + place for row, count in enumerate(new) for place in range(count)]
    assert layout.sequences.tolist() == owners and layout.positions.tolist() == places
    x = torch.arange(2 * layout.length).view(layout.length, 1, 2)
    runs = layout.group(x)
    # Neighbours with equally many tokens are computed together, and nothing is lost or moved.
    assert len(runs) == len(list(itertools.groupby(new)))
    assert [row for rows, _ in runs for row in range(rows.start, rows.stop)] == list(range(len(new)))
    assert torch.equal(layout.join([part for _, part in runs]), x)
    assert [part.shape for part in layout.split(x)] == [(count, 1, 2) for count in new]
    assert torch.equal(layout.join(layout.split(x)), x)
    assert layout.take_last(x, 1)[0, :, 0].tolist() == [2 * end - 2 for end in layout.bounds[1:]]


def test_sequences_in_step() -> None:
    layout = TokenLayout((3, 3), (4, 4), is_packed=False)
    assert layout.positions.tolist() == [4, 5, 6] and layout.longest == 7
    x = torch.arange(6).view(3, 2)
    assert layout.join_tokens([[0, 2, 4], [1, 3, 5]]).tolist() == x.t().tolist()
    ((rows, part),) = layout.group(x)
    assert rows == slice(0, 2) and part is x and layout.join([part]) is x
    assert torch.equal(layout.join(layout.split(x)), x)
    assert layout.take_last(x, 2).tolist() == [[2, 3], [4, 5]]


@pytest.mark.parametrize("chunk", [None, 2, 3, 100])
def test_segments_end_where_documents_and_chunks_do(chunk: int | None) -> None:
    layout = TokenLayout.of_documents((0, 3, 4, 9))
    for first, end in itertools.combinations(range(10), 2):
        found = list(layout.segments(first, end, chunk))
        assert [place for _, begin, stop in found for place in range(begin, stop)] == list(range(first, end))
        for start, begin, stop in found:
            assert start <= begin < stop
            for place in range(begin, stop):
                document = int(layout.starts[place])
                inside = place - document
                assert start == document + (0 if chunk is None else inside - inside % chunk)


def texts(held: Sequence[tuple[slice, tuple[torch.Tensor, ...]]]) -> list[list[int]]:
    assert [rows for rows, _ in held] == [slice(row, row + 1) for row in range(len(held))]
    return [x.flatten().int().tolist() for _, (x,) in held]


def test_state_of_unequal_sequences() -> None:
    state = SequenceState(3, 6)
    assert not state.begin([2, 2, 2]).is_packed
    state.update(1, torch.ones(2, 3, 1))
    layout = state.begin([1, 3, 1])
    assert layout.is_packed and layout.past == (2, 2, 2)
    assert texts(state.update(1, torch.full((5, 1, 1), 2.0))) == [[1, 1, 2], [1, 1, 2, 2, 2], [1, 1, 2]]
    state.rewind([3, 4, 3])
    state.select([1, 2])
    assert state.begin([1, 1]).past == (4, 3)
    assert texts(state.update(1, torch.tensor([3.0, 4.0]).view(2, 1, 1))) == [[1, 1, 2, 2, 3], [1, 1, 2, 4]]
    with pytest.raises(AssertionError, match="7 tokens do not fit into a state of 6"):
        state.begin([2, 2])
