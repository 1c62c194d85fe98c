# SPDX-License-Identifier: Apache-2.0
"""Files next to metrics.jsonl that `python -m megatron report` reads: what happened to the run, and what it waited for.

events.jsonl    a line for each start, restart, checkpoint, rollback, alert, error and end: "event", "iteration", "time"
                (seconds since the epoch), "text"; a start also has the run's settings
times.jsonl     a line every --log-interval iterations: mean seconds of a step on the first rank's host, and of waits
                for batches in it. Nothing waits for the device.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.errors import StorageError, say
from megatron.core.line_files import append_lines
from megatron.core.timers import Timer
from megatron.training.config.container import RunConfig
from megatron.training.data.loading import time_batches
from megatron.training.run import Hook, HookContext, Phase, Run, Step

if TYPE_CHECKING:
    from megatron.training.data.loading import Batch

EVENTS_NAME, TIMES_NAME = "events.jsonl", "times.jsonl"
_LONGEST_TEXT = 2000


class EventFile:
    """Appends to events.jsonl. A line that cannot be written is lost, and said once: it never ends a run."""

    def __init__(self, directory: str) -> None:
        self.path = Path(directory) / EVENTS_NAME
        self._has_warned = False

    def add(self, event: str, iteration: int, text: str = "", **more: Any) -> None:
        """Append an event."""
        row = {
            "event": event,
            "iteration": iteration,
            "time": round(time.time(), 3),
            "text": text[:_LONGEST_TEXT],
            **more,
        }
        try:
            append_lines(self.path, [json.dumps(row, default=str)])
        except (StorageError, ValueError) as error:
            if not self._has_warned:
                say(f"warning: {error}; events are lost", sys.stderr)
            self._has_warned = True


class EventsHook(Hook):
    """Opens the log of events, `run.events`, on the first rank, and notes what happens to the run."""

    phase = Phase.WRITE

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._reached = 0

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> EventsHook | None:
        """Return the hook for --metrics-dir; None where it is not asked for."""
        return None if config.logger.metrics_dir is None else cls(config.logger.metrics_dir)

    def on_train_start(self, run: Run) -> None:
        """Note the start, with the settings. A run from the start sets the events of an earlier one aside."""
        if not run.is_first_rank:
            return
        self._reached = run.progress.iteration
        run.events = events = EventFile(self._directory)
        if self._reached == 0:
            set_aside(events.path)
        ranks = run.groups.world.size()
        target = run.progress.target_iterations
        text = f"{ranks} process{'es' if ranks > 1 else ''}, iterations {self._reached + 1} to {target}"
        event = "restart" if self._reached else "start"
        settings = run.config.to_dict()
        # An address may hold a key; pages are passed on.
        settings.get("logger", {}).pop("alert_webhook", None)
        run.events.add(event, self._reached, text, settings=settings)

    def on_step_start(self, run: Run) -> None:
        """Note that the run went back within this process."""
        iteration = run.progress.iteration
        if run.events is not None and iteration < self._reached:
            run.events.add("rollback", iteration, f"from iteration {self._reached} back to {iteration}")
        self._reached = iteration

    def on_save(self, run: Run) -> None:
        """Note the checkpoint, which a later run may delete."""
        if run.events is not None:
            run.events.add("save", (run.saved_progress or run.progress).iteration)

    def on_error(self, run: Run, error: Exception) -> None:
        """Note the error that ends the run."""
        if run.events is not None:
            run.events.add("error", run.progress.iteration, f"{type(error).__name__}: {error}")

    def on_train_end(self, run: Run) -> None:
        """Note the end, and why it came early."""
        if run.events is not None:
            run.events.add("end", run.progress.iteration, run.stop_reason or "")


class TimesHook(Hook):
    """Times on the first rank's host how long steps take and wait for batches, and writes both to times.jsonl."""

    # Next to the step.
    phase = Phase.MEASURE

    def __init__(self, directory: str, log_interval: int) -> None:
        self._path: Path | None = Path(directory) / TIMES_NAME
        self._log_interval = log_interval
        self._step, self._fetching = Timer("step"), Timer("fetching")

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> TimesHook | None:
        """Return the hook for --metrics-dir; None where it is not asked for."""
        directory = config.logger.metrics_dir
        return None if directory is None else cls(directory, config.logger.log_interval)

    def on_train_start(self, run: Run) -> None:
        """Set the times of an earlier run aside where this one begins from the start."""
        if not run.is_first_rank:
            self._path = None
        elif self._path is not None and run.progress.iteration == 0:
            set_aside(self._path)

    def wrap_step(self, step: Step) -> Step:
        """The same step, timed, and the fetching of its batches apart."""

        def time_step(run: Run, batches: Iterator[Batch]) -> None:
            with self._step:
                step(run, time_batches(batches, self._fetching))

        return time_step

    def on_step_start(self, run: Run) -> None:
        """Write the interval that is over: the last of its steps ended with the wrapper above."""
        if self._step.count >= self._log_interval:
            self._write(run)

    def on_train_end(self, run: Run) -> None:
        """Write what is left."""
        if self._step.count:
            self._write(run)

    def _write(self, run: Run) -> None:
        steps = self._step.count
        means = {"step_seconds": self._step.elapsed() / steps, "data_seconds": self._fetching.elapsed() / steps}
        if self._path is not None:
            append_lines(self._path, [json.dumps({"iteration": run.progress.iteration, **means})])


def set_aside(path: Path) -> None:
    """Rename a file of an earlier run, if there is one, to *.old. Raises OSError."""
    if path.exists():
        os.replace(path, path.with_suffix(path.suffix + ".old"))
