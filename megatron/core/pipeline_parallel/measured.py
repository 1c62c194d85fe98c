"""A step that really ran, as a timeline like that of a simulated one: reads what --pipeline-trace-dir wrote."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.errors import DataError
from megatron.core.pipeline_parallel.schedules import Action, ScheduleName
from megatron.core.pipeline_parallel.simulate import Costs, Event, Timeline, peak_in_flight
from megatron.core.virtual_stages import VirtualStages

MILLISECONDS = 1000.0


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


def read_trace(directory: Path, iteration: int | None = None) -> MeasuredStep:
    """The given iteration of a trace; the last one that all stages have when None.

    Raises DataError for a directory without a complete trace.
    """
    header, *_ = _rows(directory / "stage-0.jsonl")
    try:
        shape = VirtualStages(int(header["stages"]), int(header["chunks"]), bool(header["folded"]))
        by_stage = [_by_iteration(_rows(directory / f"stage-{stage}.jsonl")[1:]) for stage in range(shape.stages)]
        common = set.intersection(*map(set, by_stage))
        chosen = max(common, default=0) if iteration is None else iteration
        if chosen not in common:
            found = f"iterations {min(common)} to {max(common)}" if common else "none"
            raise DataError(f"{directory} has no complete trace of iteration {chosen}; found {found}")
        tables = [found[chosen] for found in by_stage]
        microbatches = 1 + max(row["microbatch"] for row in tables[0])
        timeline = _timeline(tables, shape)
        return MeasuredStep(
            chosen, header["schedule"], shape, header["group_size"], microbatches, timeline, _costs(timeline.events)
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{directory} holds no trace of a pipeline ({type(error).__name__}: {error})") from error


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); give a --pipeline-trace-dir") from error
    except ValueError as error:
        raise DataError(f"{path} is not a trace of a pipeline: {error}") from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path} is not a trace of a pipeline")
    return rows


def _by_iteration(rows: Iterable[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        found[row["iteration"]].append(row)
    return found


def _timeline(tables: list[list[dict[str, Any]]], shape: VirtualStages) -> Timeline:
    first = min(row["start"] for table in tables for row in table)
    events = [
        Event(rank, Action(row["kind"], row["microbatch"], row["chunk"]), *_times(row, first))
        for rank, table in enumerate(tables)
        for row in table
    ]
    events.sort(key=lambda event: (event.start, event.rank))
    makespan = max(event.end for event in events)
    busy = sum(event.end - event.start for event in events)
    orders = [[event.action for event in events if event.rank == rank] for rank in range(shape.stages)]
    peaks = [peak_in_flight(order) / shape.chunks for order in orders]
    return Timeline(events, makespan, 1 - busy / (shape.stages * makespan), peaks)


def _times(row: dict[str, Any], first: float) -> tuple[float, float]:
    return (row["start"] - first) * MILLISECONDS, (row["end"] - first) * MILLISECONDS


def _costs(events: Iterable[Event]) -> Costs:
    durations: dict[str, list[float]] = defaultdict(list)
    for event in events:
        durations[event.action.kind].append(event.end - event.start)
    means = {kind: sum(found) / len(found) for kind, found in durations.items()}
    return Costs(means["F"], means["B"], means.get("W", means["B"]))
