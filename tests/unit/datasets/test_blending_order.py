# SPDX-License-Identifier: Apache-2.0
"""The order of a blend equals its rule written as a plain loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets import blending_order
from megatron.core.datasets.blending_order import build_blending_indices, build_exhaustive_blending_indices


def draws_by_the_rule(weights: Any, size: int, limits: Any = None) -> list[int]:
    counts = [0] * len(weights)
    draws = []
    for s in range(size):
        behind = [w * max(s, 1) - c for w, c in zip(weights.tolist(), counts, strict=True)]
        for d, count in enumerate(counts):
            if limits is not None and count >= limits[d]:
                behind[d] = float("-inf")
        best = behind.index(max(behind))
        draws.append(best)
        counts[best] += 1
    return draws


def blend_weights(n: int, seed: int, concentration: float) -> Any:
    return np.random.RandomState(seed).dirichlet(np.full(n, concentration)) if concentration else np.full(n, 1 / n)


@pytest.mark.parametrize("segments", [3, 50, 700])
@pytest.mark.parametrize("few", [0, 10])
@pytest.mark.parametrize("concentration", [0, 1.0, 0.1])
@pytest.mark.parametrize("n", [1, 2, 3, 11, 40])
def test_blending_in_segments_equals_the_rule(
    n: int, concentration: float, few: int, segments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Side by side or one by one, with equal weights (ties at every step) and with very small ones."""
    monkeypatch.setattr(blending_order, "_PLAIN_BELOW", 0)
    monkeypatch.setattr(blending_order, "_SEGMENTS", segments)
    monkeypatch.setattr(blending_order, "_HEAD_STEPS", 5)
    monkeypatch.setattr(blending_order, "_FEW_WRONG", few)
    monkeypatch.setattr(blending_order, "_MAX_ROUNDS", 2 if few else 1000)
    monkeypatch.setattr(blending_order, "_TABLE_ABOVE", 3)
    weights = blend_weights(n, segments, concentration)
    dataset_index, sample_index = build_blending_indices(weights, 1500)
    assert dataset_index.tolist() == draws_by_the_rule(weights, 1500)
    for d in range(n):
        assert sample_index[dataset_index == d].tolist() == list(range(int((dataset_index == d).sum())))

    sizes = np.random.RandomState(n).randint(1, 1500 // n + 1, size=n)
    total = int(sizes.sum())
    dataset_index, sample_index = build_exhaustive_blending_indices(sizes)
    assert dataset_index.tolist() == draws_by_the_rule(sizes / total, total, sizes)
    for d in range(n):
        assert sample_index[dataset_index == d].tolist() == list(range(sizes[d]))


WEIGHTS = st.one_of(
    st.lists(st.floats(1e-12, 1.0), min_size=1, max_size=12),
    st.lists(st.integers(0, 30).map(lambda e: 2.0**-e), min_size=1, max_size=12),
    st.integers(2, 12).map(lambda n: [1.0] * n),
    st.sampled_from([[1e-6, 1 - 1e-6], [1 - 1e-6, 1e-6], [1e-300, 1.0], [1.0, 0.0, 1.0]]),
)


@settings(max_examples=150)
@given(
    weights=WEIGHTS,
    size=st.integers(1, 500),
    segments=st.integers(2, 60),
    head=st.integers(1, 20),
    few=st.integers(0, 3),
    rare_below=st.sampled_from([0, 2, 20]),
)
def test_any_weights_in_segments_equal_the_rule(
    weights: list[float], size: int, segments: int, head: int, few: int, rare_below: int
) -> None:
    shares = np.asarray(weights) / np.sum(weights)
    sizes = np.ceil(shares * size / 2).astype(np.int64)
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {
            "PLAIN_BELOW": 0,
            "SEGMENTS": segments,
            "HEAD_STEPS": head,
            "FEW_WRONG": few,
            "RARE_BELOW": rare_below,
            "TABLE_ABOVE": 4,
        }.items():
            patched.setattr(blending_order, f"_{name}", value)
        order = build_blending_indices(shares, size)[0]
        used_up = build_exhaustive_blending_indices(sizes)[0]
    assert order.tolist() == draws_by_the_rule(shares, size)
    total = int(sizes.sum())
    assert used_up.tolist() == draws_by_the_rule(sizes / total, total, sizes)


@pytest.mark.parametrize("kind", ["powers of two", "very uneven"])
def test_rare_datasets_do_not_end_in_the_plain_loop(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each segment that must be repaired alone takes as long as a loop in Python."""
    weights = 2.0 ** -np.arange(1, 31) if kind == "powers of two" else blend_weights(30, 1, 0.1)
    weights /= weights.sum()
    alone: list[int] = []
    run_plainly = blending_order._Segments._run_plainly

    def counted(self: Any, number: int) -> None:
        alone.append(number)
        run_plainly(self, number)

    monkeypatch.setattr(blending_order._Segments, "_run_plainly", counted)
    monkeypatch.setattr(blending_order, "_SEGMENTS", 200)
    size = 200_000
    order, ranks = build_blending_indices(weights, size)
    plain, plain_ranks, _ = blending_order._draw_plainly(weights, 0, size, np.zeros(30), None)
    np.testing.assert_array_equal(order, plain)
    np.testing.assert_array_equal(ranks, plain_ranks)
    assert len(alone) <= 100, len(alone)  # of 800


def test_a_table_without_the_dataset_to_draw_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A level that is far too high leaves the right datasets out in most windows."""
    monkeypatch.setattr(blending_order, "_PLAIN_BELOW", 0)
    monkeypatch.setattr(blending_order, "_SEGMENTS", 20)
    window = blending_order._draw_window
    leaves_out: list[bool] = []

    def too_high(weights: Any, steps: Any, drawn: Any, limits: Any, level: float, out: Any) -> Any:
        found = window(weights, steps, drawn, limits, level + 0.1, out)
        leaves_out.append(bool((found <= level + 0.1).any()))
        return found

    monkeypatch.setattr(blending_order, "_draw_window", too_high)
    weights = blend_weights(60, 1, 1.0)
    assert build_blending_indices(weights, 4000)[0].tolist() == draws_by_the_rule(weights, 4000)
    assert any(leaves_out)


def test_a_million_samples_of_a_hundred_datasets_need_no_compiler() -> None:
    weights = blend_weights(100, 1, 1.0)
    fast, ranks = build_blending_indices(weights, 1_000_000)
    plain, plain_ranks, _ = blending_order._draw_plainly(weights, 0, 20_000, np.zeros(100), None)
    np.testing.assert_array_equal(fast[:20_000], plain)
    np.testing.assert_array_equal(ranks[:20_000], plain_ranks)
    assert np.abs(np.bincount(fast, minlength=100) - weights * 1_000_000).max() < 1
