"""When checkpoints are saved: every --save-interval iterations, and at the end of the run."""

from __future__ import annotations

import time

from megatron.core.errors import StorageError, report_error
from megatron.training.checkpointing import save_checkpoint
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.run import Hook, Run, StepResult


class CheckpointHook(Hook):
    """Saves, and lets training go on when the disk does not take a checkpoint; at the end that is an error after
    all."""

    def __init__(self, settings: CheckpointConfig) -> None:
        self.interval = settings.save_interval
        self._saved_iteration = 0

    def on_train_start(self, run: Run) -> None:
        """What was loaded need not be saved again."""
        self._saved_iteration = run.progress.iteration

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Save at the interval."""
        if self.interval is not None and run.progress.iteration % self.interval == 0:
            try:
                self._save(run)
            except StorageError as error:
                if run.is_first_rank:
                    report_error(
                        StorageError(f"iteration {run.progress.iteration} was not saved: {error}; training goes on")
                    )

    def on_train_end(self, run: Run) -> None:
        """Save the last iteration, unless it has been. Raises StorageError when that fails."""
        if self._saved_iteration != run.progress.iteration:
            self._save(run)

    def _save(self, run: Run) -> None:
        started_at = time.monotonic()
        path = save_checkpoint(run)
        self._saved_iteration = run.progress.iteration
        if run.is_first_rank:
            print(f"checkpoint: saved {path} in {time.monotonic() - started_at:.2f} s", flush=True)
        run.hooks.on_save(run)
