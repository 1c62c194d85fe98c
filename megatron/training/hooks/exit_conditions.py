"""--exit-interval, --exit-duration-in-mins and --exit-signal-handler: stop early, in order.

CheckpointHook saves at the end.
"""

from __future__ import annotations

import signal
import time
from typing import Any

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


class ExitSignalHook(Hook):
    """Asks for a stop after the iteration in which any rank has got the signal."""

    def __init__(self, name: str) -> None:
        self.signal = signal.Signals[name]
        self._previous: Any = None
        self._received = False

    def on_train_start(self, run: Run) -> None:
        """From here on the signal is noted instead of ending the process."""
        self._previous = signal.signal(self.signal, self._note)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Ask all ranks."""
        received = torch.tensor(float(self._received), device=run.device)
        all_reduce(received, run.groups.world, op="max")
        if received.item():
            run.request_stop(f"exiting program after signal {self.signal.name}")

    def on_close(self, run: Run) -> None:
        """Let the signal do what it did before."""
        if self._previous is not None:
            signal.signal(self.signal, self._previous)
            self._previous = None

    def _note(self, number: int, frame: Any) -> None:
        self._received = True
