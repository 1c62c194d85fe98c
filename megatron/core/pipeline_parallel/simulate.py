"""Run schedules on a clock: dependencies only, no tensors and no processes.

F(m, v)  needs  F(m, v-1)                     v: virtual stage, m: microbatch
B(m, v)  needs  F(m, v) and B(m, v+1)
W(m, v)  needs  B(m, v)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron.core.pipeline_parallel.schedules import Action
from megatron.core.virtual_stages import VirtualStages


class Costs(NamedTuple):
    """How long one action on one chunk takes, in any unit."""

    forward: float = 1.0
    backward: float = 2.0
    """Of inputs and weights, or of inputs alone where weight gradients are deferred."""
    weight: float = 1.0
    transfer: float = 0.0
    """From one process to its neighbour; computing goes on meanwhile."""

    def of(self, action: Action) -> float:
        """Duration of an action."""
        return {"F": self.forward, "B": self.backward, "W": self.weight}[action.kind]


UNDIVIDED = Costs()
EQUAL_PARTS = Costs(forward=1.0, backward=1.0, weight=1.0)
"""What zero-bubble schedules are designed for: backward in two halves, each as long as the forward."""


class Event(NamedTuple):
    """One action on the clock."""

    rank: int
    action: Action
    start: float
    end: float


class Timeline(NamedTuple):
    """A schedule that was played."""

    events: list[Event]
    """In an order in which one process could run them all: by start, and by what they need."""
    makespan: float
    bubble: float
    """Idle part of all processes' time, from 0 to 1."""
    peak_in_flight: list[float]
    """For each rank, the most microbatches whose activations it held at once; a chunk's share of one counts as
    1 / chunks."""


class Deadlock(RuntimeError):
    """The schedule waits for something that never comes."""


def simulate(tables: Sequence[Sequence[Action]], shape: VirtualStages, costs: Costs = UNDIVIDED) -> Timeline:
    """Play the tables of all ranks. Raises Deadlock when all that are not done wait for each other."""
    done: dict[tuple[str, int, int], float] = {}
    clocks = [0.0] * shape.stages
    positions = [0] * shape.stages
    events: list[Event] = []
    while True:
        ready = [_next_event(rank, tables, positions, clocks, done, shape, costs) for rank in range(shape.stages)]
        runnable = [event for event in ready if event is not None]
        if not runnable:
            break
        event = min(runnable, key=lambda found: (found.start, found.rank))
        rank, action = event.rank, event.action
        done[action.kind, action.microbatch, shape.index(rank, action.chunk)] = event.end
        clocks[rank] = event.end
        positions[rank] += 1
        events.append(event)
    waiting = [
        f"rank {rank} for {table[position]}"
        for rank, (table, position) in enumerate(zip(tables, positions, strict=True))
        if position < len(table)
    ]
    if waiting:
        raise Deadlock(f"the schedule stops; waiting: {', '.join(waiting)}")
    makespan = max(clocks)
    busy = sum(event.end - event.start for event in events)
    peaks = [peak_in_flight(table) / shape.chunks for table in tables]
    return Timeline(events, makespan, 1 - busy / (shape.stages * makespan), peaks)


def peak_in_flight(table: Sequence[Action]) -> int:
    """Most forwards whose activations wait for the end of their backward at once, counted in chunks."""
    last = "W" if any(action.kind == "W" for action in table) else "B"
    held = peak = 0
    for action in table:
        held += (action.kind == "F") - (action.kind == last)
        peak = max(peak, held)
    return peak


def needs(action: Action, rank: int, shape: VirtualStages) -> list[tuple[str, int, int]]:
    """What must be done before: (kind, microbatch, virtual stage)."""
    stage = shape.index(rank, action.chunk)
    if action.kind == "F":
        return [("F", action.microbatch, stage - 1)] if stage > 0 else []
    if action.kind == "W":
        return [("B", action.microbatch, stage)]
    own = [("F", action.microbatch, stage)]
    return own + [("B", action.microbatch, stage + 1)] if stage < shape.count - 1 else own


def _next_event(
    rank: int,
    tables: Sequence[Sequence[Action]],
    positions: list[int],
    clocks: list[float],
    done: dict[tuple[str, int, int], float],
    shape: VirtualStages,
    costs: Costs,
) -> Event | None:
    """The rank's next action with its times; None when it has none or its input is not there."""
    if positions[rank] == len(tables[rank]):
        return None
    action = tables[rank][positions[rank]]
    start = clocks[rank]
    for need in needs(action, rank, shape):
        if need not in done:
            return None
        travels = shape.holder(need[2])[0] != rank
        start = max(start, done[need] + costs.transfer * travels)
    return Event(rank, action, start, start + costs.of(action))
