# SPDX-License-Identifier: Apache-2.0
"""Backwards beside forwards: the schedules, the turns that both take, and the settings that rule it out."""

from __future__ import annotations

import itertools
import threading

import pytest

from megatron.core.errors import ConfigError
from megatron.core.exchange_gap import ExchangeGap
from megatron.core.mesh import VirtualStages
from megatron.core.pipeline_parallel.programs import Transfer, plan_programs
from megatron.core.pipeline_parallel.schedules import Action, build_tables, find_end_beside
from megatron.core.pipeline_parallel.side_by_side import SideBySide
from megatron.core.pipeline_parallel.timelines import Deadlock, simulate
from megatron.core.pipeline_parallel.weight_grad_queue import WeightGradQueue
from megatron.planner.memory import estimate_memory
from megatron.training.config.run_groups import groups_of_fields
from megatron.training.flags.declarations import declared_flags
from megatron.training.flags.read import examine
from megatron.training.recipes.gpt import describe_gpt_workload
from tests.support.transfer_proof import play
from tests.unit.pipeline_parallel.test_pipeline_flags import SIZES, pipeline, read

FLAGS = "--overlap-moe-expert-parallel-comm"
EXPERTS = "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --disable-bias-linear"


def tables(stages: int, microbatches: int, chunks: int = 1, delays: bool = False) -> list[list[Action]]:
    name = "1f1b" if chunks == 1 else "interleaved"
    shape = VirtualStages(stages, chunks)
    return build_tables(name, shape, microbatches, side_by_side=True, delays_weights=delays)


def write(table: list[Action]) -> str:
    return "".join(("+" if a.is_beside else " ") + f"{a.kind}{a.microbatch}" for a in table).strip()


# ---- schedules


def test_tables_of_one_and_of_two_stages() -> None:
    assert write(tables(1, 3)[0]) == "F0 F1+B0 F2+B1 B2"
    assert write(tables(1, 3, delays=True)[0]) == "F0 F1+B0+W0 F2+B1+W1 B2+W2"
    assert [write(table) for table in tables(2, 4)] == ["F0 F1 F2 F3+B0 B1 B2 B3", "F0 F1+B0 F2+B1 F3+B2 B3"]
    assert write(tables(1, 1, delays=True)[0]) == "F0 B0+W0"


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_they_take_no_longer_than_the_plain_ones(stages: int, chunks: int) -> None:
    """Even where nothing at all is hidden: pairs have their results late, which the longer warm-up makes up for."""
    shape, name = VirtualStages(stages, chunks), "1f1b" if chunks == 1 else "interleaved"
    for microbatches in (2 * stages, 4 * stages):
        found = simulate(tables(stages, microbatches, chunks), shape)
        assert found.makespan == simulate(build_tables(name, shape, microbatches), shape).makespan  # type: ignore[arg-type]
        if chunks == 1:
            assert found.peak_in_flight == [2 * (stages - rank) for rank in range(stages)]


@pytest.mark.parametrize("delays", [False, True])
@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
def test_no_plan_deadlocks_and_pairs_stay_together(stages: int, chunks: int, delays: bool) -> None:
    for microbatches in (1, 2, 3, 5, 8, 16):
        if chunks > 1 and microbatches % stages > 0:
            continue
        found, shape = tables(stages, microbatches, chunks, delays), VirtualStages(stages, chunks)
        kinds = "FBW" if delays else "FB"
        for overlap, table_of in itertools.product((False, True), range(stages)):
            plan = plan_programs(found, shape, overlap=overlap)
            play(plan, blocking=not overlap)
            assert [step for step in plan[table_of] if isinstance(step, Action)] == found[table_of]
            assert not any(
                isinstance(before, Transfer) and isinstance(step, Action) and step.is_beside
                for before, step in itertools.pairwise(plan[table_of])
            )
        for table in found:
            ran = [(a.kind, a.microbatch, a.chunk) for a in table]
            assert sorted(ran) == sorted(itertools.product(kinds, range(microbatches), range(chunks)))


def test_a_backward_beside_its_own_forward_is_found() -> None:
    with pytest.raises(Deadlock):
        simulate([[Action("F", 0), Action("B", 0, is_beside=True)]], VirtualStages(1))


def test_which_actions_stand_together() -> None:
    table = tables(1, 2, delays=True)[0]
    assert [find_end_beside(table, place) for place in (0, 1, 4)] == [1, 4, 6]


# ---- turns


def test_both_take_turns_and_the_longer_one_goes_on_alone() -> None:
    gap, events, threads = ExchangeGap(), list[str](), set[int]()

    def work(name: str, turns: int) -> None:
        threads.add(threading.get_ident())
        for turn in range(turns):
            events.append(f"{name}{turn}")
            gap()

    turns = SideBySide([gap])
    for _ in range(2):  # also a second time
        events.clear()
        turns.run(lambda: work("f", 2), lambda: work("b", 4), lambda: events.append("w"))
        assert events == ["f0", "b0", "w", "f1", "b1", "w", "b2", "w", "b3", "w"]
        assert gap.fill is None
    assert len(threads) == 2
    events.clear()
    turns.run(None, lambda: work("b", 2), lambda: events.append("w"))
    assert events == ["b0", "w", "b1", "w"]


@pytest.mark.parametrize("failing", ["forward", "backward"])
def test_an_error_of_one_ends_the_other(failing: str) -> None:
    gap, reached = ExchangeGap(), list[str]()

    def work(name: str) -> None:
        gap()
        if name == failing:
            raise ValueError(f"{name} failed")
        gap()
        reached.append(name)

    turns = SideBySide([gap])
    with pytest.raises(ValueError, match=f"{failing} failed"):
        turns.run(lambda: work("forward"), lambda: work("backward"), None)
    assert reached == [] and gap.fill is None
    turns.run(lambda: reached.append("forward"), lambda: reached.append("backward"), None)
    assert reached == ["forward", "backward"]


def test_what_a_backward_has_left_so_far_is_computed_once() -> None:
    queue, done = WeightGradQueue(), list[int]()
    with queue.collect("b"):
        queue.defer(lambda: done.append(1))
        # A product asks whether it is to wait: not while its turn has come.
        queue.defer(lambda: done.append(2 if not queue.is_open else -1))
        queue.run_waiting("b")
        assert done == [1, 2] and queue.is_open
        queue.defer(lambda: done.append(3))
    queue.run("b")
    assert done == [1, 2, 3]


# ---- settings


@pytest.mark.flags("--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute")
def test_the_flags_choose_the_schedule() -> None:
    chosen = pipeline(f"{EXPERTS} {FLAGS} --delay-wgrad-compute", replicas=2)
    actions = [step for step in chosen.program(1, 3) if isinstance(step, Action)]
    assert write(actions) == "F0 F1+B0+W0 F2+B1+W1 B2+W2"
    assert chosen.defers_weight_gradients
    evaluation = [step for step in chosen.program(1, 3, forward_only=True) if isinstance(step, Action)]
    assert write(evaluation) == "F0 F1 F2"


def test_delayed_weight_gradients_are_accepted_in_every_form_that_the_overlap_runs_in() -> None:
    """Every switch and choice of the model and of data parallelism changed alone."""
    environ, accepted = {"WORLD_SIZE": "4"}, 0
    base = [*SIZES.split(), *f"--num-layers 8 --pipeline-model-parallel-size 2 {EXPERTS} {FLAGS}".split()]
    for flag in declared_flags():
        if groups_of_fields()[flag.dest] not in ("model", "ddp") or not (flag.is_switch or flag.choices):
            continue
        for value in [not flag.default] if flag.is_switch else flag.choices or ():
            argv = [*base, flag.spell(value) if flag.is_switch else f"{flag.name}={value}"]
            if not examine(argv, environ).problems:
                accepted += 1
                assert examine([*argv, "--delay-wgrad-compute"], environ).problems == (), argv[-1]
    assert accepted > 100


@pytest.mark.parametrize(("chunks", "more"), [("", 2.0), (" --num-virtual-stages-per-pipeline-rank 2", 6 / 5)])
def test_what_the_planner_holds_in_flight_grows(chunks: str, more: float) -> None:
    """1f1b: twice as many microbatches; interleaved on two stages: six chunks in place of five."""
    given = f"{EXPERTS}{chunks}"
    few, many = (
        estimate_memory(config.model, config.ddp, describe_gpt_workload(config, 32))
        for config in (read(f"{given} {flag}", replicas=2, batch=32) for flag in ("", FLAGS))
    )
    assert few.microbatches_in_flight is not None and many.microbatches_in_flight is not None
    assert many.microbatches_in_flight == pytest.approx(few.microbatches_in_flight * more)


EXPERTS_ONLY = "--overlap-dispatch-backward-with-experts-wgrad"


@pytest.mark.flags("--overlap-dispatch-backward-with-experts-wgrad")
def test_weight_gradients_of_experts_beside_a_backward_alone() -> None:
    chosen = pipeline(f"{EXPERTS} {EXPERTS_ONLY}", replicas=2)
    assert write([step for step in chosen.program(1, 2) if isinstance(step, Action)]) == "F0 B0+W0 F1 B1+W1"
    assert chosen.delays_experts_only and not chosen.side_by_side
    both = pipeline(f"{EXPERTS} {EXPERTS_ONLY} {FLAGS} --delay-wgrad-compute", replicas=2)
    assert both.delays_weights and both.side_by_side and not both.delays_experts_only


@pytest.mark.flags("--ep-overlap-early-attn-memory-release")
def test_what_is_not_needed_is_noted() -> None:
    flag = "--ep-overlap-early-attn-memory-release"
    assert any(
        "frees what it has read as it goes" in note for note in read(f"{EXPERTS} {FLAGS} {flag}", replicas=2).notes
    )
    assert f"{flag} has no effect without {FLAGS}" in read(f"{EXPERTS} {flag}", replicas=2).notes


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (EXPERTS_ONLY, "needs --num-experts and --expert-model-parallel-size above 1"),
        (
            f"{EXPERTS} {EXPERTS_ONLY} --pipeline-schedule zb-h1",
            "zb-h1 defers weight gradients already; leave out --overlap-dispatch-backward-with-experts-wgrad",
        ),
        (FLAGS, "needs --num-experts and --expert-model-parallel-size above 1"),
        (f"--num-experts 4 {FLAGS}", "needs --num-experts and --expert-model-parallel-size above 1"),
        (
            f"{EXPERTS} {FLAGS} --moe-token-dispatcher-type allgather",
            "does not work with --moe-token-dispatcher-type allgather; use --moe-token-dispatcher-type alltoall or",
        ),
        (
            f"{EXPERTS} {FLAGS} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "does not work with --recompute-granularity full; use --recompute-granularity selective",
        ),
        (f"{EXPERTS} {FLAGS} --pipeline-schedule zb-h1", "--pipeline-schedule zb-h1; use 1f1b or interleaved"),
        (
            f"{EXPERTS} {FLAGS} --moe-shared-expert-intermediate-size 8 --moe-shared-expert-overlap",
            "--moe-shared-expert-overlap hide the same exchanges; keep one",
        ),
        ("--delay-wgrad-compute", "--delay-wgrad-compute needs --overlap-moe-expert-parallel-comm"),
    ],
)
def test_what_rules_it_out(flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(flags, replicas=2)
    assert sentence in str(refused.value)
