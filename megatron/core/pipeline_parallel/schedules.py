# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules as data: for one stage, the ordered list of what to run.

A schedule knows nothing of tensors or processes, so the same list drives training (executor.py), a clock (timelines.py)
and the tests. With one stage it is the plain loop: forward and backward of one microbatch after the other.

| name        | bubble, part of the time             | microbatches in flight on stage r of S   | needs              |
|-------------|--------------------------------------|------------------------------------------|--------------------|
| gpipe       | (S-1) / (M+S-1)                      | M                                        |                    |
| 1f1b        | (S-1) / (M+S-1)                      | S-r                                      |                    |
| interleaved | (S-1)/V / (M + (S-1)/V)              | (2(S-r)-1 + (V-1)S) / V, at most M       | V chunks per rank  |
| zb-h1       | (S-1) / (3M+S-1)                     | S                                        | deferred dW        |
| zb-v        | (S-1) / (6M+S-1), from M = 2S-1 on   | S, on every rank                         | 2 chunks, deferred |

M: microbatches, V: chunks. Times: backward twice forward; with deferred weight gradients three equal parts.

1f1b and interleaved also exist side by side, for models whose experts are on several ranks: a backward overlaps the
forward that follows it in turn, and each computes while the other's tokens travel (DualPipe's idea, DeepSeek-AI, 2024,
section 3.2.1, in one direction). No backward may then wait for the forward at its side, so that warm-up is longer: 1f1b
holds 2(S-r) microbatches, interleaved one chunk more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple

from megatron.core.errors import ConfigError
from megatron.core.mesh import VirtualStages, schedule_problem, side_by_side_problem

# Put here by a table of upstream's names; declared for type checkers.
get_forward_backward_func: Any
get_schedule_table: Any
get_tensor_shapes: Any


class Action(NamedTuple):
    """One computation of a stage: the forward, the backward or the weight gradients of one microbatch on one chunk."""

    kind: Literal["F", "B", "W"]
    """Forward; backward (of inputs and, where no W follows, of weights); deferred backward of weights."""
    microbatch: int
    chunk: int = 0
    """Virtual stage on this rank."""
    is_beside: bool = False
    """Runs concurrently with the action before it in the list: such a group of actions begins when the input of all is
    there. A W next to the B of the same microbatch computes what B deferred, while B's gradients travel."""


Schedule = Callable[[int, int, int], list[Action]]
"""(rank in the pipeline, stages, microbatches) -> what this rank does, in order."""
ScheduleName = Literal["1f1b", "interleaved", "gpipe", "zb-h1", "zb-v"]


def build_tables(
    name: ScheduleName,
    shape: VirtualStages,
    microbatches: int,
    group_size: int | None = None,
    *,
    side_by_side: bool = False,
    delays_weights: bool = False,
) -> list[list[Action]]:
    """Build the actions of every rank: rank -> its actions in order. group_size: of the interleaved schedule; the
    number of stages when None. side_by_side: backwards overlap forwards. delays_weights: weight gradients overlap their
    backward.

    Raises ConfigError where the schedule does not exist for these numbers.
    """
    stages, chunks = shape.stages, shape.chunks
    ranks = range(stages)
    problem = schedule_problem(name, chunks)
    if problem is None and side_by_side:
        problem = side_by_side_problem(name)
    if problem is not None:
        raise ConfigError(problem)
    if delays_weights and not side_by_side:
        return [_with_weights_beside(table) for table in build_tables(name, shape, microbatches, group_size)]
    if side_by_side:
        chunk_group = (chunks, group_size) if name == "interleaved" else ()
        plain = interleaved if name == "interleaved" else one_f_one_b
        tables = [plain(rank, stages, microbatches, *chunk_group, side_by_side=True) for rank in ranks]
        return [_with_weights_beside(table) for table in tables] if delays_weights else tables
    if name == "interleaved":
        return [interleaved(rank, stages, microbatches, chunks, group_size) for rank in ranks]
    assert shape.folded == (name == "zb-v"), f"{shape} is no shape of {name}"
    schedule = {"1f1b": one_f_one_b, "gpipe": gpipe, "zb-h1": zero_bubble_h1, "zb-v": zero_bubble_v}[name]
    return [schedule(rank, stages, microbatches) for rank in ranks]


def build_forward_tables(shape: VirtualStages, microbatches: int) -> list[list[Action]]:
    """Build the actions of every rank for evaluation: forwards only, in groups as large as the pipeline is long."""
    if shape.folded:
        # The turn makes a microbatch meet itself: the second chunk of rank r runs 2 (S-1-r) + 1 steps after the first.
        return [_folded_forwards(rank, shape.stages, microbatches) for rank in range(shape.stages)]
    order = _grouped(microbatches, shape.chunks, shape.stages)
    return [[Action("F", *what) for what in order] for _ in range(shape.stages)]


def one_f_one_b(rank: int, stages: int, microbatches: int, *, side_by_side: bool = False) -> list[Action]:
    """Warm up with forwards, then alternate; at most `stages - rank` microbatches are in flight.

    PipeDream-Flush (Narayanan et al., 2021a, section 2.2; 1F1B of Megatron-LM, 2021b). side_by_side: forward and
    backward in turn become one, with twice as many in flight.
    """
    _check(rank, stages, microbatches)
    # One microbatch for each later stage to work on; more would only hold activations longer. Side by side a stage has
    # its results only at the end of both, so that the way there and back takes twice as many turns; and the first
    # backward of the last stage must not be of the same microbatch as the forward next to it.
    warmup = min(2 * (stages - rank - 1) + 1 if side_by_side else stages - rank - 1, microbatches)
    forwards = [Action("F", microbatch) for microbatch in range(microbatches)]
    backwards = [Action("B", microbatch) for microbatch in range(microbatches)]
    return _alternate(forwards, backwards, warmup, side_by_side)


def gpipe(rank: int, stages: int, microbatches: int) -> list[Action]:
    """All forwards, then all backwards in reverse order (Huang et al., 2019, figure 2c)."""
    _check(rank, stages, microbatches)
    forwards = forward_only(rank, stages, microbatches)
    return forwards + [Action("B", microbatch) for microbatch in reversed(range(microbatches))]


def interleaved(
    rank: int,
    stages: int,
    microbatches: int,
    chunks: int,
    group_size: int | None = None,
    *,
    side_by_side: bool = False,
) -> list[Action]:
    """1F1B over `chunks` virtual stages per rank: a smaller bubble for more communication.

    group_size: consecutive microbatches that a chunk runs before the next chunk's turn; the number of stages when None.
    side_by_side: forward and backward in turn become one. Narayanan et al., 2021b, section 2.2. Raises ConfigError for
    microbatches that leave a group too short to hide the way through the pipeline.
    """
    _check(rank, stages, microbatches)
    size = group_size or stages
    problem = interleaved_problem(stages, microbatches, size)
    if problem is not None:
        raise ConfigError(problem)
    order = _grouped(microbatches, chunks, size)
    forwards = [Action("F", microbatch, chunk) for microbatch, chunk in order]
    backwards = [Action("B", microbatch, chunks - 1 - chunk) for microbatch, chunk in order]
    # All chunks but the last run a whole group before any backward; the rest is the way to the last stage and back.
    warmup = min(2 * (stages - rank - 1) + (chunks - 1) * size + side_by_side, len(forwards))
    return _alternate(forwards, backwards, warmup, side_by_side)


def interleaved_problem(stages: int, microbatches: int, group_size: int) -> str | None:
    """Return why the interleaved schedule cannot run these numbers; None where it can."""
    if group_size < stages:
        return (
            f"--microbatch-group-size-per-virtual-pipeline-stage {group_size} is below "
            f"--pipeline-model-parallel-size {stages}; use {stages} or more"
        )
    # A last group shorter than the pipeline would reach its next chunk before the first microbatch is back.
    rest = microbatches % group_size
    if 0 < rest < stages:
        legal = [m for m in range(1, microbatches + stages) if m % group_size == 0 or m % group_size >= stages]
        near = sorted({max((m for m in legal if m < microbatches), default=legal[-1]), legal[-1]})
        return (
            f"{microbatches} microbatches in groups of {group_size} (--microbatch-group-size-per-virtual-pipeline-"
            f"stage) leave a last group of {rest}, too short for --pipeline-model-parallel-size {stages}; choose a "
            f"--global-batch-size that makes {' or '.join(map(str, near))} microbatches"
        )
    return None


def zero_bubble_h1(rank: int, stages: int, microbatches: int) -> list[Action]:
    """1F1B whose weight gradients wait to fill the cool-down bubble (ZB-H1: Qi et al., 2023, section 2.2)."""
    actions: list[Action] = []
    pending: list[Action] = []
    for action in one_f_one_b(rank, stages, microbatches):
        actions.append(action)
        if action.kind == "B":
            pending.append(Action("W", action.microbatch))
            if len(pending) > rank:  # later stages begin backward earlier and owe more
                actions.append(pending.pop(0))
    return actions + pending


def zero_bubble_v(rank: int, stages: int, microbatches: int) -> list[Action]:
    """Two chunks per rank in V shape, weight gradients deferred; no bubble except for filling the pipeline.

    ZB-V (Qi et al., 2024, section 4; the second half of DualPipe, DeepSeek-AI, 2024). Memory is S microbatches on every
    rank. Written for enough microbatches to fill the pipeline; with fewer, those that do not exist are left out.
    """
    _check(rank, stages, microbatches)
    # The pattern below exists from 2S - 1 microbatches on; smaller steps take it and leave out the surplus.
    filled = max(microbatches, 2 * stages - 1)
    counts = {(kind, chunk): 0 for kind in "FBW" for chunk in (0, 1)}
    actions: list[Action] = []

    def do(*steps: tuple[Literal["F", "B", "W"], int], times: int = 1) -> None:
        for kind, chunk in steps * times:
            actions.append(Action(kind, counts[kind, chunk], chunk))
            counts[kind, chunk] += 1

    do(("F", 0), times=2 * (stages - rank) - 1)  # until the first microbatch has come to the turn and back
    # The second chunk's microbatches arrive now at every other step: both chunks take turns.
    do(("F", 1), ("F", 0), times=rank)
    # Backward of the second chunk follows its forward; W fills the time in which rank r waits for the first chunk's B.
    do(("F", 1), ("B", 1), ("W", 1), times=stages - rank)
    while counts["F", 1] < counts["F", 0] or counts["F", 0] < filled:
        if counts["F", 0] < filled:
            do(("F", 0))
        do(("B", 0), ("W", 0), ("F", 1), ("B", 1), ("W", 1))
    # Cool-down: gradients of inputs first, since other ranks wait for them; all owed weight gradients at the end.
    do(("B", 0), ("B", 1), times=rank)
    do(("B", 0), ("W", 0), times=stages - rank)
    do(("W", 1), times=counts["B", 1] - counts["W", 1])
    do(("W", 0), times=counts["B", 0] - counts["W", 0])
    return [action for action in actions if action.microbatch < microbatches]


def forward_only(rank: int, stages: int, microbatches: int) -> list[Action]:
    """Return all forwards in order: evaluation with one chunk per rank."""
    _check(rank, stages, microbatches)
    return [Action("F", microbatch) for microbatch in range(microbatches)]


def _alternate(
    forwards: list[Action], backwards: list[Action], warmup: int, side_by_side: bool = False
) -> list[Action]:
    """The first `warmup` forwards, then forward and backward in turn, then the backwards that are left."""
    turns = len(forwards) - warmup
    alternating = [backward._replace(is_beside=side_by_side) for backward in backwards[:turns]]
    in_turn = chain.from_iterable(zip(forwards[warmup:], alternating, strict=True))
    return [*forwards[:warmup], *in_turn, *backwards[turns:]]


def _with_weights_beside(table: list[Action]) -> list[Action]:
    """Each backward divided in two, of which the weight gradients overlap the input gradients."""
    divided: list[Action] = []
    for action in table:
        divided.append(action)
        if action.kind == "B":
            divided.append(Action("W", action.microbatch, action.chunk, is_beside=True))
    return divided


def find_end_beside(program: Sequence[object], first: int) -> int:
    """Return the end of the actions that run side by side, of which the first is at position `first`."""
    end = first + 1
    while end < len(program) and isinstance(step := program[end], Action) and step.is_beside:
        end += 1
    return end


def _grouped(microbatches: int, chunks: int, group_size: int) -> list[tuple[int, int]]:
    """(microbatch, chunk) in order: each chunk runs a group of microbatches, then the next chunk runs the same ones."""
    return [
        (microbatch, chunk)
        for first in range(0, microbatches, group_size)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + group_size, microbatches))
    ]


def _folded_forwards(rank: int, stages: int, microbatches: int) -> list[Action]:
    # Steps from this rank to the turn of the V, and back.
    behind = 2 * (stages - 1 - rank) + 1
    steps = range(microbatches + behind)
    pairs = [(Action("F", step, 0), Action("F", step - behind, 1)) for step in steps]
    return [action for action in chain.from_iterable(pairs) if 0 <= action.microbatch < microbatches]


def _check(rank: int, stages: int, microbatches: int) -> None:
    if microbatches < 1:
        raise ConfigError(f"a step of {microbatches} microbatches has nothing to run; at least 1 is needed")
    assert 0 <= rank < stages, f"rank {rank} of a pipeline with {stages} stages"
