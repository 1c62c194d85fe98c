# SPDX-License-Identifier: Apache-2.0
"""The words of the log: the progress line, long and short, the line of an evaluation, and the time that is left.

The long line is in upstream's wording, for files and the programs that read them. The short one is for people at a
terminal: one row of at most 120 columns, in which every field keeps its width and with it its place.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron.training.metrics import MetricsRow, Shown, reduce_values
from megatron.training.run import Evaluation

MOST_COLUMNS = 120
"""Of the short line, on any terminal that has as many."""


# ---- what an interval comes to


@dataclass
class Interval:
    """Sums over the steps since the last progress line."""

    steps: int = 0
    elapsed_seconds: float = 0.0
    tokens: float = 0.0
    skipped: int = 0
    nan: int = 0
    used: int = 0
    """Steps that were neither skipped nor NaN; many are both."""
    losses: dict[str, float] = field(default_factory=dict)
    values: dict[str, list[float | None]] = field(default_factory=dict)
    """By metric, the values of each step."""

    def add(self, row: MetricsRow) -> None:
        """Count one step. A skipped or NaN step has no part in the mean loss."""
        elapsed_seconds = row["iteration_time_seconds"]
        self.steps += 1
        self.elapsed_seconds += elapsed_seconds
        self.tokens += row["tokens_per_second"] * elapsed_seconds
        self.skipped += bool(row["skipped"])
        self.nan += row.has_nan
        # The loss of such a step says nothing about the weights.
        if not row["skipped"] and not row.has_nan:
            self.used += 1
            for name, loss in row.losses.items():
                self.losses[name] = self.losses.get(name, 0.0) + loss
        for name, value in row.values.items():
            self.values.setdefault(name, []).append(value)

    @property
    def mean_losses(self) -> dict[str, float]:
        """Mean losses over the steps that were neither skipped nor NaN."""
        # At least 1: in an interval of only skipped steps the mean is 0, not an error.
        return {name: total / max(1, self.used) for name, total in self.losses.items()}

    @property
    def tokens_per_second(self) -> float:
        """Over all devices, without evaluations and checkpoints."""
        return self.tokens / self.elapsed_seconds

    def describe(self, shown: Mapping[str, Shown]) -> Iterator[str]:
        """Yield the words of each metric in `shown`, reduced over the interval."""
        for name, (reduce, text) in shown.items():
            value = reduce_values(self.values.get(name, []), reduce)
            if value is not None:
                yield text(value)

    def scale_rate(self, row: MetricsRow, name: str) -> float | None:
        """Return a rate measured on the interval's last step, scaled to its mean step; None where it is not known."""
        value = row.values.get(name)
        return None if value is None else value * row["iteration_time_seconds"] * self.steps / self.elapsed_seconds


# ---- time


class Clock(NamedTuple):
    """The times of a progress line, in seconds."""

    elapsed: float
    """Since this run began to train; runs that it continues do not count."""
    left: float
    """Until the last iteration."""
    until_stop: float | None = None
    """Until --exit-interval or --exit-duration-in-mins stops the run, where that comes first."""


class Pace:
    """Speed of this run: from it follows how long the rest takes.

    The samples that are left, at the time that a sample of the last 100 steps took, times wall time over time in steps:
    evaluations and checkpoints take the fraction that they took so far. Samples, since a growing batch does not spread
    them evenly over the iterations. The first step does not count, which warms up and may compile.
    """

    RECENT_STEPS = 100

    def __init__(self) -> None:
        self.started_at = time.monotonic()
        self._measured_from: float | None = None
        self._first: tuple[float, float] | None = None
        self._recent: deque[tuple[float, float]] = deque(maxlen=self.RECENT_STEPS)
        self._step_seconds = self._wall_seconds = 0.0

    def step_ended(self) -> None:
        """To be called after every step: from the end of the first one on wall time counts."""
        if self._measured_from is None:
            self._measured_from = time.monotonic()

    def add(self, row: MetricsRow) -> None:
        """Count a step whose values have been read."""
        step = (row["iteration_time_seconds"], row["global_batch_size"])
        if self._first is None:
            self._first = step
        else:
            self._recent.append(step)
            self._step_seconds += step[0]
            if self._measured_from is not None:
                self._wall_seconds = time.monotonic() - self._measured_from

    @property
    def elapsed_seconds(self) -> float:
        """Since this run began to train."""
        return time.monotonic() - self.started_at

    @property
    def seconds_per_sample(self) -> float | None:
        """Wall time for one sample, evaluations and checkpoints included; None before the first values are read."""
        steps = self._recent or ([] if self._first is None else [self._first])
        samples = sum(samples for _, samples in steps)
        if not samples:
            return None
        share = max(1.0, self._wall_seconds / self._step_seconds) if self._step_seconds > 0 else 1.0
        return share * sum(seconds for seconds, _ in steps) / samples


def format_duration(seconds: float) -> str:
    """At most six characters, without a colon, by which programs divide the fields of a log: 26s, 1m26s, 3h05m,
    12d03h."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d{hour:02d}h"
    if hours:
        return f"{hours}h{minute:02d}m"
    return f"{minutes}m{second:02d}s" if minutes else f"{second}s"


# ---- the long line


def format_progress_line(
    row: MetricsRow, interval: Interval, target_iterations: int, clock: Clock, texts: Sequence[str] = ()
) -> str:
    """One line in upstream's wording: means over the interval for loss and time, the last step for the rest.

    What upstream does not have is at the end, or a separate field.
    """
    fields = [
        f"iteration {row.iteration:8d}/{target_iterations:8d}",
        f"consumed samples: {row['consumed_samples']:12d}",
        f"elapsed time per iteration (ms): {interval.elapsed_seconds / interval.steps * 1000:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {_format_known(interval.scale_rate(row, 'tflops'), '.3g')}",
        f"MFU (%): {_format_known(interval.scale_rate(row, 'mfu'), '.1f', 100)}",
        f"tokens per second: {interval.tokens_per_second:.0f}",
        f"learning rate: {row['lr']:.6E}",
        f"global batch size: {row['global_batch_size']:5d}",
        *(f"{name}: {loss:.6E}" for name, loss in interval.mean_losses.items()),
        f"loss scale: {row['loss_scale']:.1f}",
    ]
    if row.values.get("grad_norm") is not None:
        fields.append(f"grad norm: {row['grad_norm']:.3f}")
    if "params_norm" in row.values:
        fields.append(f"params norm: {row['params_norm']:.3f}")
    if "num_zeros_in_grad" in row.values:
        fields.append(f"num zeros: {row['num_zeros_in_grad']}")
    fields += [
        *texts,
        f"number of skipped iterations: {interval.skipped:3d}",
        f"number of nan iterations: {interval.nan:3d}",
        f"memory (MB): {row['memory_bytes'] / 2**20:.0f} (peak {row['peak_memory_bytes'] / 2**20:.0f})",
        f"elapsed: {format_duration(clock.elapsed)}",
        f"ETA: {format_duration(clock.left)}",
    ]
    if clock.until_stop is not None:
        fields.append(f"stop in: {format_duration(clock.until_stop)}")
    return f" [{time.strftime('%Y-%m-%d %H:%M:%S')}] " + " | ".join(fields) + " |"


def _format_known(value: float | None, form: str, factor: float = 1.0) -> str:
    return "n/a" if value is None else format(value * factor, form)


def format_evaluation_line(iteration: int, evaluation: Evaluation) -> str:
    """Loss and perplexity, and of what they are: means over `evaluation.samples`."""
    where = f"iteration {iteration}" + (f" on {evaluation.split} set" if evaluation.final else "")
    perplexities = evaluation.perplexities
    fields = []
    for name, loss in evaluation.losses.items():
        fields.append(f"{name} value: {loss:.6E}")
        if name in perplexities:
            fields.append(f"{name} PPL: {perplexities[name]:.6E}")
    fields += [evaluation.samples] if evaluation.samples else []
    return f" {evaluation.name} loss at {where} | " + " | ".join(fields) + " |"


def format_generated(iteration: int, text: str) -> str:
    """Generated text below a line that says what it is, indented, so that no program takes it for a line of the log."""
    # A model may write anything, control sequences of terminals included.
    shown = "".join(character if character.isprintable() or character == "\n" else "\ufffd" for character in
                    text.expandtabs(4))  # fmt: skip
    return f"text generated at iteration {iteration}:\n{textwrap.indent(shown, '    ', lambda line: True)}"


# ---- the short line


class Field(NamedTuple):
    """A field of the short line. Where the line is too long, the one with the highest `rank` goes first."""

    text: str
    rank: int


def format_short_line(
    row: MetricsRow,
    interval: Interval,
    target_iterations: int,
    clock: Clock,
    texts: Sequence[str] = (),
    columns: int = MOST_COLUMNS,
) -> str:
    """The numbers that people watch, in one row of at most `columns`; what was requested in addition, or is unusual,
    follows where there is room, else on further rows.

    1200/9000  loss  4.3456  grad norm  1.345  lr 1.000E-05  123.4k tok/s  MFU 45.1%  73.2 GiB  ran 1h02m   ETA 12d03h
    """
    place = f"{row.iteration:{len(str(target_iterations))}d}/{target_iterations}"
    # NaN where no step of the interval counts: the columns after it stay where they are.
    losses = [(name.removeprefix("lm "), interval.mean_losses.get(name, math.nan)) for name in row.losses]
    fields = [Field(place, 0)]
    fields += [Field(f"{name} {format_number(loss, 7, 4)}", 0) for name, loss in losses[:1]]
    if row.values.get("grad_norm") is not None:
        fields.append(Field(f"grad norm {format_number(row['grad_norm'], 6, 3)}", 3))
    fields += [
        Field(f"lr {row['lr']:9.3E}", 4),
        Field(f"{format_count(interval.tokens_per_second):>6} tok/s", 2),
    ]
    mfu = interval.scale_rate(row, "mfu")
    if mfu is not None:
        fields.append(Field(f"MFU {100 * mfu:4.1f}%", 5))
    fields += [
        Field(f"{row['peak_memory_bytes'] / 2**30:4.1f} GiB", 6),
        Field(f"ran {format_duration(clock.elapsed):<6}", 7),
        Field(f"ETA {format_duration(clock.left):<6}", 1),
    ]
    if clock.until_stop is not None:
        fields.append(Field(f"stop in {format_duration(clock.until_stop):<6}", 1))
    while sum(len(field.text) + 2 for field in fields) - 2 > columns and max(field.rank for field in fields):
        fields.remove(max(fields, key=lambda field: field.rank))
    others = [f"{name} {format_number(loss, 7, 4).strip()}" for name, loss in losses[1:]]
    others += [*_describe_what_is_unusual(row, interval), *texts]
    rows = _flow("  ".join(field.text for field in fields), others, columns, indent=len(place) + 2)
    return "\n".join(row.rstrip() for row in rows)


def _describe_what_is_unusual(row: MetricsRow, interval: Interval) -> Iterator[str]:
    if interval.skipped:
        yield f"skipped iterations {interval.skipped}"
    if interval.nan:
        yield f"nan iterations {interval.nan}"
    if row["loss_scale"] != 1.0:
        yield f"loss scale {row['loss_scale']:.4g}"
    if "params_norm" in row.values:
        yield f"params norm {row['params_norm']:.3f}"
    if "num_zeros_in_grad" in row.values:
        yield f"zeros {row['num_zeros_in_grad']}"


def _flow(line: str, others: Sequence[str], columns: int, indent: int) -> Iterator[str]:
    """Rows of at most `columns`: the line, then the others two spaces apart, broken between them if that is enough."""
    for text in others:
        if len(line) + 2 + len(text) <= columns:
            line += f"  {text}"
            continue
        yield line
        margin = " " * indent
        *full, line = textwrap.wrap(text, max(columns, indent + 20), initial_indent=margin, subsequent_indent=margin)
        yield from full
    yield line


def format_short_evaluation(iteration: int, evaluation: Evaluation, columns: int = MOST_COLUMNS) -> str:
    """In rows of at most `columns`:
    `validation at iteration 300 (final): lm loss 4.2345, PPL 69.0  10 batches of 8: samples 80 to 159 of 1000`."""
    final = " (final)" if evaluation.final else ""
    perplexities = evaluation.perplexities
    values = ", ".join(
        f"{name} {format_number(loss, 7, 4).strip()}"
        + (f", PPL {perplexities[name]:.4g}" if name in perplexities else "")
        for name, loss in evaluation.losses.items()
    )
    line = f"{evaluation.name} at iteration {iteration}{final}: {values}"
    return "\n".join(_flow(line, [evaluation.samples] if evaluation.samples else [], columns, indent=4))


def format_number(value: float, width: int, decimals: int) -> str:
    """A number in `width` columns, right-aligned, with as many of the decimals as fit: 12.3456, 1234.57, 1.2E+08."""
    if not math.isfinite(value) or value == 0:
        return f"{value:{width}.{decimals}f}" if value == 0 else f"{value:>{width}}"
    digits = len(f"{abs(value):.0f}") + (value < 0)
    # A small number gets the places of the zeros in front of its first digit, too.
    places = width - 2 if abs(value) < 0.1 else max(0, min(decimals, width - 1 - digits))
    if digits > width or abs(value) < 10.0 ** (3 - width):
        return f"{value:{width}.{max(0, width - 6)}E}"
    return f"{value:{width}.{places}f}"


def format_count(value: float) -> str:
    """A count with four digits and a suffix for thousands: 987, 12.34k, 123.4k, 1.234M."""
    for suffix in ("", "k", "M", "G"):
        # What rounds to 1000 already belongs to the next suffix.
        if value < 999.95 or suffix == "G":
            break
        value /= 1000
    decimals = 0 if not suffix else max(0, 4 - len(str(int(value))))
    return f"{value:.{decimals}f}{suffix}"
