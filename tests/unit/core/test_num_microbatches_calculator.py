# SPDX-License-Identifier: Apache-2.0
"""The batch-size staircase: ramp-up, step schedule, refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.errors import ConfigError
from megatron.core.num_microbatches_calculator import (
    BatchSizeStep,
    NumMicrobatchesCalculator,
    build_num_microbatches_calculator,
    compute_rampup_steps,
    parse_step_schedule,
)
from tests.support.run_flags import SMALLEST_RUN, run_config


def build(**settings: object):  # type: ignore[no-untyped-def]
    defaults: dict[str, object] = {"global_batch_size": None, "micro_batch_size": 1, "data_parallel_size": 1}
    return build_num_microbatches_calculator(**(defaults | settings))  # type: ignore[arg-type]


def test_thresholds_of_a_step_schedule_are_tokens() -> None:
    steps = parse_step_schedule("0:16 2.4B:320, 1T:640", tokens_per_sample=4096)
    assert steps == (BatchSizeStep(0, 16), BatchSizeStep(585937, 320), BatchSizeStep(244140625, 640))
    assert 585937 * 4096 < 2_400_000_000 <= 585938 * 4096


def test_a_threshold_in_tokens_becomes_samples_by_rounding_down() -> None:
    assert parse_step_schedule("0:1 4000:2", tokens_per_sample=128)[1] == BatchSizeStep(31, 2)
    # Two thresholds within one sample: the later one counts from there on.
    batch_size = build(step_batch_size_schedule="0:1 100:2 300:3 310:4", seq_length=128)
    assert [batch_size.global_batch_size(consumed) for consumed in (0, 1, 2, 3)] == [2, 2, 4, 4]


def test_entries_are_sorted_with_a_note() -> None:
    assert parse_step_schedule("40:16 0:8 1K:24") == parse_step_schedule("0:8 40:16 1K:24")
    base = SMALLEST_RUN.replace("--global-batch-size 8", "--step-batch-size-schedule 1K:4 0:2,512:8")
    config = run_config("", base)
    assert config.training.step_batch_size_schedule == "0:2 512:8 1K:4"
    assert any("1K:4 0:2,512:8 is out of order; it is taken as 0:2 512:8 1K:4" in note for note in config.notes)
    assert not any("out of order" in note for note in run_config("", base.replace("1K:4 0:2,512:8", "0:2,1K:4")).notes)


def test_without_a_global_batch_size_a_step_is_one_microbatch() -> None:
    batch_size = build(micro_batch_size=4, data_parallel_size=2)
    assert (batch_size.global_batch_size(0), batch_size.num_microbatches(0)) == (8, 1)


@pytest.mark.parametrize(
    "text",
    ["", "8", "0:8 40", "0:8,40:x", "1:8", "0:8 40:16 40:32", "0:8 1K:4 1000:2", "0:8 -1:4", "0:8 1e3:16", "0:٨"],
)
def test_bad_step_schedules_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--step-batch-size-schedule"):
        parse_step_schedule(text)


@pytest.mark.parametrize("ramp", [(8, 8), (0, 8, 10), (8, 0, 10), (8, 8, -1), (8, 7, 10), (64, 8, 10)])
def test_bad_rampups_are_refused(ramp: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="--rampup-batch-size"):
        compute_rampup_steps(ramp, 32)


def test_every_size_to_come_must_be_shared_evenly() -> None:
    batch_size = build(step_batch_size_schedule="0:8 10:12 40:18", micro_batch_size=4, data_parallel_size=2)
    with pytest.raises(ConfigError) as refused:
        batch_size.check_sizes()
    assert [problem.split(" is")[0] for problem in refused.value.problems] == [
        "global batch size 12", "global batch size 18",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="global batch size 12 "):
        batch_size.check_sizes(consumed_samples=16)
    batch_size.check_sizes(iterations=2)  # 16 samples: the run ends before the second size


def test_a_size_that_was_passed_needs_not_be_shared() -> None:
    """0:2 was trained on 2 ranks; 4 ranks can go on with 8 and 16, and count the iterations as if they had begun."""
    flags = {"step_batch_size_schedule": "0:2 10:8 42:16", "micro_batch_size": 1}
    two, four = build(**flags, data_parallel_size=2), build(**flags, data_parallel_size=4)
    four.check_sizes(consumed_samples=10)
    with pytest.raises(ConfigError, match="global batch size 2 "):
        four.check_sizes(consumed_samples=8)
    assert two.count_iterations(100) == four.count_iterations(100) == 5 + 4 + 3
    assert [(s.consumed_samples, s.global_batch_size, s.iterations) for s in two.stretches(4, 20)] == [
        (4, 2, 3), (10, 8, 4), (42, 16, 13),
    ]  # fmt: skip


def met_from_start(batch_size: NumMicrobatchesCalculator, iterations: int) -> list[int]:
    """The global batch sizes of the first iterations of a run, one after the other."""
    sizes: list[int] = []
    while len(sizes) < iterations:
        sizes.append(batch_size.global_batch_size(sum(sizes)))
    return sizes


@given(st.lists(st.integers(0, 200), max_size=4, unique=True), st.data())
def test_stretches_are_the_sizes_met_step_by_step(thresholds: list[int], data: st.DataObject) -> None:
    thresholds = [0, *(at + 1 for at in thresholds)]
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=len(thresholds), max_size=len(thresholds)))
    text = " ".join(f"{at}:{size}" for at, size in zip(thresholds, sizes, strict=True))
    batch_size = build(step_batch_size_schedule=text)
    consumed, met = data.draw(st.integers(0, 100)), []
    stretches = list(batch_size.stretches(consumed, 60))
    for _ in range(60):
        met.append(batch_size.global_batch_size(consumed))
        consumed += met[-1]
    assert [stretch.global_batch_size for stretch in stretches for _ in range(stretch.iterations or 0)] == met
    assert batch_size.count_samples(7) == sum(met_from_start(batch_size, 7))
    samples, count, consumed = data.draw(st.integers(0, 400)), 0, 0
    while consumed + batch_size.global_batch_size(consumed) <= samples:
        consumed += batch_size.global_batch_size(consumed)
        count += 1
    assert batch_size.count_iterations(samples) == count


def test_two_sources_of_the_batch_size_contradict() -> None:
    with pytest.raises(ConfigError, match="--global-batch-size both"):
        build(global_batch_size=8, step_batch_size_schedule="0:8")
    with pytest.raises(ConfigError, match="needs --global-batch-size"):
        build(rampup_batch_size=(8, 8, 10))


@given(
    start=st.integers(1, 20),
    increment=st.integers(1, 20),
    increments=st.integers(0, 12),
    samples=st.integers(0, 5000),
    consumed=st.integers(0, 6000),
)
def test_rampup_is_the_usual_formula(start: int, increment: int, increments: int, samples: int, consumed: int) -> None:
    batch_size = build(global_batch_size=start + increment * increments, rampup_batch_size=(start, increment, samples))
    done = increments if consumed >= samples else consumed * increments // samples
    assert batch_size.global_batch_size(consumed) == start + done * increment


@pytest.mark.flags("--rampup-batch-size", "--step-batch-size-schedule")
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--rampup-batch-size 2 2 8 --global-batch-size 6 --train-iters 10", [2, 4, 6]),
        ("--step-batch-size-schedule 0:2,256:4,512:8 --train-samples 64", [2, 4, 8]),
        ("--global-batch-size 6 --train-iters 10", [6, 6, 6]),
    ],
)
def test_flags_reach_the_calculator(flags: str, expected: list[int]) -> None:
    from megatron.training.data.samples import build_batch_size_calculator

    base = SMALLEST_RUN.replace("--global-batch-size 8 --train-iters 100", "")
    batch_size = build_batch_size_calculator(run_config(flags, base))
    assert [batch_size.global_batch_size(consumed) for consumed in (0, 4, 8)] == expected
