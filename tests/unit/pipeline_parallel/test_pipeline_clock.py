# SPDX-License-Identifier: Apache-2.0
"""Schedules on a clock: bubbles and memory as the papers say; transfers of all ranks in one order, without deadlock."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.errors import ConfigError
from megatron.core.mesh import VirtualStages
from megatron.core.pipeline_parallel.p2p_communication import list_connections
from megatron.core.pipeline_parallel.programs import Program, Transfer, plan_programs
from megatron.core.pipeline_parallel.schedules import (
    Action,
    ScheduleName,
    build_forward_tables,
    build_tables,
    interleaved,
    zero_bubble_h1,
)
from megatron.core.pipeline_parallel.timelines import EQUAL_PARTS, Deadlock, Timeline, simulate
from tests.support.transfer_proof import play

STAGES = (1, 2, 3, 4, 8)
SMALL = list(itertools.product(range(1, 9), (1, 2, 3, 5, 8, 16)))


def clocked(name: ScheduleName, shape: VirtualStages, microbatches: int) -> Timeline:
    costs = (EQUAL_PARTS,) if name.startswith("zb") else ()
    return simulate(build_tables(name, shape, microbatches), shape, *costs)


# ---- where layers lie


@given(st.integers(1, 8), st.integers(1, 4), st.booleans())
def test_every_virtual_stage_has_one_holder(stages: int, chunks: int, folded: bool) -> None:
    shape = VirtualStages(stages, chunks, folded)
    indices = [shape.index(rank, chunk) for rank in range(stages) for chunk in range(chunks)]
    assert sorted(indices) == list(range(shape.count))
    for index in indices:
        assert shape.index(*shape.holder(index)) == index


def test_a_folded_pipeline_turns_at_the_last_process() -> None:
    assert [VirtualStages(3, 2, folded=True).holder(v) for v in range(6)] == [
        (0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1),
    ]  # fmt: skip
    assert [VirtualStages(3, 2).holder(v)[0] for v in range(6)] == [0, 1, 2, 0, 1, 2]


# ---- bubbles and memory


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("factor", [1, 2, 5])
def test_bubbles_are_those_of_theory(stages: int, factor: int) -> None:
    microbatches = factor * stages
    for name in ("gpipe", "1f1b"):
        found = clocked(name, VirtualStages(stages), microbatches)  # type: ignore[arg-type]
        assert found.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
    for chunks in (2, 3, 4):
        found = clocked("interleaved", VirtualStages(stages, chunks), microbatches)
        fill = (stages - 1) / chunks
        assert found.bubble == pytest.approx(fill / (microbatches + fill))
    found = clocked("zb-h1", VirtualStages(stages), microbatches)
    assert found.bubble == pytest.approx((stages - 1) / (3 * microbatches + stages - 1))
    if microbatches >= 2 * stages - 1:
        found = clocked("zb-v", VirtualStages(stages, 2, folded=True), microbatches)
        assert found.bubble == pytest.approx((stages - 1) / (6 * microbatches + stages - 1))


@pytest.mark.parametrize("stages", STAGES)
def test_memory_is_that_of_theory(stages: int) -> None:
    many = 4 * stages
    plain, ranks = VirtualStages(stages), range(stages)
    assert clocked("gpipe", plain, many).peak_in_flight == [many] * stages
    assert clocked("1f1b", plain, many).peak_in_flight == [stages - rank for rank in ranks]
    assert clocked("zb-h1", plain, many).peak_in_flight == [stages] * stages
    assert clocked("zb-v", VirtualStages(stages, 2, folded=True), many).peak_in_flight == [stages] * stages
    for chunks in (2, 3):
        expected = [(2 * (stages - rank) - 1 + (chunks - 1) * stages) / chunks for rank in ranks]
        assert clocked("interleaved", VirtualStages(stages, chunks), many).peak_in_flight == expected


def test_evaluation_keeps_every_stage_busy() -> None:
    for shape, makespan in ((VirtualStages(4), 8 + 3), (VirtualStages(4, 2), 2 * 8 + 3)):
        assert simulate(build_forward_tables(shape, 8), shape).makespan == makespan
    folded = VirtualStages(4, 2, folded=True)
    assert simulate(build_forward_tables(folded, 8), folded).makespan <= 2 * 8 + 2 * 3


# ---- the tables themselves


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-v", "interleaved"])
@pytest.mark.parametrize("microbatches", [1, 3, 4, 12])
def test_every_microbatch_is_computed_once_by_every_chunk(name: ScheduleName, microbatches: int) -> None:
    chunks = {"zb-v": 2, "interleaved": 3}.get(name, 1)
    if name == "interleaved" and microbatches % 4:
        pytest.skip("groups of 4")
    kinds = "FBW" if name.startswith("zb") else "FB"
    expected = set(itertools.product(kinds, range(microbatches), range(chunks)))
    for table in build_tables(name, VirtualStages(4, chunks, name == "zb-v"), microbatches):
        assert len(table) == len(expected)
        assert {tuple(action[:3]) for action in table} == expected


def test_zero_bubble_table_of_the_second_of_two_stages() -> None:
    written = "".join(f"{a.kind}{a.microbatch}" for a in zero_bubble_h1(1, 2, 2))
    assert written == "F0B0F1B1W0W1"


def test_interleaved_table_in_larger_groups() -> None:
    """Two microbatches more per group: a chunk runs longer before the next one's turn."""
    forwards = [a for a in interleaved(0, 2, 8, 2, 4) if a.kind == "F"]
    assert [(a.microbatch, a.chunk) for a in forwards[:8]] == [(m, c) for c in (0, 1) for m in range(4)]


def test_microbatches_that_leave_a_short_group_are_refused_with_the_next_numbers() -> None:
    with pytest.raises(ConfigError, match="makes 8 or 12 microbatches"):
        interleaved(0, 4, 9, 2)
    with pytest.raises(ConfigError, match="makes 4 microbatches"):
        interleaved(0, 4, 3, 2)
    with pytest.raises(ConfigError, match="stage 2 is below --pipeline-model-parallel-size 4; use 4 or more"):
        interleaved(0, 4, 8, 2, 2)
    assert interleaved(0, 4, 11, 2, 7), "a last group of 4 fills the pipeline"


def test_a_schedule_with_the_wrong_number_of_chunks_is_refused() -> None:
    with pytest.raises(ConfigError, match="zb-v lays 2 chunks on each stage, not 1"):
        build_tables("zb-v", VirtualStages(2), 4)
    with pytest.raises(ConfigError, match="1f1b has one chunk per stage"):
        build_tables("1f1b", VirtualStages(2, 2), 4)


def test_a_table_that_waits_for_itself_is_found() -> None:
    stopped = [[Action("F", 0), Action("B", 0)], [Action("B", 0), Action("F", 0)]]
    with pytest.raises(Deadlock, match="rank 1 for Action"):
        simulate(stopped, VirtualStages(2))


# ---- transfers


def plans(stages: int, microbatches: int) -> list[tuple[str, VirtualStages, list[list[Action]]]]:
    """Every schedule that exists for these numbers."""
    found: list[tuple[str, VirtualStages, list[list[Action]]]] = []
    for name in ("gpipe", "1f1b", "zb-h1", "zb-v"):
        shape = VirtualStages(stages, 2, folded=True) if name == "zb-v" else VirtualStages(stages)
        found.append((name, shape, build_tables(name, shape, microbatches)))  # type: ignore[arg-type]
    for chunks, group in itertools.product((2, 3, 4), (stages, stages + 1)):
        shape = VirtualStages(stages, chunks)
        if microbatches % group == 0 or microbatches % group >= stages:
            found.append((f"interleaved {group}", shape, build_tables("interleaved", shape, microbatches, group)))
    for shape in (VirtualStages(stages), VirtualStages(stages, 3), VirtualStages(stages, 2, folded=True)):
        found.append(("forward", shape, build_forward_tables(shape, microbatches)))
    return found


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 8, 16])
def test_no_plan_deadlocks(stages: int, microbatches: int) -> None:
    """Played as strictly as NCCL may be: in order from one rank to another; without overlap also waiting at once; with
    overlap also where a transfer that cannot start stops everything behind it."""
    for name, shape, table in plans(stages, microbatches):
        for overlap, one_queue in ((False, False), (True, False), (True, True)):
            plan = plan_programs(table, shape, overlap=overlap)
            try:
                play(plan, blocking=not overlap, one_queue=one_queue)
            except Deadlock as error:
                raise AssertionError(f"{name} {shape} {microbatches} {overlap=} {one_queue=}: {error}") from None


@pytest.mark.parametrize("overlap", [False, True])
def test_every_transfer_is_sent_once_and_received_once(overlap: bool) -> None:
    for _, shape, table in plans(4, 5):
        plan = plan_programs(table, shape, overlap=overlap)
        assert [[step for step in program if isinstance(step, Action)] for program in plan] == table
        ends = Counter((step.kind, step.tag) for program in plan for step in program if isinstance(step, Transfer))
        assert set(ends.values()) <= {1}
        sent = {tag for kind, tag in ends if kind == "send"}
        assert sent == {tag for kind, tag in ends if kind == "receive"}
        crossings = sum(shape.holder(v)[0] != shape.holder(v + 1)[0] for v in range(shape.count - 1))
        directions = 2 if any(action.kind == "B" for action in table[0]) else 1
        assert len(sent) == 5 * crossings * directions


def position(program: Program, wanted: tuple[str, str, int]) -> int:
    """Place of a transfer (kind, what, microbatch), counted in actions before it."""
    found = next(
        i for i, s in enumerate(program) if isinstance(s, Transfer) and (s.kind, s.what, s.microbatch) == wanted
    )
    return sum(isinstance(step, Action) for step in program[:found])


def test_with_overlap_receives_are_posted_earlier() -> None:
    shape = VirtualStages(4, 2)
    table = build_tables("interleaved", shape, 8)
    late, early = (plan_programs(table, shape, overlap=overlap)[1] for overlap in (False, True))
    wanted = ("receive", "F", 5)
    assert position(early, wanted) == position(late, wanted) - 1


def test_partners_that_list_transfers_differently_are_found() -> None:
    there, back = Transfer("send", "F", 0, 0, 1, 0), Transfer("receive", "B", 0, 0, 1, 1)
    here, forth = Transfer("receive", "F", 0, 0, 0, 0), Transfer("send", "B", 0, 0, 0, 1)
    again, here_again = there._replace(microbatch=1, tag=2), here._replace(microbatch=1, tag=2)
    play([[there, back, again], [here, here_again, forth]], blocking=True)
    # The directions have communicators of their own.
    play([[there, back], [forth, here]], blocking=False)
    with pytest.raises(Deadlock, match="rank 0 lists"):
        play([[there, again], [here_again, here]], blocking=False)
    with pytest.raises(Deadlock, match="rank 0 at"):
        play([[there], []], blocking=False)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (VirtualStages(3), [(0, 1), (1, 0), (1, 2), (2, 1)]),
        # From the last rank to the first, and back.
        (VirtualStages(3, 2), [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]),
        (VirtualStages(3, 2, folded=True), [(0, 1), (1, 0), (1, 2), (2, 1)]),
        (VirtualStages(1, 2), []),
    ],
)
def test_connections_are_made_for_all_transfers_and_no_others(
    shape: VirtualStages, expected: list[tuple[int, int]]
) -> None:
    assert list_connections(shape) == expected
    name: ScheduleName = "zb-v" if shape.folded else "1f1b" if shape.chunks == 1 else "interleaved"
    used = set()
    for rank, program in enumerate(plan_programs(build_tables(name, shape, 2 * shape.stages), shape, overlap=True)):
        for step in program:
            if isinstance(step, Transfer):
                sender, receiver = (rank, step.peer) if step.kind == "send" else (step.peer, rank)
                assert step.goes_up(rank) == (sender < receiver), "both ends choose the same communicator"
                used.add((sender, receiver))
    assert sorted(used) == expected


def test_a_single_queue_stops_behind_a_transfer_that_cannot_start() -> None:
    """The second receive waits for the first, whose tensor the partner sends only after what stands behind it."""
    take, more = Transfer("receive", "F", 0, 0, 1, 0), Transfer("receive", "F", 1, 0, 1, 1)
    give, also = Transfer("send", "F", 0, 0, 0, 0), Transfer("send", "F", 1, 0, 0, 1)
    first, needed = Transfer("send", "B", 0, 0, 1, 2), Transfer("receive", "B", 0, 0, 0, 2)
    plan: list[Program] = [[take, more, first], [needed, Action("B", 0), give, also]]
    play(plan, blocking=False)
    with pytest.raises(Deadlock, match="wait for each other"):
        play(plan, blocking=False, one_queue=True)


def test_both_directions_are_received_early() -> None:
    """1F1B on a stage between others: before a backward, what the next forward needs is on its way, and vice versa."""
    shape = VirtualStages(3)
    program = plan_programs(build_tables("1f1b", shape, 6), shape, overlap=True)[1]
    for what, behind in (("F", "B"), ("B", "F")):
        place = next(i for i, s in enumerate(program) if isinstance(s, Transfer) and s[:3] == ("receive", what, 3))
        after = next(step for step in program[place:] if isinstance(step, Action))
        assert after.kind == behind


def test_ranks_that_wait_for_each_other_are_found() -> None:
    """Both first receive what the other sends only afterwards."""
    ring: list[Program] = []
    for rank in range(3):
        before, after = (rank - 1) % 3, (rank + 1) % 3
        take = Transfer("receive", "F", 0, 0, before, before)
        ring.append([take, Action("F", 0), Transfer("send", "F", 0, 0, after, rank)])
    with pytest.raises(Deadlock, match="wait for each other"):
        play(ring, blocking=True)
