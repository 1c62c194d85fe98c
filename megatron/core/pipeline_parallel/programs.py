# SPDX-License-Identifier: Apache-2.0
"""Every rank's program for a step: its actions, and the transfers between stages, planned for all ranks together.

NCCL matches the sends of one process and the receives of another by their order, so both sides must list them alike,
and a transfer that waits for one listed after it never ends. Therefore the schedule is played on a clock; each transfer
gets its place on that one time line, at the moment its tensor exists; and each rank's program is its cut of the line:

    rank 0   F0  F0>1  F1  F1>1     B0<1  B0           F0>1: send the result of F0 to rank 1
    rank 1       F0<0  F0  F1<0 B0  B0>0  F1           F0<0: receive it from rank 0

One line for all means that every rank could even stop at each transfer until its partner is there (that is what
`--no-overlap-p2p-communication` does). With overlap a receive is posted one action earlier, but never before another
receive from the same partner, so that both sides still list them alike. Transfers to higher ranks and transfers to
lower ones have separate communicators (p2p_communication.py), so that sends and receives of two processes need no
common order, and both directions travel at the same time. `tests/support/transfer_proof.py` proves it
for any plan.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from megatron.core.mesh import DEFERS_WEIGHT_GRADIENTS, VirtualStages
from megatron.core.pipeline_parallel.schedules import (
    Action,
    ScheduleName,
    build_forward_tables,
    build_tables,
    find_end_beside,
    interleaved_problem,
)
from megatron.core.pipeline_parallel.timelines import EQUAL_PARTS, UNDIVIDED, Timeline, simulate
from megatron.core.process_groups_config import ProcessGroupCollection

SENDS_UNDER_WAY = 4
"""A rank waits for its oldest send before it has more than this many; their tensors stay in memory meanwhile."""


class Transfer(NamedTuple):
    """One send or receive of this rank: hidden states, or their gradient, from or to another stage."""

    kind: Literal["send", "receive"]
    what: Literal["F", "B"]
    """Hidden states on their way forward; their gradient on its way back."""
    microbatch: int
    chunk: int
    """Of this rank: the one that made the tensor, or that will use it."""
    peer: int
    """Rank of the partner in the pipeline."""
    tag: int
    """The same number on both sides, and for no other transfer of the step."""

    def goes_up(self, rank: int) -> bool:
        """Return whether it goes from a lower rank to a higher one, seen from `rank`, whose transfer it is."""
        return (self.kind == "send") == (self.peer > rank)


Program: TypeAlias = "list[Action | Transfer]"
"""Everything one rank does in a step, in order."""


@dataclass(frozen=True)
class Pipeline:
    """The stages and the schedule: with the number of microbatches they decide what every rank does in a step."""

    shape: VirtualStages
    schedule: ScheduleName
    group_size: int | None = None
    """Of the interleaved schedule: consecutive microbatches of a chunk; the number of stages when None."""
    overlap: bool = True
    """Receives are posted early, and sends are not waited for at once."""
    side_by_side: bool = False
    """Backwards overlap forwards, each while the other's tokens travel to experts on other ranks."""
    delays_weights: bool = False
    """Weight gradients have actions separate from their backward."""
    delays_experts_only: bool = False
    """True if these are only the experts'."""
    head_deferral: int | None = None
    """Microbatches whose output layer gets its weight gradient after the last backward; 0: all; None: none."""

    @classmethod
    def from_config(cls, config: Any, groups: ProcessGroupCollection, chunks: int) -> Pipeline:
        """The pipeline that a model's config asks for over these groups."""
        return cls.of_stages(config, groups.pp.size(), chunks)

    @classmethod
    def of_stages(cls, config: Any, stages: int, chunks: int) -> Pipeline:
        """The pipeline that a model's config asks for, of so many processes and chunks of each; 1F1B, or interleaved
        with several chunks, where it is silent."""
        asked: ScheduleName | None = getattr(config, "pipeline_schedule", None)
        name: ScheduleName = asked or ("1f1b" if chunks == 1 else "interleaved")
        # One stage has nothing to fill or to hide, and every schedule is the plain loop there.
        if stages == 1 and chunks == 1:
            name = "1f1b"
        return cls(
            shape=VirtualStages(stages, chunks, folded=name == "zb-v"),
            schedule=name,
            group_size=getattr(config, "microbatch_group_size_per_vp_stage", None),
            # A receive that first learns its shape waits for it: it must not be posted early.
            overlap=getattr(config, "overlap_p2p_comm", True) and not getattr(config, "variable_seq_lengths", False),
            side_by_side=getattr(config, "overlap_moe_expert_parallel_comm", False),
            delays_weights=getattr(config, "delays_weight_gradients", False),
            delays_experts_only=getattr(config, "overlap_dispatch_backward_with_experts_wgrad", False)
            and not getattr(config, "delay_wgrad_compute", False),
            head_deferral=config.wgrad_deferral_limit
            if getattr(config, "defer_embedding_wgrad_compute", False)
            else None,
        )

    @property
    def defers_weight_gradients(self) -> bool:
        """True if weight gradients are computed by separate actions."""
        return self.schedule in DEFERS_WEIGHT_GRADIENTS or self.delays_weights

    def tables(self, microbatches: int) -> list[list[Action]]:
        """The actions of every rank in a training step: rank -> its actions in order. Raises ConfigError where the
        schedule does not exist for so many microbatches."""
        return [list(table) for table in _build(self, microbatches)]

    def defers_head(self, rank: int) -> bool:
        """Return whether this rank has the output layer and computes its weight gradient later than the others."""
        return self.head_deferral is not None and rank == self.shape.holder(self.shape.count - 1)[0]

    def program(self, rank: int, microbatches: int, forward_only: bool = False) -> Program:
        """Return what a rank does in a step, in order. Raises ConfigError where the schedule does not exist for so many
        microbatches."""
        return _plan(self, microbatches, forward_only)[rank]

    def problem(self, microbatches: int) -> str | None:
        """Return why a step of so many microbatches cannot run; None where it can."""
        if self.schedule != "interleaved":
            return None
        return interleaved_problem(self.shape.stages, microbatches, self.group_size or self.shape.stages)


@functools.lru_cache(maxsize=16)
def _build(pipeline: Pipeline, microbatches: int) -> list[list[Action]]:
    """Their tables; a search over layouts asks for the same ones many times."""
    return build_tables(
        pipeline.schedule,
        pipeline.shape,
        microbatches,
        pipeline.group_size,
        side_by_side=pipeline.side_by_side,
        delays_weights=pipeline.delays_weights,
    )


@functools.lru_cache(maxsize=16)
def _plan(pipeline: Pipeline, microbatches: int, forward_only: bool) -> list[Program]:
    """All ranks' programs; planning takes up to a second, and most runs have two numbers of microbatches."""
    actions = build_forward_tables(pipeline.shape, microbatches) if forward_only else pipeline.tables(microbatches)
    plan = plan_programs(actions, pipeline.shape, overlap=pipeline.overlap)
    if pipeline.head_deferral is not None and not forward_only:
        rank, chunk = pipeline.shape.holder(pipeline.shape.count - 1)
        # After the transfers are placed: a weight gradient sends nothing, so that no other rank's program changes.
        plan[rank] = _with_head_gradients(plan[rank], chunk, pipeline.head_deferral or microbatches)
    return plan


def _with_head_gradients(program: Program, chunk: int, deferred: int) -> Program:
    """The output layer's weight gradients as actions: of the first microbatches at the end, others after backward.

    On the last stage backward follows forward at once, and the output layer's product is the largest of all: what can
    wait until the last backward has gone on its way does not keep the stages before it waiting.
    """
    steps: Program = []
    waiting: Program = []
    due: Program = []
    for position, step in enumerate(program):
        steps.append(step)
        if isinstance(step, Action) and step.kind == "B" and step.chunk == chunk:
            product = Action("W", step.microbatch, chunk)
            (waiting if len(waiting) < deferred else due).append(product)
        # What runs next to a backward stays next to it.
        if find_end_beside(program, position) == position + 1:
            steps, due = steps + due, []
    return steps + waiting


def plan_programs(tables: Sequence[Sequence[Action]], shape: VirtualStages, *, overlap: bool) -> list[Program]:
    """Plan the programs of all ranks: their tables of actions with the transfers between them. overlap: receives are
    posted early."""
    deferred = any(action.kind == "W" for table in tables for action in table)
    # The costs only order the line. Any costs give a correct plan; those near the truth give one with little waiting.
    timeline = simulate(tables, shape, EQUAL_PARTS if deferred else UNDIVIDED)
    found: list[Program] = [[] for _ in range(shape.stages)]
    for rank, step in _on_one_line(timeline, shape):
        found[rank].append(step)
    return [list(_receive_early(program)) for program in found] if overlap else found


def find_end_of_transfers(program: Sequence[Action | Transfer], first: int) -> int:
    """Return the end of the run of transfers that begins at position `first`: they are posted together."""
    end = first
    while end < len(program) and isinstance(program[end], Transfer):
        end += 1
    return end


def _on_one_line(timeline: Timeline, shape: VirtualStages) -> Iterator[tuple[int, Action | Transfer]]:
    """(rank, step) in the order of time; at one moment transfers come before the actions that begin then."""
    line: list[tuple[tuple[float, int, int], list[tuple[int, Action | Transfer]]]] = []
    for number, (rank, action, start, end) in enumerate(timeline.events):
        # (time, transfers before actions, order of the simulation): a total order, so that all ranks derive the same
        # line.
        line.append(((start, 1, number), [(rank, action)]))
        pair = _transfer(rank, action, shape)
        if pair:
            # Both ends go to the same place of the line, and before any action that begins at that moment: the partner
            # may be one that begins with what is sent.
            line.append(((end, 0, number), pair))
    for _, steps in sorted(line, key=lambda entry: entry[0]):
        yield from steps


def _transfer(rank: int, action: Action, shape: VirtualStages) -> list[tuple[int, Action | Transfer]]:
    """Both ends of what an action gives to another rank; nothing where its result stays."""
    stage = shape.index(rank, action.chunk)
    # W yields nothing that another stage needs: -1 lies outside the pipeline.
    target = {"F": stage + 1, "B": stage - 1, "W": -1}[action.kind]
    if not 0 <= target < shape.count:
        return []
    peer, chunk = shape.holder(target)
    if peer == rank:
        return []
    what: Literal["F", "B"] = "F" if action.kind == "F" else "B"
    # One number for each microbatch, border between stages and direction; the border has the lower stage's number.
    tag = (action.microbatch * shape.count + min(stage, target)) * 2 + (what == "B")
    return [
        (rank, Transfer("send", what, action.microbatch, action.chunk, peer, tag)),
        (peer, Transfer("receive", what, action.microbatch, chunk, rank, tag)),
    ]


def _receive_early(program: Program) -> Program:
    """Post each receive one action earlier, unless a receive from the same partner is in between."""
    early: Program = []
    for step in program:
        # Sends stay where they are: before its action has run there is nothing to send.
        place = len(early)
        if isinstance(step, Transfer) and step.kind == "receive":
            place = _earlier_place(early, step.peer)
        early.insert(place, step)
    return early


def _earlier_place(program: Program, peer: int) -> int:
    for place in range(len(program), 0, -1):
        before = program[place - 1]
        if isinstance(before, Action):
            # One action, with those at its side, is enough to hide a transfer behind, and holds one more tensor only.
            if not before.is_beside:
                return place - 1
            continue
        if before.kind == "receive" and before.peer == peer:
            return place
    return 0
