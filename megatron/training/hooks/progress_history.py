# SPDX-License-Identifier: Apache-2.0
"""--log-progress: progress.txt in the --save directory, a line for each start and each checkpoint of all jobs.

Columns are separated by tabs: the moment, the number of GPUs (or processes on a CPU), what happened, the iteration,
throughput of this job and of all jobs with as many GPUs since the number last changed, floating-point operations and
tokens of the whole run so far. Time between jobs counts: the second throughput is what the run got out of the machine.
"""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from megatron.core.line_files import append_lines
from megatron.training.config.container import RunConfig
from megatron.training.run import Hook, HookContext, Phase, Progress, Run

FILE_NAME = "progress.txt"
# Local time without a zone.
_TIME_FORMAT = "%Y-%m-%d %H:%M:%S"


# Throughput is floating-point operations over wall time between two such points.
class JobStart(NamedTuple):
    """The moment (seconds since the epoch) and the operations so far when jobs with this many GPUs began."""

    seconds: float
    flops: float


class ProgressHistoryHook(Hook):
    """Appends to progress.txt on the first rank."""

    phase = Phase.WRITE

    def __init__(self, directory: str) -> None:
        self.path = Path(directory) / FILE_NAME
        self._started = JobStart(0.0, 0.0)

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> ProgressHistoryHook | None:
        """Return the hook for --log-progress with --save; None where either is missing."""
        save = config.checkpoint.save
        return cls(save) if config.logger.log_progress and save is not None else None

    def on_train_start(self, run: Run) -> None:
        """Append the line of a job that starts."""
        self._started = JobStart(time.time(), self._flops(run, run.progress))
        self._append(run, f"Starting job\tIteration: {run.progress.iteration}\tFloating-point operations: "
                          f"{self._started.flops:.6e}")  # fmt: skip

    def on_save(self, run: Run) -> None:
        """Append the line of a checkpoint, with the throughput until then."""
        if not run.is_first_rank:
            return
        saved = run.saved_progress or run.progress
        now = JobStart(time.time(), self._flops(run, saved))
        gpus = run.groups.world.size()
        job = _compute_teraflops(self._started, now, gpus)
        all_jobs = _compute_teraflops(
            find_first_start(self.path.read_text(encoding="utf-8"), gpus) or self._started, now, gpus
        )
        tokens = saved.consumed_train_samples * run.seq_length
        self._append(run, f"Saved checkpoint\tIteration: {saved.iteration}\t"
                          f"Job throughput: {job:.3g} TFLOP/s/GPU\tCumulative throughput: {all_jobs:.3g} TFLOP/s/GPU\t"
                          f"Floating-point operations: {now.flops:.6e}\t"
                          f"Tokens (in billions): {tokens / 1e9:.6g}")  # fmt: skip

    def _flops(self, run: Run, progress: Progress) -> float:
        return (run.flops_per_token or 0.0) * run.seq_length * progress.consumed_train_samples

    def _append(self, run: Run, text: str) -> None:
        if not run.is_first_rank:
            return
        moment = time.strftime(_TIME_FORMAT)
        append_lines(self.path, [f"{moment}\t# GPUs: {run.groups.world.size()}\t{text}"])


def find_first_start(text: str, gpus: int) -> JobStart | None:
    """The first start since the number of GPUs became what it is; None where no line says so."""
    found = None
    for line in text.splitlines():
        columns = line.split("\t")
        # The file is shared by all jobs of a run; lines of other programs are passed over.
        if len(columns) < 5 or columns[2] != "Starting job":
            continue
        # Another number of GPUs begins a new stretch: throughput per GPU is comparable within one only.
        if columns[1] != f"# GPUs: {gpus}":
            found = None
        elif found is None:
            moment = datetime.strptime(columns[0], _TIME_FORMAT).timestamp()
            found = JobStart(moment, float(columns[4].partition(": ")[2]))
    return found


def _compute_teraflops(start: JobStart, now: JobStart, gpus: int) -> float:
    return (now.flops - start.flops) / max(now.seconds - start.seconds, 1e-3) / gpus / 1e12
