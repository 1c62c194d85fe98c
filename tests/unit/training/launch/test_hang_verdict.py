# SPDX-License-Identifier: Apache-2.0
"""Which rank a hung job waits for: jobs of random layouts are played until one rank no longer goes on."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Mapping

import pytest

from megatron.core.mesh import RankGrid
from megatron.core.progress_record import OUTSIDE, SAVE, STEP, LastCollective, ProgressSnapshot
from megatron.training.launch.hang_verdict import RankState, judge

Group = tuple[str, tuple[int, ...]]


class _Job:
    """Ranks that go through the same collectives, each in its groups, until they wait for somebody."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        tp, pp, dp = (self.random.choice([1, 2, 3]) for _ in range(3))
        grid = RankGrid(max(2, tp * pp * dp), tp=tp, pp=pp) if tp * pp * dp > 1 else RankGrid(2)
        self.size = grid.world_size
        groups = [("world", tuple(range(self.size)))]
        groups += [(axes, tuple(ranks)) for axes in ("tp", "dp") for ranks in grid.groups(axes) if len(ranks) > 1]
        self.groups: list[Group] = groups
        self.calls: list[dict[Group, LastCollective]] = [{} for _ in range(self.size)]
        self.waits: list[bool] = [False] * self.size
        self.order = 0

    def play(self, rounds: int, frozen: int | None = None, other: tuple[int, str] | None = None) -> None:
        """Let all ranks enter `rounds` collectives, each of one kind of group at a time. frozen: this rank enters none
        any more. other: this rank enters its last one as another kind."""
        for number in range(rounds):
            axis = self.random.choice(sorted({axis for axis, _ in self.groups}))
            for group in [g for g in self.groups if g[0] == axis]:
                entering = [r for r in group[1] if r != frozen and not self.waits[r]]
                for rank in entering:
                    kind = other[1] if other and rank == other[0] and number == rounds - 1 else "all_reduce"
                    self.enter(rank, group, kind)
                if len(entering) < len(group[1]):
                    for rank in entering:
                        self.waits[rank] = True

    def enter(self, rank: int, group: Group, kind: str) -> None:
        """Have one rank enter the next collective of a group."""
        self.order += 1
        before = self.calls[rank].get(group)
        number = 1 if before is None else before.number + 1
        self.calls[rank][group] = LastCollective(*group, kind, number, 4096, self.order)

    def states(self, phases: Mapping[int, int] | None = None) -> list[RankState]:
        """Return what the watchers see, in any order."""
        found = []
        for rank in range(self.size):
            calls = tuple(sorted(self.calls[rank].values(), key=lambda call: -call.order))
            record = ProgressSnapshot(rank, 1000 + rank, (phases or {}).get(rank, STEP), 7, 2, 99, 5.0, calls)
            found.append(RankState("node", False, False, 6.0, record))
        self.random.shuffle(found)
        return found


@pytest.mark.parametrize("seed", range(60))
def test_the_rank_that_does_not_come_is_named(seed: int) -> None:
    job = _Job(seed)
    culprit = job.random.randrange(job.size)
    job.play(job.random.randrange(8))
    job.play(40, frozen=culprit)
    verdict = judge(job.states(), job.size)
    assert verdict.culprits == (culprit,), verdict.sentence
    assert verdict.sentence.startswith(f"rank {culprit} (node, process {1000 + culprit}) has not entered all_reduce")


@pytest.mark.parametrize("seed", range(20))
def test_the_rank_in_another_collective_is_named(seed: int) -> None:
    job = _Job(100 + seed)
    if job.size < 3:
        job = _Job(3)
    culprit = job.random.randrange(job.size)
    group = job.groups[0]
    job.play(5)
    for rank in range(job.size):
        job.enter(rank, group, "all_gather" if rank == culprit else "all_reduce")
    verdict = judge(job.states(), job.size)
    assert verdict.culprits == (culprit,), verdict.sentence
    assert "is in all_gather number" in verdict.sentence
    assert "where the rest of the group is in all_reduce number" in verdict.sentence


def test_ranks_whose_groups_come_in_another_order_are_named() -> None:
    for size, culprits in ((5, (2,)), (2, (0, 1))):
        job = _Job(3)
        job.size, everybody = size, tuple(range(size))
        job.calls = [{} for _ in range(size)]
        for rank in everybody:
            job.enter(rank, ("dp" if rank == 2 or size == 2 and rank else "world", everybody), "all_reduce")
        verdict = judge(job.states(), size)
        assert verdict.culprits == culprits, verdict.sentence
        assert "come in another order" in verdict.sentence


def test_stopped_ended_and_unheard_ranks_are_the_culprits_whatever_the_others_do() -> None:
    job = _Job(1)
    job.play(9, frozen=1)
    states = sorted(job.states(), key=lambda state: state.rank)
    stopped = [dataclasses.replace(s, is_stopped=s.rank == 0) for s in states]
    assert judge(stopped, job.size).culprits == (0,)
    assert "rank 0 (node, process 1000) is stopped" in judge(stopped, job.size).sentence
    gone = [dataclasses.replace(s, has_ended=s.rank == 1) for s in states]
    assert "rank 1 (node, process 1001) is gone" in judge(gone, job.size).sentence
    unheard = judge([s for s in states if s.rank != 1], job.size)
    assert unheard.culprits == (1,)
    assert "rank 1 is not heard of" in unheard.sentence


def test_without_collectives_the_rank_between_steps_or_behind_is_named() -> None:
    job = _Job(2)
    outside = judge(job.states({1: OUTSIDE}), job.size)
    assert outside.culprits == (1,)
    assert "is between two steps" in outside.sentence
    states = job.states()
    behind = [
        dataclasses.replace(s, record=dataclasses.replace(s.record, microbatch=1)) if s.rank == 0 else s for s in states
    ]
    assert judge(behind, job.size).culprits == (0,)
    assert judge(states, job.size).culprits == ()
    assert "none is behind: the network or a device does not answer" in judge(states, job.size).sentence


def test_a_save_that_hangs_is_called_one() -> None:
    job = _Job(2)
    saving = judge(job.states(dict.fromkeys(range(job.size), SAVE)), job.size)
    assert saving.culprits == ()
    assert "all ranks are silent in the save of iteration 7: the network or the disk" in saving.sentence


def test_states_travel_as_json() -> None:
    job = _Job(4)
    job.play(6)
    for state in job.states():
        assert RankState.from_json(json.loads(json.dumps(state.to_json()))) == state
