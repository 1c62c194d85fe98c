"""When checkpoints are saved: every --save-interval iterations, and at the end of the run."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path

from megatron.core.dist_checkpointing.agreement import on_every_rank
from megatron.core.dist_checkpointing.async_save import AsyncSaver, Outcome
from megatron.core.dist_checkpointing.directory import list_superseded, remove_checkpoint, saved_iterations
from megatron.core.dist_checkpointing.writer_process import WriterProcess
from megatron.core.errors import StorageError, report_error, say
from megatron.training.checkpoint.save_and_load import save_checkpoint
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.container import RunConfig
from megatron.training.run import Hook, HookContext, Phase, Progress, Run, StepResult

_PATIENCE_SECONDS = 60.0
"""How long a run that ends with an error waits for ranks that may be gone, so that its last save comes to an end."""


class CheckpointHook(Hook):
    """Saves, and lets training go on when the disk does not take a checkpoint; at the end that is an error after
    all."""

    phase = Phase.SAVE

    def __init__(self, settings: CheckpointConfig) -> None:
        assert settings.save is not None
        self.settings = settings
        self._root = Path(settings.save)
        self.interval = settings.save_interval
        self._saved_iteration = 0
        self._foreign: set[int] = set()
        """Iterations that --save held before, where this run does not continue from there."""
        self._saver: AsyncSaver | None = None
        """With --async-save, from on_train_start to on_close."""
        self._snapshot_of = Progress(0)
        """How far the run was when the save under way began."""

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> CheckpointHook | None:
        """Return the hook for --save; None where it is not asked for."""
        return None if config.checkpoint.save is None else cls(config.checkpoint)

    def on_train_start(self, run: Run) -> None:
        """Note what --load has restored: it need not be saved again."""
        self._saved_iteration = run.progress.iteration
        settings = self.settings
        if settings.load is None or Path(settings.load).resolve() != self._root.resolve():
            self._foreign = {run.progress.iteration, *saved_iterations(self._root)}
        if not settings.async_save:
            return
        process = None
        if settings.use_persistent_ckpt_worker:
            process = WriterProcess(settings.async_ckpt_cpu_priority, settings.async_ckpt_io_priority)
        self._saver = AsyncSaver(process)
        if self.interval is not None and not run.progress.finished:
            # What hinders it is reported with the first checkpoint.
            with contextlib.suppress(StorageError):
                self._saver.prepare()

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Save every --save-interval iterations; where the disk refuses, print the error and go on."""
        if self._saver is not None:
            self._settle(run, self._saver.poll())
        if self.interval is not None and run.progress.iteration % self.interval == 0:
            try:
                self._save(run)
            except StorageError as error:
                _report_unsaved(run, run.progress.iteration, error)

    def on_train_end(self, run: Run) -> None:
        """Save the last iteration, unless it has been. Raises StorageError when that fails."""
        self._settle(run, self._await_together(run))
        if self._saved_iteration == run.progress.iteration:
            return
        self._save(run)
        if (outcome := self._await_together(run)) is not None:
            self._note_saved(run, outcome.check(), outcome)

    def on_close(self, run: Run) -> None:
        """Finish the save under way, and let another run have --save."""
        try:
            if self._saver is not None:
                self._settle(run, self._saver.wait(_PATIENCE_SECONDS))
                self._saver.close()
        finally:
            if run.save_lock is not None:
                run.save_lock.release()

    def _save(self, run: Run) -> None:
        """Save, or begin to where training need not wait. Raises StorageError."""
        run.read_metrics()  # a step that has failed is found out before its weights are saved
        if self._saver is not None:
            self._settle(run, self._saver.wait())
        self._snapshot_of = dataclasses.replace(run.progress)
        started_at = time.monotonic()
        path = save_checkpoint(run, self._saver)
        if path is not None:
            elapsed = time.monotonic() - started_at
            self._note_saved(run, path, Outcome(run.progress.iteration, path, None, elapsed, elapsed))

    def _await_together(self, run: Run) -> Outcome | None:
        """Wait for the save under way on all ranks at the same moment."""
        if self._saver is None:
            return None
        outcome = self._saver.wait()
        # The store that tells the outcome may go with the first rank, which leaves only when all have heard it.
        on_every_rank(run.groups.world, lambda: None)
        return outcome

    def _settle(self, run: Run, outcome: Outcome | None) -> None:
        """Take note of how a save ended that training did not wait for."""
        if outcome is None:
            return
        try:
            self._note_saved(run, outcome.check(), outcome)
        except StorageError as error:
            _report_unsaved(run, outcome.iteration, error)

    def _note_saved(self, run: Run, path: Path, outcome: Outcome) -> None:
        # The previous checkpoint goes only when this one is complete.
        before, self._saved_iteration = self._saved_iteration, outcome.iteration
        run.saved_progress = self._snapshot_of
        if run.is_first_rank:
            stall = f", training waited {outcome.stalled_seconds:.2f} s" if self._saver is not None else ""
            say(f"checkpoint: saved {path} in {outcome.elapsed_seconds:.2f} s{stall}")
        run.hooks.on_save(run)
        # An iteration that was here before is replaced by now.
        self._foreign.discard(outcome.iteration)
        self._remove(run, outcome.iteration, before)

    def _remove(self, run: Run, newest: int, before: int) -> None:
        """With --save-retain-interval or --keep-last, the checkpoints that need not stay now that there is a newest."""
        if run.is_first_rank:
            for iteration in self._list_removable(newest, before):
                try:
                    remove_checkpoint(self._root, iteration)
                except StorageError as error:
                    report_error(StorageError(f"iteration {iteration} was not removed: {error}; training goes on"))

    def _list_removable(self, newest: int, before: int) -> list[int]:
        retain, keep_last = self.settings.save_retain_interval, self.settings.keep_last
        if keep_last is not None:
            found = list_superseded(self._root, newest, keep_last)
        else:
            found = [] if retain is None else [before]
        # What another run has saved, and the checkpoint that was loaded from elsewhere, are not ours to remove.
        ours = [iteration for iteration in found if iteration not in self._foreign]
        return [iteration for iteration in ours if retain is None or iteration % retain]


def _report_unsaved(run: Run, iteration: int, error: StorageError) -> None:
    if run.is_first_rank:
        report_error(StorageError(f"iteration {iteration} was not saved: {error}; training goes on"))
