# SPDX-License-Identifier: Apache-2.0
"""The files of a run, found in a directory of metrics, of checkpoints, or in one above both. Nothing is written."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.errors import ConfigError, DataError
from megatron.core.pipeline_parallel.timelines import MeasuredStep, read_trace
from megatron.report.metrics_reader import FILE_NAME, REDONE_NAME, TIMES_NAME, MetricsReader
from megatron.report.trace_shares import Profile, read_profile

EVENTS_NAME = "events.jsonl"
_FAILURES_NAME, _LEDGER_NAME = "failures.jsonl", "ledger.jsonl"
_CHECKPOINT = re.compile(r"iter_(\d{7,12})")
_DEEPEST = 3
_MOST_ENTRIES = 20_000
_MOST_LINES = 5_000
"""Of a file of events: the last ones."""
_MOST_PROFILES = 16
_SAME_FAILURE = 2
"""Iterations from an error to the failure that it is."""


class Mark(NamedTuple):
    """Something that happened at an iteration."""

    kind: str
    """start, save, rollback, fault, alert, skip, end."""
    iteration: float
    text: str
    end: float | None = None
    """Last iteration of a stretch."""


@dataclass
class RunRecord:
    """Everything that a report shows of one run."""

    name: str
    root: Path
    metrics: MetricsReader | None = None
    redone: MetricsReader | None = None
    times: MetricsReader | None = None
    marks: list[Mark] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    """Flat: section.field -> value, of the newest start or checkpoint."""
    pipeline: MeasuredStep | None = None
    """Of --pipeline-trace-dir, the last traced iteration."""
    profiles: list[Profile] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """Of the last report of --log-straggler: rank, host, forward_ms, data_ms."""
    notes: list[str] = field(default_factory=list)
    """Sentences about what could not be read."""
    _seen: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def setting(self, name: str, default: float) -> float:
        """A number among the settings, by the name of its field."""
        value = next((v for key, v in self.settings.items() if key.rpartition(".")[2] == name), None)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default

    def refresh(self) -> None:
        """Read what is new. Raises ConfigError where the directory is gone, or holds nothing of a run."""
        files = find_files(self.root)
        self.notes, self.marks = [], []
        self.metrics = self._read_metrics(files.get(FILE_NAME, []), self.metrics)
        self.redone = self._read_metrics(files.get(REDONE_NAME, []), self.redone)
        self.times = self._read_metrics(files.get(TIMES_NAME, []), self.times)
        checkpoints = files.get("checkpoint", [])
        self._read_events(files)
        noted = {mark.iteration for mark in self.marks if mark.kind == "save"}
        self.marks += [Mark("save", at, "checkpoint") for at in {_iteration_of(path) for path in checkpoints} - noted]
        if not self.settings and checkpoints:
            self._read_settings(max(checkpoints, key=_iteration_of) / "config.json")
        self._read_traces(files)
        self.marks.sort(key=lambda mark: mark.iteration)

    def _read_metrics(self, paths: list[Path], known: MetricsReader | None) -> MetricsReader | None:
        if not paths:
            return None
        path = paths[0]
        reader = known if known is not None and known.path == path else MetricsReader(path)
        try:
            reader.update()
        except OSError as error:
            self.notes.append(f"{path.name} cannot be read: {error.strerror}")
        if reader.unreadable:
            lines = "1 line is" if reader.unreadable == 1 else f"{reader.unreadable} lines are"
            self.notes.append(f"{lines} damaged in {path.name}, and left out")
        if not len(reader.iterations) and path.name == FILE_NAME:
            self.notes.append(f"{path.name} holds no step yet")
        return reader

    def _read_events(self, files: dict[str, list[Path]]) -> None:
        for row in _read_lines(files.get(EVENTS_NAME, [])):
            kind, iteration = row.get("event"), row.get("iteration")
            if not isinstance(kind, str) or not isinstance(iteration, int):
                continue
            if kind == "ranks" and isinstance(row.get("ranks"), list):
                self.ranks = [rank for rank in row["ranks"] if isinstance(rank, dict)]
                continue
            if kind in ("start", "restart") and isinstance(row.get("settings"), dict):
                self.settings = dict(_flatten(row["settings"]))
            self.marks.append(Mark(kind[:20], iteration, str(row.get("text", kind))[:400]))
        for row in _read_lines(files.get(_FAILURES_NAME, [])):
            if isinstance(row.get("iteration"), int) and "sentence" in row:
                text = f"attempt {row.get('attempt')}: {row['sentence']}"
                self.marks.append(Mark("fault", row["iteration"], text[:400]))
        # What ended a run is noted by the run, and once more, with its culprit, before the next attempt.
        faults = [mark.iteration for mark in self.marks if mark.kind == "fault"]
        self.marks = [
            mark for mark in self.marks
            if mark.kind != "error" or not any(0 <= at - mark.iteration <= _SAME_FAILURE for at in faults)
        ]  # fmt: skip
        for row in _read_lines(files.get(_LEDGER_NAME, [])):
            ends = row.get("iterations")
            if (
                row.get("skipped")
                and isinstance(ends, list)
                and len(ends) == 2
                and all(isinstance(e, int) for e in ends)
            ):
                self.marks.append(Mark("skip", ends[0], f"data passed over: {row['skipped']}"[:400], ends[1]))

    def _read_settings(self, path: Path) -> None:
        try:
            content = json.loads(path.read_bytes()[: 1 << 22])
            self.settings = dict(_flatten(content)) if isinstance(content, dict) else {}
        except (OSError, ValueError, RecursionError):
            self.notes.append(f"{path.parent.name}/{path.name} cannot be read")

    def _read_traces(self, files: dict[str, list[Path]]) -> None:
        stages, traces = files.get("stage", []), sorted(files.get("profile", []))[:_MOST_PROFILES]
        state = {path: _stamp(path) for path in (*stages, *traces)}
        if state == self._seen:
            return
        self._seen, self.pipeline, self.profiles = state, None, []
        if stages:
            try:
                self.pipeline = read_trace(stages[0].parent, None)
            except (DataError, ValueError, KeyError, TypeError) as error:
                self.notes.append(f"the pipeline's trace cannot be read: {error}")
        for path in traces:
            try:
                self.profiles.append(read_profile(path))
            except (OSError, EOFError, ValueError, RecursionError, DataError) as error:
                self.notes.append(f"{path.name} is no profile: {error}")


def find_files(root: Path) -> dict[str, list[Path]]:
    """Kind or name -> the files and checkpoints of a run below a directory. Raises ConfigError where there are none."""
    if not root.is_dir():
        what = "is no directory" if root.exists() else "does not exist"
        raise ConfigError(f"{root} {what}; give the --metrics-dir or the --save directory of a run, or one above both")
    found: dict[str, list[Path]] = {}
    for path in _walk(root, _DEEPEST, [_MOST_ENTRIES]):
        name = path.name
        if name in (FILE_NAME, REDONE_NAME, TIMES_NAME, EVENTS_NAME, _FAILURES_NAME, _LEDGER_NAME):
            found.setdefault(name, []).append(path)
        elif _CHECKPOINT.fullmatch(name):
            found.setdefault("checkpoint", []).append(path)
        elif re.fullmatch(r"stage-\d+\.jsonl", name):
            found.setdefault("stage", []).append(path)
        elif re.fullmatch(r"rank-\d+\.json(\.gz)?", name):
            found.setdefault("profile", []).append(path)
    if not found:
        raise ConfigError(
            f"{root} holds no {FILE_NAME}, no checkpoint and no record of a failure; give the --metrics-dir or the "
            "--save directory of a run, or one above both"
        )
    return found


def open_runs(roots: list[Path]) -> list[RunRecord]:
    """Records of the runs in these directories, read once; one that holds the metrics of several is several runs.
    Raises ConfigError."""
    records = []
    for root in roots:
        several = find_files(root).get(FILE_NAME, [])
        parents = sorted({root / path.relative_to(root).parts[0] for path in several}) if len(several) > 1 else [root]
        for parent in parents:
            name = parent.name if len(parents) > 1 or len(roots) > 1 else root.resolve().name
            records.append(RunRecord(name or str(parent), parent if parent.is_dir() else root))
    for record in records:
        record.refresh()
    return records


def _walk(folder: Path, depth: int, left: list[int]) -> Iterator[Path]:
    """Files, and checkpoints as what they are; links to folders are not followed."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        left[0] -= 1
        if left[0] < 0:
            return
        path = folder / entry.name
        if entry.is_dir(follow_symlinks=False):
            if _CHECKPOINT.fullmatch(entry.name):
                yield path
            elif depth > 1:
                yield from _walk(path, depth - 1, left)
        elif entry.is_file():
            yield path


def _read_lines(paths: list[Path]) -> Iterator[dict[str, Any]]:
    for path in paths[:1]:
        try:
            lines = path.read_bytes().split(b"\n")[-_MOST_LINES:]
        except OSError:
            continue
        for line in lines:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                yield row


def _flatten(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, fields in settings.items():
        if isinstance(fields, dict):
            yield from ((f"{section}.{name}", value) for name, value in fields.items())
        else:
            yield str(section), fields


def _iteration_of(path: Path) -> int:
    match = _CHECKPOINT.fullmatch(path.name)
    return int(match[1]) if match else 0


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return (status.st_size, status.st_mtime_ns)
