"""Times of the pipeline's actions: for --timing-log-level 2, and as a trace with --pipeline-trace-dir.

stage-N.jsonl: a first line about the pipeline, then a line for each action of each traced iteration, with seconds since
the epoch by the machine's clock. Stages on several machines lie as exactly beside each other as their clocks agree. One
pipeline is traced: that of the first data- and tensor-parallel ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO

from megatron.core.errors import ConfigError
from megatron.core.pipeline_parallel.action_clock import ActionClock, TimedAction
from megatron.training.config.profiling import ProfilingConfig
from megatron.training.run import Hook, Run, StepResult

TIMER_NAMES = {"F": "forward-compute", "B": "backward-compute", "W": "weight-grad-compute"}


class PipelineClockHook(Hook):
    """Gives the executor a clock where its times are wanted, and passes them on after the step."""

    def __init__(self, config: ProfilingConfig, timing_log_level: int) -> None:
        self.config = config
        self.times_all = timing_log_level >= 2
        self._file: TextIO | None = None

    def on_train_start(self, run: Run) -> None:
        """Open the stage's file. Raises ConfigError where it cannot be written."""
        groups = run.groups
        if self.config.pipeline_trace_dir is None or groups.tp.rank() or groups.dp_cp.rank():
            return
        path = Path(self.config.pipeline_trace_dir) / f"stage-{groups.pp.rank()}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--pipeline-trace-dir {path.parent} cannot be written ({error.strerror}); give a writable directory"
            ) from error
        pipeline = run.executor.pipeline
        self._write(
            schedule=pipeline.schedule,
            stages=pipeline.shape.stages,
            chunks=pipeline.shape.chunks,
            folded=pipeline.shape.folded,
            group_size=pipeline.group_size,
        )

    def on_step_start(self, run: Run) -> None:
        """Start a clock."""
        if self.times_all or self._is_traced(run.progress.iteration):
            run.executor.clock = ActionClock()

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Read it."""
        if run.executor.clock is None:
            return
        times = run.executor.clock.read()
        run.executor.clock = None
        for action, start, end in times:
            run.timers(TIMER_NAMES[action.kind], 2).add(end - start)
        if self._file is not None and self._is_traced(run.progress.iteration - 1):
            self._write_iteration(run.progress.iteration, times)

    def on_close(self, run: Run) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _is_traced(self, iterations_done: int) -> bool:
        is_wanted = self.config.pipeline_trace_dir is not None
        return is_wanted and self.config.profile_step_start <= iterations_done < self.config.profile_step_end

    def _write_iteration(self, iteration: int, times: list[TimedAction]) -> None:
        for (kind, microbatch, chunk), start, end in times:
            self._write(
                iteration=iteration, kind=kind, microbatch=microbatch, chunk=chunk, start=round(start, 7),
                end=round(end, 7),
            )  # fmt: skip

    def _write(self, **row: object) -> None:
        assert self._file is not None
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
