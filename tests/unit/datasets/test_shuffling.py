# SPDX-License-Identifier: Apache-2.0
"""The shuffle in blocks equals numpy's, down to the state it leaves the generator in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets import index_builders
from megatron.core.datasets.index_builders import build_document_index, build_shuffle_index, plan_epochs, shuffle


def state_of(random: np.random.RandomState) -> list[Any]:
    return [part.tolist() if isinstance(part, np.ndarray) else part for part in random.get_state(legacy=True)]


def shuffle_both(values: Any, seed: int) -> None:
    """Shuffle copies both ways and compare values and states."""
    ours, expected = values.copy(), values.copy()
    our_random, random = np.random.RandomState(seed), np.random.RandomState(seed)
    shuffle(ours, our_random)
    random.shuffle(expected)
    np.testing.assert_array_equal(ours, expected)
    assert state_of(our_random) == state_of(random)


@settings(max_examples=300)
@given(
    count=st.integers(0, 300),
    seed=st.integers(0, 2**32 - 1),
    words_at_once=st.integers(1, 400),
    plain_up_to=st.integers(1, 40),
    dtype=st.sampled_from([np.int32, np.uint32, np.int64]),
    distinct=st.booleans(),
)
def test_blocks_equal_numpy(
    count: int, seed: int, words_at_once: int, plain_up_to: int, dtype: Any, distinct: bool
) -> None:
    """Blocks as long as the array: most swaps share a position, and every power of two is crossed."""
    values = np.arange(count, dtype=dtype) if distinct else np.arange(count, dtype=dtype) // 7
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(index_builders, "_WORDS_AT_ONCE", words_at_once)
        patched.setattr(index_builders, "_PLAIN_UP_TO", plain_up_to)
        shuffle_both(values, seed)


@pytest.mark.parametrize("count", [2**21, 2**21 + 1, 2**22 + 12345])
def test_the_sizes_that_take_blocks(count: int) -> None:
    shuffle_both(np.arange(count, dtype=np.int32), 1234)


def test_more_values_than_a_word_can_number_are_left_to_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_builders, "_PLAIN_UP_TO", 10)
    monkeypatch.setattr(index_builders, "_MOST_VALUES", 99)
    monkeypatch.setattr(index_builders, "_draw_places", lambda *_: pytest.fail("drawn in blocks"))
    shuffle_both(np.arange(100), 1)


def test_indices_are_shuffled_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both indices take their permutations from one generator, one after the other."""
    monkeypatch.setattr(index_builders, "_PLAIN_UP_TO", 100)
    random, expected = np.random.RandomState(3), np.random.RandomState(3)
    plan = plan_epochs(1000, 102, 30, 1)
    documents = np.arange(400, dtype=np.int32)
    index = build_document_index(documents, plan, random)
    order = build_shuffle_index(700, 1000, random)
    first, last = np.tile(documents, 3), documents.copy()
    expected.shuffle(first)
    expected.shuffle(last)
    assert index.tolist() == [*first, *last]
    head, rest = np.arange(700), np.arange(700, 1000)
    expected.shuffle(head)
    expected.shuffle(rest)
    assert order.tolist() == [*head, *rest]
