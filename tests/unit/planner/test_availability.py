# SPDX-License-Identifier: Apache-2.0
"""The model of failures against a simulation that knows nothing of it, and the table of the docs against the model."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megatron.planner.availability import FailureModel, find_best_interval, find_longest_restart

DOCS = Path(__file__).resolve().parents[3] / "docs" / "reliability.md"


@pytest.mark.parametrize(
    ("gpus", "restart", "interval", "stall"), [(16_384, 300.0, 600.0, 5.0), (4096, 60.0, 1800.0, 20.0)]
)
def test_a_simulated_job_has_the_share_of_the_model(gpus: int, restart: float, interval: float, stall: float) -> None:
    model = FailureModel.of_job(gpus, restart, interval, stall)
    generator = random.Random(2)
    clock, saved, next_failure = 0.0, 0.0, generator.expovariate(model.failures_per_second)
    while saved < 4e7:
        # One interval and its save, or a failure in the middle of it.
        if next_failure > clock + interval + stall:
            clock, saved = clock + interval + stall, saved + interval
            continue
        clock = next_failure
        ends_at = clock + restart
        while (next_failure := clock + generator.expovariate(model.failures_per_second)) < ends_at:
            clock, ends_at = next_failure, next_failure + restart
        clock = ends_at
    assert saved / clock == pytest.approx(model.useful_share, abs=0.004)


def test_the_longest_restart_reaches_the_goal_exactly() -> None:
    for gpus in (8, 1000, 16_384):
        seconds = find_longest_restart(gpus, 20.0, 0.995, 0.05)
        if seconds is not None:
            assert FailureModel.of_job(gpus, seconds, 20.0, 0.05).useful_share == pytest.approx(0.995)
    assert find_longest_restart(16_384, 600.0, 0.999) is None


def test_no_other_interval_is_better_than_youngs() -> None:
    best = find_best_interval(4096, 2.0)
    shares = [FailureModel.of_job(4096, 60.0, best * factor, 2.0).useful_share for factor in (0.8, 1.0, 1.25)]
    assert max(shares) == shares[1]


def test_the_table_of_the_docs_is_the_models() -> None:
    text = DOCS.read_text()
    for gpus in (8, 64, 512, 1024, 4096, 16_384):
        between = 1 / FailureModel.of_job(gpus, 0, 1).failures_per_second / 3600
        shares = [
            f"{100 * FailureModel.of_job(gpus, *costs, 0.01).useful_share:.2f}"
            for costs in ((600.0, 1800.0), (120.0, 600.0), (30.0, 120.0), (5.0, 30.0))
        ]
        longest = find_longest_restart(gpus, 60.0, 0.999, 0.01)
        last = "none" if longest is None else f"{longest:,.0f} s"
        assert f"| {gpus:,} | {between:,.1f} h | {' | '.join(shares)} | {last} |" in text
