# SPDX-License-Identifier: Apache-2.0
"""Reads metrics.jsonl column by column, also one that grows, is damaged, or has a million rows. Never writes to it.

What cannot be read is passed over and counted. A file that became shorter is another one, and is read from its start.
"""

from __future__ import annotations

import json
import math
import sys
import time
from array import array
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np

FILE_NAME = "metrics.jsonl"
REDONE_NAME = "metrics.redone.jsonl"
"""Rows of iterations that a restart did again; a run moves them here."""
TIMES_NAME = "times.jsonl"
"""Seconds of steps and of waiting for data, on the first rank's host."""
_LONGEST_LINE_BYTES = 1 << 20
_MOST_COLUMNS = 4000
_NOTE_SECONDS = 2.0


class Sample(NamedTuple):
    """A text that the run generated after an iteration."""

    iteration: int
    text: str


class MetricsReader:
    """The rows of a file so far, as columns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self._offset = 0
        self._identity: tuple[int, int] | None = None
        self.iterations = array("d")
        self._columns: dict[str, array[float]] = {}
        self.evaluations: dict[str, list[tuple[int, float]]] = {}
        """Name of the set and of the loss -> (iteration, value)."""
        self.tasks: dict[str, list[tuple[int, float]]] = {}
        """Task and measure -> (iteration, value)."""
        self.samples: list[Sample] = []
        self.unreadable = 0
        """Lines that are no row."""
        self.is_cut = False
        """The last line has no end yet."""
        self.breaks: list[int] = []
        """Places of rows whose iteration is not after the one before: the run went back."""

    def update(self) -> bool:
        """Read what was added since the last call; returns whether there was anything. Raises OSError."""
        with self.path.open("rb") as file:
            status = self.path.stat()
            if self._identity not in (None, (status.st_dev, status.st_ino)) or status.st_size < self._offset:
                self._forget()
            self._identity = (status.st_dev, status.st_ino)
            before, told_at = self._offset, time.monotonic() + _NOTE_SECONDS
            file.seek(self._offset)
            self.is_cut = False
            while line := file.readline(_LONGEST_LINE_BYTES):
                if not line.endswith(b"\n") and len(line) < _LONGEST_LINE_BYTES:
                    # Being written right now, or cut by a kill: looked at again next time.
                    self.is_cut = True
                    break
                self._offset += len(line)
                self._take(line)
                if time.monotonic() > told_at:
                    told_at = time.monotonic() + _NOTE_SECONDS
                    share = self._offset / max(1, status.st_size)
                    print(f"reading {self.path.name}: {share:.0%}", file=sys.stderr, flush=True)
        return self._offset != before

    def _take(self, line: bytes) -> None:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        iteration = row.get("iteration") if isinstance(row, dict) else None
        if not isinstance(row, dict) or not _is_number(iteration):
            self.unreadable += bool(line.strip())
            return
        if "eval" in row or "split" in row:
            self._take_evaluation(int(iteration), row)
            return
        place = len(self.iterations)
        if place and iteration <= self.iterations[-1]:
            self.breaks.append(place)
        self.iterations.append(float(iteration))
        for name, value in row.items():
            if name == "iteration" or not (value is None or _is_number(value)):
                continue
            column = self._columns.get(name)
            if column is None:
                if len(self._columns) >= _MOST_COLUMNS:
                    continue
                column = self._columns[name] = array("d")
            # A column that was not in some rows has gaps there.
            if len(column) < place:
                column.extend([math.nan] * (place - len(column)))
            column.append(math.nan if value is None else float(value))

    def _take_evaluation(self, iteration: int, row: dict[str, Any]) -> None:
        losses = row.get("eval")
        if isinstance(losses, dict):
            # The evaluation at the end of a run uses other batches.
            parts = [str(row[key])[:80] for key in ("split", "set") if key in row]
            where = "-".join([*parts, *(["final"] if row.get("final") is True else [])]) or "evaluation"
            for name, value in losses.items():
                if _is_number(value):
                    self.evaluations.setdefault(f"{name} {where}", []).append((iteration, float(value)))
        tasks = row.get("tasks")
        for name, value in tasks.items() if isinstance(tasks, dict) else ():
            if _is_number(value) and (name in self.tasks or len(self.tasks) < _MOST_COLUMNS):
                self.tasks.setdefault(str(name)[:80], []).append((iteration, float(value)))
        if isinstance(row.get("generated"), str):
            self.samples.append(Sample(iteration, row["generated"][:4000]))

    @property
    def names(self) -> list[str]:
        """The columns, in the order in which they appeared."""
        return list(self._columns)

    def column(self, name: str) -> np.ndarray:
        """[rows] float64, NaN where a value is not known; all NaN for a name that no row has."""
        values = np.full(len(self.iterations), math.nan)
        found = self._columns.get(name)
        if found:
            values[: len(found)] = np.frombuffer(found, dtype=np.float64)
        return values

    def find_redone(self) -> np.ndarray:
        """[rows] bool: the row's iteration was done again later in this file."""
        redone = np.zeros(len(self.iterations), dtype=bool)
        rows = np.array(self.iterations)
        for place in self.breaks:
            redone[:place] |= rows[:place] >= rows[place]
        return redone


def _is_number(value: Any) -> TypeGuard[float]:
    # A number that no float64 holds exactly is no iteration, and one that none holds at all would raise.
    return isinstance(value, int | float) and abs(value) < 1e300
