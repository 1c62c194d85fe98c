"""--exit-interval and --exit-duration-in-mins: stop early, in order, after saving (CheckpointHook saves at the end)."""

from __future__ import annotations

import time

import torch

from megatron.core.collectives import all_reduce
from megatron.training.config.training import TrainingConfig
from megatron.training.run import Hook, Run, StepResult


class ExitConditionsHook(Hook):
    """Asks for a stop when an iteration or a duration is reached."""

    def __init__(self, config: TrainingConfig, clock_started_at: float) -> None:
        """clock_started_at: time.monotonic() when the program started; setup counts as well."""
        self.interval = config.exit_interval
        self.longest_seconds = None if config.exit_duration_in_mins is None else 60.0 * config.exit_duration_in_mins
        self._started_at = clock_started_at

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Compare; clocks differ between ranks, so the duration is decided together."""
        if self.longest_seconds is not None:
            elapsed = torch.tensor(time.monotonic() - self._started_at, device=run.device)
            all_reduce(elapsed, run.groups.world, op="max")
            if float(elapsed) > self.longest_seconds:
                run.request_stop(f"exiting program after {float(elapsed) / 60:.1f} minutes")
        if self.interval is not None and run.progress.iteration % self.interval == 0:
            run.request_stop(f"exiting program at iteration {run.progress.iteration}")
