# SPDX-License-Identifier: Apache-2.0
"""Draw a pipeline schedule: what each rank computes when, how long it idles, how many microbatches it holds.

    python tools/draw_schedule.py --schedule 1f1b --stages 4 --microbatches 8
    python tools/draw_schedule.py --schedule interleaved --stages 4 --chunks 2 --microbatches 8 --output schedule.svg
    python tools/draw_schedule.py --schedule all --stages 4 --microbatches 8 --output schedules.png
    python tools/draw_schedule.py --trace DIR          a step that ran with --pipeline-trace-dir DIR, and its plan

In the terminal F3 is the forward of microbatch 3, B3 its backward, W3 its deferred weight gradients; with several
chunks F3a belongs to the first, F3b to the second. F3+B1 run side by side (--overlap-moe-expert-parallel-comm). A
picture (.png, .svg, .pdf) needs matplotlib.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from megatron.core.errors import ConfigError, command_line
from megatron.core.mesh import DEFERS_WEIGHT_GRADIENTS, VirtualStages
from megatron.core.optional_deps import require
from megatron.core.pipeline_parallel.schedules import ScheduleName, build_tables
from megatron.core.pipeline_parallel.timelines import Costs, Event, Timeline, read_trace, simulate
from megatron.training.flags.argument import ProgramParser, path

SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
COLOURS = {"F": ("#4c78a8", "#9ecae9"), "B": ("#54a24b", "#a8d8a0"), "W": ("#b279a2", "#dcbfd6")}
"""Even and odd chunks."""
NAMES = {"F": "forward", "B": "backward", "W": "weight gradients"}
WIDEST = 400
"""Columns that the terminal drawing may have."""
MEASURED_COLUMNS = 160
"""Columns of a measured step, whose actions are as long as they were."""


class Drawing(NamedTuple):
    """A schedule with the times of its actions, and how it is shown."""

    title: str
    chunks: int
    timeline: Timeline
    columns: int | None = None
    """Width in the terminal; as wide as the labels need when None."""


def measured(directory: Path, iteration: int | None) -> list[Drawing]:
    """A step that ran, below what the schedule plans for actions of the same mean times.

    Raises DataError for a directory without a trace.
    """
    step = read_trace(directory, iteration)
    for note in step.notes:
        print(f"note: {note}", file=sys.stderr)
    # Played with the measured mean times, so that plan and measurement differ only by waiting.
    tables = build_tables(
        step.schedule,
        step.shape,
        step.microbatches,
        step.group_size,
        side_by_side=step.side_by_side,
        delays_weights=step.delays_weights,
    )
    plan = simulate(tables, step.shape, step.costs)
    longest = max(plan.makespan, step.timeline.makespan)
    drawings = []
    for what, timeline in (("planned", plan), (f"measured in iteration {step.iteration}", step.timeline)):
        title = (
            f"{step.schedule}, {step.shape.stages} stages, {step.microbatches} microbatches, {what}: "
            f"{timeline.makespan:.2f} ms, {100 * timeline.bubble:.1f} % idle, "
            f"at most {max(timeline.peak_in_flight):g} microbatches in flight"
        )
        columns = max(1, round(MEASURED_COLUMNS * timeline.makespan / longest))
        drawings.append(Drawing(title, step.shape.chunks, timeline, columns))
    return drawings


def played(name: ScheduleName, arguments: argparse.Namespace) -> Drawing:
    """Simulate one schedule. Raises ConfigError where it does not exist for these numbers."""
    chunks = {"interleaved": max(2, arguments.chunks or 2), "zb-v": 2}.get(name, 1)
    if arguments.chunks is not None and arguments.schedule != "all" and arguments.chunks != chunks:
        raise ConfigError(
            f"--chunks {arguments.chunks} does not fit --schedule {name}, which has {chunks}; leave it out"
        )
    shape = VirtualStages(arguments.stages, chunks, folded=name == "zb-v")
    side_by_side, delayed = arguments.overlap_moe_expert_parallel_comm, arguments.delay_wgrad_compute
    deferred = name in DEFERS_WEIGHT_GRADIENTS or delayed
    whole = arguments.backward_cost + arguments.weight_cost
    # Times are of a full stage; a chunk is a part of one.
    costs = Costs(
        arguments.forward_cost / chunks,
        (arguments.backward_cost if deferred else whole) / chunks,
        arguments.weight_cost / chunks,
        arguments.transfer_cost,
    )
    tables = build_tables(
        name,
        shape,
        arguments.microbatches,
        arguments.group_size,
        side_by_side=side_by_side,
        delays_weights=delayed,
    )
    timeline = simulate(tables, shape, costs)
    numbers = f"{arguments.stages} stages" + (f" x {chunks} chunks" if chunks > 1 else "")
    peak = max(timeline.peak_in_flight)
    title = (
        f"{name}{' side by side' if side_by_side else ''}, {numbers}, {arguments.microbatches} microbatches: "
        f"{timeline.makespan:g} time units, "
        f"{100 * timeline.bubble:.1f} % idle, at most {peak:g} microbatches in flight"
    )
    return Drawing(title, chunks, timeline)


# ---- terminal


def format_drawing(drawing: Drawing, ranks: int) -> str:
    """Draw the schedule as text: one line for each rank; dots are idle."""
    events = _join_beside(drawing.timeline.events)
    label = max(len(_label(beside, drawing.chunks)) for beside in events) + 1
    column = min(beside[0].end - beside[0].start for beside in events) / label  # the shortest action fits its label
    width = drawing.columns or round(drawing.timeline.makespan / column)
    column = drawing.timeline.makespan / width
    if width > WIDEST:
        raise ConfigError(
            f"{drawing.title.split(':')[0]} would be {width} columns wide; use fewer microbatches, or --output FILE.svg"
        )
    lines = [drawing.title]
    for rank in range(ranks):
        cells = ["·"] * width
        for beside in events:
            if beside[0].rank == rank:
                start, end = round(beside[0].start / column), round(beside[0].end / column)
                text = _label(beside, drawing.chunks).ljust(end - start - 1, "-") + " "
                # Rounding may leave an action fewer columns than its label has letters.
                cells[start:end] = text[: end - start]
        peak = drawing.timeline.peak_in_flight[rank]
        lines.append(f"rank {rank:<2d} {''.join(cells)}  peak {peak:g}")
    return "\n".join(lines)


def _join_beside(events: Sequence[Event]) -> list[list[Event]]:
    """The events, those side by side together."""
    joined: list[list[Event]] = []
    for event in events:
        if event.action.is_beside:
            joined[-1].append(event)
        else:
            joined.append([event])
    return joined


def _label(beside: Sequence[Event], chunks: int) -> str:
    actions = [event.action for event in beside]
    return "+".join(
        f"{action.kind}{action.microbatch}{chr(ord('a') + action.chunk) if chunks > 1 else ''}" for action in actions
    )


# ---- picture


def save_picture(drawings: list[Drawing], ranks: int, path: Path) -> None:
    """All drawings below each other, on one time scale. Raises ConfigError where the file cannot be written."""
    matplotlib = require("matplotlib", needed_by=f"--output {path}")
    matplotlib.use("Agg")
    pyplot = require("matplotlib.pyplot", needed_by=f"--output {path}")
    longest = max(drawing.timeline.makespan for drawing in drawings)
    events = max(len(drawing.timeline.events) for drawing in drawings)
    width = min(60.0, max(12.0, 0.16 * events / ranks * 2))
    height = len(drawings) * (0.36 * ranks + 0.9)
    figure, axes = pyplot.subplots(len(drawings), 1, figsize=(width, height), squeeze=False)
    for axis, drawing in zip(axes[:, 0], drawings, strict=True):
        _draw(axis, drawing, ranks, longest, points_per_unit=width * 60 / longest)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--output {path} cannot be written ({error}); give a .png, .svg or .pdf file") from error
    finally:
        pyplot.close(figure)


def _draw(axis: Any, drawing: Drawing, ranks: int, longest: float, points_per_unit: float) -> None:
    kinds: dict[str, Any] = {}
    lanes = [
        (event, lane, len(beside))
        for beside in _join_beside(drawing.timeline.events)
        for lane, event in enumerate(beside)
    ]
    for (rank, action, start, end), lane, count in lanes:
        colour = COLOURS[action.kind][action.chunk % 2]
        # Side by side: one above the other in the height of a rank.
        height = 0.86 / count
        middle = rank + height * (lane - (count - 1) / 2)
        bar = axis.barh(middle, end - start, left=start, height=height, color=colour, edgecolor="white", linewidth=0.6)
        if action.chunk == 0:
            kinds.setdefault(action.kind, bar)
        text = str(action.microbatch)
        # Numbers that do not fit into their bar are left out rather than drawn over its neighbours.
        if (end - start) * points_per_unit > 4.0 * len(text):
            size = min(8.0 / count**0.5, 1.4 * (end - start) * points_per_unit / len(text))
            axis.text((start + end) / 2, middle, text, ha="center", va="center", fontsize=size, color="black")
    axis.set_title(drawing.title, fontsize=9, loc="left")
    axis.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=8)
    # Rank 0 at the top, as in the terminal.
    axis.set_ylim(ranks - 0.5, -0.5)
    axis.set_xlim(0, longest)
    axis.tick_params(axis="x", labelsize=7)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.legend(
        list(kinds.values()), [NAMES[kind] for kind in kinds],
        fontsize=7, ncol=3, loc="lower right", bbox_to_anchor=(1, 1), frameon=False,
    )  # fmt: skip


# ---- command line


def read_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line. Raises ConfigError for numbers that make no pipeline."""
    parser = ProgramParser("Draw a pipeline schedule.", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--schedule", choices=[*SCHEDULES, "all"], default="1f1b", help="which schedule")
    parser.add_argument("--stages", type=int, default=4, help="processes in a row")
    parser.add_argument("--microbatches", type=int, default=8, help="microbatches in a step")
    parser.add_argument("--chunks", type=int, help="chunks of layers on each stage, for the interleaved schedule")
    parser.add_argument(
        "--group-size", type=int, help="consecutive microbatches of a chunk; the number of stages if left out"
    )
    parser.add_argument(
        "--overlap-moe-expert-parallel-comm",
        action="store_true",
        help="backwards beside forwards, as this flag of a run has them",
    )
    parser.add_argument(
        "--delay-wgrad-compute", action="store_true", help="with the former: weight gradients beside their backward"
    )
    parser.add_argument("--forward-cost", type=float, default=1.0, help="time of a stage's forward")
    parser.add_argument("--backward-cost", type=float, default=1.0, help="time of its backward for inputs")
    parser.add_argument("--weight-cost", type=float, default=1.0, help="time of its backward for weights")
    parser.add_argument("--transfer-cost", type=float, default=0.0, help="time from one stage to the next")
    parser.add_argument("--trace", type=path, metavar="DIR", help="draw a run's --pipeline-trace-dir beside its plan")
    parser.add_argument("--iteration", type=int, help="of the trace; the last one if left out")
    parser.add_argument("--output", type=path, help="write a picture: FILE.png, FILE.svg or FILE.pdf")
    arguments = parser.parse_args(argv)
    for name, largest in (("stages", 256), ("microbatches", 4096), ("chunks", 64)):
        value = getattr(arguments, name)
        if value is not None and not 1 <= value <= largest:
            raise ConfigError(f"--{name} {value} is out of range; give a number from 1 to {largest}")
    if arguments.delay_wgrad_compute and not arguments.overlap_moe_expert_parallel_comm:
        raise ConfigError("--delay-wgrad-compute needs --overlap-moe-expert-parallel-comm")
    for name in ("forward_cost", "backward_cost", "weight_cost", "transfer_cost"):
        value = getattr(arguments, name)
        # An action of no length has no place in a drawing; a transfer may be free.
        if not (0 < value < 1e6 or name == "transfer_cost" and value == 0):
            raise ConfigError(f"--{name.replace('_', '-')} {value} is out of range; give a number above 0")
    return arguments


@command_line
def main() -> int:
    """Print the schedule, or save its picture."""
    arguments = read_arguments(sys.argv[1:])
    if arguments.trace is not None:
        drawings = measured(arguments.trace, arguments.iteration)
    else:
        names = SCHEDULES if arguments.schedule == "all" else (arguments.schedule,)
        drawings = [played(name, arguments) for name in names]
    ranks = len(drawings[0].timeline.peak_in_flight)
    if arguments.output is None:
        print("\n\n".join(format_drawing(drawing, ranks) for drawing in drawings))
        return 0
    save_picture(drawings, ranks, arguments.output)
    print(*(drawing.title for drawing in drawings), f"wrote {arguments.output}", sep="\n")
    return 0
