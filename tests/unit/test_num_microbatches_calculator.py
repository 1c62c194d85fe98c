"""The batch-size staircase: ramp-up, step schedule, refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.errors import ConfigError
from megatron.core.num_microbatches_calculator import (
    BatchSizeStep,
    build_num_microbatches_calculator,
    compute_rampup_steps,
    parse_step_schedule,
)
from tests.unit.run_flags import SMALLEST_RUN, run_config


def build(**settings: object):  # type: ignore[no-untyped-def]
    defaults: dict[str, object] = {"global_batch_size": None, "micro_batch_size": 1, "data_parallel_size": 1}
    return build_num_microbatches_calculator(**(defaults | settings))  # type: ignore[arg-type]


def test_thresholds_of_a_step_schedule_are_tokens() -> None:
    steps = parse_step_schedule("0:16 2.4B:320, 1T:640", tokens_per_sample=4096)
    assert steps == (BatchSizeStep(0, 16), BatchSizeStep(585938, 320), BatchSizeStep(244140625, 640))
    assert 585937 * 4096 < 2_400_000_000 <= 585938 * 4096


def test_without_a_global_batch_size_a_step_is_one_microbatch() -> None:
    batch_size = build(micro_batch_size=4, data_parallel_size=2)
    assert (batch_size.global_batch_size(0), batch_size.num_microbatches(0)) == (8, 1)


@pytest.mark.parametrize(
    "text", ["", "8", "0:8 40", "0:8,40:x", "1:8", "0:8 40:16 40:32", "0:8 -1:4", "0:8 1e3:16", "0:٨"]
)
def test_bad_step_schedules_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--step-batch-size-schedule"):
        parse_step_schedule(text)


@pytest.mark.parametrize("ramp", [(8, 8), (0, 8, 10), (8, 0, 10), (8, 8, -1), (8, 7, 10), (64, 8, 10)])
def test_bad_rampups_are_refused(ramp: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="--rampup-batch-size"):
        compute_rampup_steps(ramp, 32)


def test_every_size_of_the_staircase_must_be_shared_evenly() -> None:
    with pytest.raises(ConfigError) as refused:
        build(step_batch_size_schedule="0:8 10:12 20:18", micro_batch_size=4, data_parallel_size=2)
    assert [problem.split(" is")[0] for problem in refused.value.problems] == [
        "global batch size 12", "global batch size 18",
    ]  # fmt: skip


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
