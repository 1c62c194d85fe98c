# SPDX-License-Identifier: Apache-2.0
"""Schedules on a clock: simulated only from dependencies, or measured in a step that ran.

Simulated, without tensors and processes:

    F(m, v)  needs  F(m, v-1)                     v: virtual stage, m: microbatch
    B(m, v)  needs  F(m, v) and B(m, v+1)
    W(m, v)  needs  B(m, v)

Actions side by side begin together, when the input of all is there, and end together, after the sum of their times.

Measured: what --pipeline-trace-dir wrote, a file for each stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.errors import DataError
from megatron.core.line_files import read_rows
from megatron.core.mesh import VirtualStages
from megatron.core.pipeline_parallel.schedules import Action, ScheduleName, find_end_beside

MILLISECONDS = 1000.0


class Costs(NamedTuple):
    """Duration of each kind of action on one chunk, in any unit."""

    forward: float = 1.0
    backward: float = 2.0
    """Of inputs and weights, or only of inputs where weight gradients are deferred."""
    weight: float = 1.0
    transfer: float = 0.0
    """From one process to its neighbour; computing goes on meanwhile."""

    def duration(self, action: Action) -> float:
        """Return the duration of an action."""
        return {"F": self.forward, "B": self.backward, "W": self.weight}[action.kind]


UNDIVIDED = Costs()
EQUAL_PARTS = Costs(forward=1.0, backward=1.0, weight=1.0)
"""Durations that zero-bubble schedules are designed for: backward in two halves, each as long as the forward."""


class Event(NamedTuple):
    """One action of one rank with its start and end, in the unit of the costs (measured: milliseconds)."""

    rank: int
    action: Action
    start: float
    end: float


class Timeline(NamedTuple):
    """Times at which the actions of a schedule ran, and what follows from them."""

    events: list[Event]
    """In an order in which one process could run them all: by start, and by what they need."""
    makespan: float
    bubble: float
    """Idle part of all processes' time, from 0 to 1."""
    peak_in_flight: list[float]
    """For each rank, the most microbatches whose activations it held at once; a chunk's share of one counts as
    1 / chunks."""


class Deadlock(RuntimeError):
    """Raised for a schedule that waits for something that never comes."""


def simulate(
    tables: Sequence[Sequence[Action]], shape: VirtualStages, costs: Costs | Sequence[Costs] = UNDIVIDED
) -> Timeline:
    """Play the tables of all ranks. costs: of every chunk, or of each virtual stage in order. Raises Deadlock when all
    that are not done wait for each other."""
    of_stage = [costs] * shape.count if isinstance(costs, Costs) else costs
    holders = [shape.holder(stage)[0] for stage in range(shape.count)]
    # Ranks that may wait for what a stage has done.
    near = [{*holders[max(0, stage - 1) : stage], *holders[stage + 1 : stage + 2]} for stage in range(shape.count)]
    done: dict[tuple[str, int, int], float] = {}
    clocks = [0.0] * shape.stages
    positions = [0] * shape.stages
    events: list[Event] = []
    waiting = set(range(shape.stages))
    while waiting:
        rank = waiting.pop()
        # As far as it gets: what an action waits for, and so when it begins, does not depend on who is asked first.
        while beside := _next_events(rank, tables, positions, clocks, done, shape, of_stage, holders):
            for _, action, _, end in beside:
                stage = shape.index(rank, action.chunk)
                done[action.kind, action.microbatch, stage] = clocks[rank] = end
                positions[rank] += 1
                waiting |= near[stage]
            events += beside
        waiting.discard(rank)
    left = [
        f"rank {rank} for {table[position]}"
        for rank, (table, position) in enumerate(zip(tables, positions, strict=True))
        if position < len(table)
    ]
    if left:
        raise Deadlock(f"the schedule stops; waiting: {', '.join(left)}")
    # Earliest start first, ties by rank: an order that one process could run them in.
    events.sort(key=lambda event: (event.start, event.rank))
    makespan = max(clocks)
    peaks = [count_peak_in_flight(table) / shape.chunks for table in tables]
    return Timeline(events, makespan, 1 - _busy(events) / (shape.stages * makespan), peaks)


def _busy(events: Iterable[Event]) -> float:
    """The time that ranks compute; actions side by side have theirs together."""
    return sum(event.end - event.start for event in events if not event.action.is_beside)


def count_peak_in_flight(table: Sequence[Action]) -> int:
    """Count the most forwards whose activations wait for the end of their backward at once, in chunks."""
    last = "W" if any(action.kind == "W" for action in table) else "B"
    held = peak = 0
    for action in table:
        # A deferred weight gradient needs the layer's input, so that activations live until W, not until B.
        held += (action.kind == "F") - (action.kind == last)
        peak = max(peak, held)
    return peak


def needs(action: Action, rank: int, shape: VirtualStages) -> list[tuple[str, int, int]]:
    """Return what must be done before an action of a rank can run: (kind, microbatch, virtual stage) each."""
    stage = shape.index(rank, action.chunk)
    if action.kind == "F":
        return [("F", action.microbatch, stage - 1)] if stage > 0 else []
    if action.kind == "W":
        return [("B", action.microbatch, stage)]
    own = [("F", action.microbatch, stage)]
    # The last stage makes the loss: its backward needs only its forward.
    return own + [("B", action.microbatch, stage + 1)] if stage < shape.count - 1 else own


def _next_events(
    rank: int,
    tables: Sequence[Sequence[Action]],
    positions: list[int],
    clocks: list[float],
    done: dict[tuple[str, int, int], float],
    shape: VirtualStages,
    of_stage: Sequence[Costs],
    holders: Sequence[int],
) -> list[Event]:
    """The rank's next action, and those at its side, with their times; nothing when it has none or their input is not
    there. holders: rank of each virtual stage."""
    position = positions[rank]
    if position == len(tables[rank]):
        return []
    actions = tables[rank][position : find_end_beside(tables[rank], position)]
    start = clocks[rank]
    if len(actions) == 1:
        # By far the most, and many: the same as below, without sets.
        (action,) = actions
        stage = shape.index(rank, action.chunk)
        costs = of_stage[stage]
        for need in needs(action, rank, shape):
            ready_at = done.get(need)
            if ready_at is None:
                return []
            if holders[need[2]] != rank:
                ready_at += costs.transfer
            if ready_at > start:
                start = ready_at
        return [Event(rank, action, start, start + costs.duration(action))]
    within = {(action.kind, action.microbatch, shape.index(rank, action.chunk)) for action in actions}
    for need in [need for action in actions for need in needs(action, rank, shape) if _comes_before(need, within)]:
        if need not in done:
            return []
        # Between two chunks of one rank, such as at the turn of a V, nothing travels.
        travels = holders[need[2]] != rank
        start = max(start, done[need] + of_stage[shape.index(rank, actions[0].chunk)].transfer * travels)
    end = start + sum(of_stage[shape.index(rank, action.chunk)].duration(action) for action in actions)
    return [Event(rank, action, start, end) for action in actions]


def _comes_before(need: tuple[str, int, int], within: Collection[tuple[str, int, int]]) -> bool:
    """Return whether a need of actions side by side must be met before they begin: a W takes from the B at its side
    what that has left so far, all others need whole results."""
    return need not in within or need[0] != "B"


# ---- measured


class MeasuredStep(NamedTuple):
    """One iteration of one pipeline; times in milliseconds from its first action on."""

    iteration: int
    schedule: ScheduleName
    shape: VirtualStages
    group_size: int | None
    microbatches: int
    timeline: Timeline
    costs: Costs
    """Mean times of the actions; transfers are not measured apart."""
    side_by_side: bool
    delays_weights: bool
    notes: tuple[str, ...] = ()
    """Sentences on what was left out."""


def read_trace(directory: Path, iteration: int | None = None) -> MeasuredStep:
    """The given iteration of a trace; the last one that all stages have when None.

    Raises DataError for a directory without a complete trace.
    """
    # The first line of a file describes the pipeline, the others are actions.
    header, *_ = _read_rows(directory / "stage-0.jsonl")[0]
    notes: list[str] = []
    try:
        shape = VirtualStages(int(header["stages"]), int(header["chunks"]), bool(header["folded"]))
        by_stage = [_read_iterations(directory / f"stage-{stage}.jsonl", notes) for stage in range(shape.stages)]
        # A run that was ended in a step has written it on some stages only.
        common = set.intersection(*map(set, by_stage))
        chosen = max(common, default=0) if iteration is None else iteration
        if chosen not in common:
            found = f"iterations {min(common)} to {max(common)}" if common else "none"
            raise DataError(f"{directory} has no complete trace of iteration {chosen}; found {found}")
        tables = [found[chosen] for found in by_stage]
        microbatches = 1 + max(row["microbatch"] for row in tables[0])
        timeline = _timeline(tables, shape)
        return MeasuredStep(
            chosen, header["schedule"], shape, header["group_size"], microbatches, timeline, _costs(timeline.events),
            bool(header.get("side_by_side")), bool(header.get("delays_weights")), tuple(notes),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{directory} holds no trace of a pipeline ({type(error).__name__}: {error})") from error


def _read_rows(path: Path) -> tuple[list[dict[str, Any]], str | None]:
    try:
        rows, note = read_rows(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); give a --pipeline-trace-dir") from error
    except ValueError as error:
        raise DataError(f"{path} is not a trace of a pipeline: {error}") from error
    if not rows:
        raise DataError(f"{path} is not a trace of a pipeline")
    return rows, note


def _read_iterations(path: Path, notes: list[str]) -> dict[int, list[dict[str, Any]]]:
    """Iteration -> its actions on a stage; what is left out is added to the notes."""
    rows, note = _read_rows(path)
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows[1:]:
        found[row["iteration"]].append(row)
    if note is not None:
        # The line that is cut may be one of several that the last iteration lacks.
        cut = found.popitem()[0] if found else None
        notes.append(note if cut is None else f"{note} with iteration {cut}")
    return found


def _timeline(tables: list[list[dict[str, Any]]], shape: VirtualStages) -> Timeline:
    # Machines' clocks are taken to agree: NTP keeps them within a millisecond, less than an action of a large model.
    first = min(row["start"] for table in tables for row in table)
    events = [
        Event(rank, Action(row["kind"], row["microbatch"], row["chunk"], "beside" in row), *_times(row, first))
        for rank, table in enumerate(tables)
        for row in table
    ]
    events.sort(key=lambda event: (event.start, event.rank))
    # Times count from the step's first action, so that the last end is the duration.
    makespan = max(event.end for event in events)
    orders = [[event.action for event in events if event.rank == rank] for rank in range(shape.stages)]
    peaks = [count_peak_in_flight(order) / shape.chunks for order in orders]
    return Timeline(events, makespan, 1 - _busy(events) / (shape.stages * makespan), peaks)


def _times(row: dict[str, Any], first: float) -> tuple[float, float]:
    return (row["start"] - first) * MILLISECONDS, (row["end"] - first) * MILLISECONDS


def _costs(events: Sequence[Event]) -> Costs:
    """Mean times of actions that had nothing at their side but, for a backward, its weight gradients: these then count
    as a part of it."""
    paired = {(event.rank, event.start) for event in events if event.action.is_beside and event.action.kind == "B"}
    durations: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if not event.action.is_beside and (event.rank, event.start) not in paired:
            durations[event.action.kind].append(event.end - event.start)
    means = {kind: sum(found) / len(found) for kind, found in durations.items()}
    divides = any(event.action.kind == "W" and event.action.is_beside for event in events)
    # Without W actions backward made the weight gradients; no W is then simulated, and its cost is never used.
    return Costs(means["F"], means["B"], 0.0 if divides else means.get("W", means["B"]))
