# SPDX-License-Identifier: Apache-2.0
"""Which ranks compute which samples of a step: every sample once, no rank waits for one that waits, little is idle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.context_parallel.planning import (
    ContextPlan,
    SampleCost,
    compute_static_balance,
    count_ranks_of_sample,
    plan_step,
)
from megatron.core.errors import ConfigError

COST = SampleCost(per_token=100.0, per_pair=1.0)
MAX = 8


@st.composite
def steps(draw: st.DrawFn) -> ContextPlan:
    ranks = 2 ** draw(st.integers(0, 4))
    lengths = draw(st.lists(st.integers(1, MAX * ranks), max_size=40))
    return plan_step(lengths, ranks, MAX, COST)


@pytest.mark.parametrize(("length", "ranks"), [(1, 1), (8, 1), (9, 2), (16, 2), (17, 4), (32, 4), (33, 8)])
def test_a_sample_has_the_fewest_ranks_that_it_fits(length: int, ranks: int) -> None:
    assert count_ranks_of_sample(length, MAX) == ranks


@given(steps())
def test_every_sample_is_computed_once_by_a_block_that_fits(plan: ContextPlan) -> None:
    holders: dict[int, list[int]] = {sample: [] for sample in range(len(plan.lengths))}
    for rank in range(plan.num_ranks):
        for microbatch in plan.list_microbatches(rank):
            tokens = sum(plan.lengths[sample] for sample in microbatch.samples)
            assert tokens <= MAX * microbatch.num_ranks
            for sample in microbatch.samples:
                assert microbatch.num_ranks == count_ranks_of_sample(plan.lengths[sample], MAX)
                holders[sample].append(rank)
    for sample, ranks in holders.items():
        size = count_ranks_of_sample(plan.lengths[sample], MAX)
        assert ranks == list(range(ranks[0], ranks[0] + size))
        assert ranks[0] % size == 0


def block(rank: int, size: int) -> range:
    """The ranks of the aligned block that has this rank."""
    return range(rank // size * size, (rank // size + 1) * size)


@given(steps())
def test_all_ranks_get_to_their_end(plan: ContextPlan) -> None:
    """Each rank takes its microbatches in order, and a shared one when all its ranks are there."""
    waiting = {rank: list(plan.list_microbatches(rank)) for rank in range(plan.num_ranks)}
    while any(waiting.values()):
        heads = {rank: left[0] for rank, left in waiting.items() if left}
        able = [rank for rank, m in heads.items() if all(heads.get(other) == m for other in block(rank, m.num_ranks))]
        assert able, f"nobody can go on: {waiting}"
        for rank in able:
            waiting[rank].pop(0)


@given(steps())
def test_work_is_balanced_within_the_largest_share(plan: ContextPlan) -> None:
    """Whoever has the most was the least loaded when it got its last sample: it is ahead of the others by no more."""
    shares = [COST.estimate(length) / count_ranks_of_sample(length, MAX) for length in plan.lengths]
    assert max(plan.work) - sum(plan.work) / plan.num_ranks <= max(shares, default=0.0) + 1e-6
    assert sum(plan.work) == pytest.approx(sum(map(COST.estimate, plan.lengths)))
    assert 0 < plan.balance <= 1 + 1e-9


def test_a_plan_is_a_function_of_the_lengths() -> None:
    lengths = [5, 3, 8, 17, 8, 1, 30, 3]
    assert plan_step(lengths, 4, MAX, COST).blocks == plan_step(tuple(lengths), 4, MAX, COST).blocks


def test_an_example() -> None:
    plan = plan_step([30, 12, 8, 5, 4, 4, 3], 4, MAX, COST)
    by_rank = [[(m.samples, m.num_ranks) for m in plan.list_microbatches(rank)] for rank in range(4)]
    assert by_rank == [
        [((0,), 4), ((1,), 2), ((5,), 1)],
        [((0,), 4), ((1,), 2), ((6,), 1)],
        [((0,), 4), ((2,), 1)],
        [((0,), 4), ((3,), 1), ((4,), 1)],
    ]
    assert plan.samples_by_size == {1: 5, 2: 1, 4: 1}
    assert plan_step([3, 2, 1, 2], 1, MAX, COST).list_microbatches(0) == (((0, 1, 3, 2), 1),), "short ones are packed"
    assert plan_step([], 2, MAX, COST).list_microbatches(1) == ()


def test_balance_against_the_static_layout() -> None:
    """One data-parallel rank has the long conversations, another the short ones; and of a sequence that all share, the
    piece in which a long conversation ends is the most work."""
    quadratic = SampleCost(per_token=1.0, per_pair=1.0)
    sequences = [[[30, 2]], [[8, 8, 8, 8]], [[4] * 8], [[16, 10, 6]]]
    lengths = [length for microbatches in sequences for row in microbatches for length in row]
    planned = plan_step(lengths, 4, MAX, quadratic).balance
    assert compute_static_balance(sequences, 1, quadratic) == pytest.approx(1032 / (4 * 500)), "the longest one alone"
    assert compute_static_balance([[[8, 24]]], 2, quadratic) < 0.95
    assert compute_static_balance([[[32]]], 4, quadratic) == 1.0, "the zigzag pieces of one sample are equal work"
    assert planned > 0.9 > compute_static_balance(sequences, 1, quadratic)


def test_balance_of_long_conversations() -> None:
    """The table of docs/parallelism.md: log-normal lengths, and what fits packed into the next sequence."""
    # Llama 3 8B: see count_products.
    cost = SampleCost(7_504_658_432, 262_144)
    for length, ranks, cp, most, low, high in ((2**15, 8, 1, 2**12, 0.90, 0.95), (2**17, 16, 4, 2**15, 0.75, 0.81)):
        random = np.random.RandomState(1)
        planned, static = [], []
        for _ in range(20):
            sequences = [[packed(length, random) for _ in range(32 * cp // ranks)] for _ in range(ranks // cp)]
            lengths = [n for microbatches in sequences for row in microbatches for n in row[:-1]]
            planned.append(plan_step(lengths, ranks, most, cost).balance)
            static.append(compute_static_balance(sequences, cp, cost))
        assert min(planned) > 0.999
        assert low < sum(static) / len(static) < high


def packed(length: int, random: np.random.RandomState) -> list[int]:
    """Lengths until the next one does not fit, and what is left: padding."""
    row: list[int] = []
    while (n := min(max(32, int(random.lognormal(7.0, 1.6))), length)) <= length - sum(row):
        row.append(n)
    return [*row, length - sum(row)]


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(ConfigError, match="33 tokens is longer than --max-seqlen-per-dp-cp-rank 8 x 4 ranks = 32"):
        plan_step([5, 33], 4, MAX, COST)
    with pytest.raises(ConfigError, match="a power of two of data- and context-parallel ranks, not 6"):
        plan_step([5], 6, MAX, COST)
