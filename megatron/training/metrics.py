# SPDX-License-Identifier: Apache-2.0
"""Values of a run on their way to the log: recorded while a step runs, read together, passed to the writers.

run.metrics.record("router-entropy", entropy)         # a scalar on the device: nothing waits
run.metrics.record("tokens-dropped", count, reduce="sum")

Reading a value from a GPU makes the host wait until everything before it is done, after which the device idles until it
gets new work. So values stay where they are until `read`, every --log-interval iterations, which brings all of them
over in one transfer. Each iteration then is a Row: console, metrics.jsonl, TensorBoard and Weights & Biases are handed
the same ones (Hook.on_metrics).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Reduction = Literal["mean", "sum", "max", "min", "last"]
Value = Tensor | float | None | Callable[[], float | None]

REDUCTIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: sum(values) / len(values),
    "sum": sum,
    "max": max,
    "min": min,
    "last": lambda values: values[-1],
}
# Bounds the memory of a run with a very large --log-interval.
_MOST_ROWS = 1000
"""Iterations after which values are read in any case: a separate scalar takes 512 bytes on a GPU."""


class Shown(NamedTuple):
    """Form of a metric in the progress line."""

    reduce: Reduction
    """Reduction of its values over the interval."""
    text: Callable[[float], str]


@dataclass
class MetricsRow:
    """The values of one iteration in plain numbers."""

    iteration: int
    values: dict[str, float | None] = field(default_factory=dict)
    """By name, in the order in which they were recorded; None: not known."""
    losses: dict[str, float] = field(default_factory=dict)
    """Values that are losses."""
    texts: list[str] = field(default_factory=list)
    """Words in the progress line of this iteration, in addition to numbers."""
    tables: list[str] = field(default_factory=list)
    """Lines to print below it."""

    def __getitem__(self, name: str) -> float:
        """Return a value by name; NaN where it is not known."""
        value = self.values.get(name)
        return math.nan if value is None else value

    @property
    def has_nan(self) -> bool:
        """True when a loss is not a finite number."""
        return not all(map(math.isfinite, self.losses.values()))


class _Recorded(NamedTuple):
    name: str
    value: Value
    reduce: Reduction


class Metrics:
    """Values that one process has recorded and not yet read. interval: iterations between two reads."""

    def __init__(self, interval: int = 1) -> None:
        self.interval = interval
        self.shown: dict[str, Shown] = {}
        """By name, the metrics that were recorded with a text, in that order."""
        self._open: list[_Recorded] = []
        self._open_losses: list[str] = []
        self._open_texts: list[str] = []
        self._open_tables: list[str] = []
        self._rows: list[tuple[MetricsRow, list[_Recorded], list[str]]] = []

    def record(
        self, name: str, value: Value, reduce: Reduction = "mean", text: Callable[[float], str] | None = None
    ) -> None:
        """Note a value of the step under way, or of the one that has just ended (Hook.on_step_end).

        value: a scalar tensor of any dtype, which is copied, on its device; a number; or a function, called
        when values are read, for what costs something to find out or is known only then. The values of the first rank
        are written: one that differs between ranks is to be reduced over them before.
        reduce: what several values of one step become, and what the values of several steps become in the progress
        line. text: makes a value into that line's words; without it the value is in the files and curves only.
        """
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"metric {name!r} has the shape {list(value.shape)}; record one number at a time")
            # A copy: the step may overwrite the memory of the original before the value is read.
            value = value.detach().reshape(()).clone()
        self._open.append(_Recorded(name, value, reduce))
        if text is not None:
            # Insertion order is the order in the progress line.
            self.shown[name] = Shown(reduce, text)

    def record_losses(self, losses: Mapping[str, Tensor]) -> None:
        """Note the losses of the step, which rows name apart (`MetricsRow.losses`)."""
        for name, loss in losses.items():
            self.record(name, loss)
            self._open_losses.append(name)

    def add_text(self, text: str) -> None:
        """Say something in the progress line, if this iteration has one."""
        self._open_texts.append(text)

    def add_table(self, table: str) -> None:
        """Print lines below the progress line, or without one; values are read at the end of this iteration, so
        all ranks call it."""
        self._open_tables.append(table)

    def drop_step(self) -> None:
        """Forget what was recorded since the last call of `end_step`: the step does not count."""
        self._open, self._open_losses, self._open_texts, self._open_tables = [], [], [], []

    def end_step(self, iteration: int) -> None:
        """Count what was recorded since the last call to this iteration."""
        row = MetricsRow(iteration, texts=self._open_texts, tables=self._open_tables)
        self._rows.append((row, self._open, self._open_losses))
        self._open, self._open_losses, self._open_texts, self._open_tables = [], [], [], []

    def is_due(self, iteration: int) -> bool:
        """Return whether values are to be read after this iteration. The same on all ranks."""
        # Depends only on the iteration, because reading waits for the device and may be followed by collectives: all
        # ranks must read together.
        if iteration % self.interval == 0 or len(self._rows) >= _MOST_ROWS:
            return True
        return bool(self._rows) and bool(self._rows[-1][0].tables)

    def read(self) -> list[MetricsRow]:
        """The rows of all steps ended since the last call, in order. Waits for the device."""
        rows, self._rows = self._rows, []
        on_device = [entry.value for _, entries, _ in rows for entry in entries if isinstance(entry.value, Tensor)]
        # By identity: tensors compare element by element, so they cannot be looked up by value.
        numbers = dict(zip(map(id, on_device), _read_together(on_device), strict=True))
        for row, entries, losses in rows:
            of_names: dict[str, tuple[Reduction, list[float | None]]] = {}
            for name, value, reduce in entries:
                if isinstance(value, Tensor):
                    value = numbers[id(value)]
                elif callable(value):
                    # Only now has the device done what the function asks about, such as the time between two marks.
                    value = value()
                of_names.setdefault(name, (reduce, []))[1].append(value)
            row.values = {name: reduce_values(values, how) for name, (how, values) in of_names.items()}
            row.losses = {name: row[name] for name in losses}
        return [row for row, _, _ in rows]


def reduce_values(values: Iterable[float | None], how: Reduction) -> float | None:
    """Combine several values into one; unknown ones do not count, and a single one stays as it is."""
    known = [value for value in values if value is not None]
    if len(known) == 1:
        return known[0]
    return REDUCTIONS[how](known) if known else None


def _read_together(scalars: Sequence[Tensor]) -> list[float]:
    """The numbers of scalar tensors, whole ones as int: one transfer from each device, exact up to 2^53."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, scalar in enumerate(scalars):
        by_kind.setdefault((scalar.device, scalar.dtype), []).append(place)
    places: dict[torch.device, list[int]] = {}
    parts: dict[torch.device, list[Tensor]] = {}
    for (device, _), found in by_kind.items():
        places.setdefault(device, []).extend(found)
        # float64 holds every float32, and whole numbers up to 2^53, so one format serves for all.
        parts.setdefault(device, []).append(torch.stack([scalars[place] for place in found]).double())
    numbers = [0.0] * len(scalars)
    for device, stacked in parts.items():
        for place, number in zip(places[device], torch.cat(stacked).tolist(), strict=True):
            numbers[place] = number if scalars[place].is_floating_point() else int(number)
    return numbers
