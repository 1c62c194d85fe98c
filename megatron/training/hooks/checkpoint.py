"""When checkpoints are saved: every --save-interval iterations, and at the end of the run."""

from __future__ import annotations

import time
from pathlib import Path

from megatron.core.dist_checkpointing.directory import remove_checkpoint
from megatron.core.errors import StorageError, report_error, say
from megatron.training.checkpoint.save_and_load import save_checkpoint
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.container import RunConfig
from megatron.training.run import Hook, HookContext, Phase, Run, StepResult


class CheckpointHook(Hook):
    """Saves, and lets training go on when the disk does not take a checkpoint; at the end that is an error after
    all."""

    phase = Phase.SAVE

    def __init__(self, settings: CheckpointConfig) -> None:
        self.settings = settings
        self.interval = settings.save_interval
        self._saved_iteration = 0
        self._is_removable = False
        """Whether the last checkpoint lies in --save: saved by this run, or continued from there."""

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> CheckpointHook | None:
        """Return the hook for --save; None where it is not asked for."""
        return None if config.checkpoint.save is None else cls(config.checkpoint)

    def on_train_start(self, run: Run) -> None:
        """Note what --load has restored: it need not be saved again."""
        self._saved_iteration = run.progress.iteration
        save, load = self.settings.save, self.settings.load
        self._is_removable = save is not None and load is not None and Path(save).resolve() == Path(load).resolve()

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Save every --save-interval iterations; where the disk refuses, print the error and go on."""
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

    def on_close(self, run: Run) -> None:
        """Let another run have --save."""
        if run.save_lock is not None:
            run.save_lock.release()

    def _save(self, run: Run) -> None:
        run.read_metrics()  # a step that has failed is found out before its weights are saved
        started_at = time.monotonic()
        path = save_checkpoint(run)
        # The previous checkpoint goes only when this one is complete.
        before, self._saved_iteration = self._saved_iteration, run.progress.iteration
        if run.is_first_rank:
            say(f"checkpoint: saved {path} in {time.monotonic() - started_at:.2f} s")
        run.hooks.on_save(run)
        self._remove(run, before)
        self._is_removable = True

    def _remove(self, run: Run, iteration: int) -> None:
        """With --save-retain-interval, the checkpoint before this one, unless it is to stay."""
        kept = self.settings.save_retain_interval
        # A checkpoint that was loaded from elsewhere is not ours to remove.
        if kept is None or iteration % kept == 0 or not (self._is_removable and run.is_first_rank):
            return
        assert self.settings.save is not None
        try:
            remove_checkpoint(Path(self.settings.save), iteration)
        except StorageError as error:
            report_error(StorageError(f"iteration {iteration} was not removed: {error}; training goes on"))
