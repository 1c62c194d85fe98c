# SPDX-License-Identifier: Apache-2.0
"""Times at which checkpoints are saved, and the choice of those that stay: every --save-interval iterations and at the
end of the run, and in between every --non-persistent-save-interval."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from megatron.core.dist_checkpointing.agreement import on_every_rank, on_first_rank
from megatron.core.dist_checkpointing.async_save import AsyncSaver, SaveResult
from megatron.core.dist_checkpointing.directory import (
    latest_iteration,
    list_superseded,
    read_earlier,
    remove_checkpoint,
    saved_iterations,
    set_aside,
    write_earlier,
)
from megatron.core.dist_checkpointing.local_checkpoints import find_rank_directory, remove_others
from megatron.core.dist_checkpointing.writer_process import WriterProcess
from megatron.core.errors import StorageError, report_error, say
from megatron.training.checkpoint.save import save_checkpoint
from megatron.training.checkpoint.save_directories import (
    find_non_persistent_directory,
    list_non_persistent_directories,
    prepare_save,
)
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.container import RunConfig
from megatron.training.hooks.evaluation import is_evaluated
from megatron.training.rerun.emergency_save import (
    NoEmergencySaveError,
    gather_survivors,
    take_condition,
)
from megatron.training.rerun.replay import StepStart
from megatron.training.run import Hook, HookContext, Phase, Progress, Run, StepResult, StepWatch

_PATIENCE_SECONDS = 60.0
"""Seconds that a run that ends with an error waits for ranks that may be gone, so that its last save comes to an
end."""


class _Series:
    """The checkpoints of one directory: when they are saved, and which of them stay."""

    def __init__(self, root: Path, interval: int | None, *, retain: int | None = None, keep_last: int | None = None):
        self.root, self.interval = root, interval
        self._retain, self._keep_last = retain, keep_last
        self.saved_iteration = 0
        """The newest of this run."""
        self.is_ours = False
        """This run goes on from what the directory holds."""
        self._foreign: set[int] = set()
        """Iterations of other runs: what the directory held before a run that does not continue from there."""

    def begin(self, *, is_ours: bool, saved_iteration: int, loaded_iteration: int) -> None:
        """Before the first step. is_ours: this run goes on from what is in the directory."""
        self.saved_iteration, self.is_ours = saved_iteration, is_ours
        earlier = read_earlier(self.root)
        if not is_ours:
            self._foreign = {loaded_iteration, *saved_iterations(self.root)}
        elif loaded_iteration not in earlier:  # otherwise it goes on where the other run has stopped
            self._foreign = earlier

    def note_foreign(self) -> None:
        """Write down for runs that go on from here which iterations are not this run's. Raises StorageError."""
        write_earlier(self.root, self._foreign)

    def holds_foreign(self, iteration: int) -> bool:
        """Return True if the directory held this iteration before, and this run has not saved it."""
        return iteration in self._foreign

    def is_due(self, iteration: int) -> bool:
        """Return whether this iteration is to be saved here."""
        return self.interval is not None and iteration % self.interval == 0

    def note_saved(self, iteration: int) -> list[int]:
        """A checkpoint has become visible: the iterations that need not stay."""
        before, self.saved_iteration = self.saved_iteration, iteration
        # An iteration that was here before is replaced by now.
        self._foreign.discard(iteration)
        if self._keep_last is not None:
            found = list_superseded(self.root, iteration, self._keep_last, self._foreign)
        else:
            found = [] if self._retain is None else [before]
        # What another run has saved, and the checkpoint that was loaded from elsewhere, are not ours to remove.
        ours = [iteration for iteration in found if iteration not in self._foreign]
        return [iteration for iteration in ours if self._retain is None or iteration % self._retain]


class CheckpointHook(Hook):
    """Saves, and lets training go on when the disk does not take a checkpoint; at the end that is an error after
    all."""

    phase = Phase.SAVE

    def __init__(self, settings: CheckpointConfig, watch: StepWatch | None = None) -> None:
        """watch: is told of saves that training waits for."""
        assert settings.save is not None
        self._watch = watch
        self.settings = settings
        self._persistent = _Series(
            Path(settings.save),
            settings.save_interval,
            retain=settings.save_retain_interval,
            keep_last=settings.keep_last,
        )
        self._non_persistent: _Series | None = None
        if settings.saves_non_persistent:
            root = find_non_persistent_directory(settings, settings.save)
            # Each rank removes its part of the earlier local ones, when all ranks have saved.
            keep_last = None if settings.saves_locally else 1
            self._non_persistent = _Series(root, settings.non_persistent_save_interval, keep_last=keep_last)
        self._under_way = self._persistent
        """Of which series the save under way, or the last one, is."""
        self._saver: AsyncSaver | None = None
        """With --async-save, from on_train_start to on_close."""
        self._snapshot_of = Progress(0)
        """Progress of the run when the save under way began."""
        self._start: StepStart | None = None
        """Of the step under way; None between steps."""

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> CheckpointHook | None:
        """Return the hook for --save; None where it is not asked for."""
        return None if config.checkpoint.save is None else cls(config.checkpoint, context.watch)

    def on_train_start(self, run: Run) -> None:
        """Note what --load has restored: it need not be saved again."""
        settings, done = self.settings, run.progress.iteration
        is_ours = (
            done > 0 and settings.load is not None and Path(settings.load).resolve() == self._persistent.root.resolve()
        )
        others = list_non_persistent_directories(settings, settings.load or "")
        # A checkpoint that is only in temporary storage has yet to be saved.
        is_saved = run.loaded_from is None or not others.intersection(run.loaded_from.parents)
        saved = done if is_saved or not is_ours else latest_iteration(self._persistent.root) or 0
        self._persistent.begin(is_ours=is_ours, saved_iteration=saved, loaded_iteration=done)
        if self._non_persistent is not None:
            self._non_persistent.begin(is_ours=is_ours, saved_iteration=0, loaded_iteration=done)
        if not settings.async_save:
            return
        process = None
        if settings.use_persistent_ckpt_worker:
            process = WriterProcess(settings.async_ckpt_cpu_priority, settings.async_ckpt_io_priority)
        self._saver = AsyncSaver(process, run.list_ended_ranks)
        if (self._persistent.interval or self._non_persistent) and not run.progress.finished:
            # What hinders it is reported with the first checkpoint.
            with contextlib.suppress(StorageError):
                self._saver.prepare()

    def on_step_start(self, run: Run) -> None:
        """Note what an emergency save goes back to."""
        self._start = StepStart.take(run)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Save every --save-interval iterations; where the disk refuses, print the error and go on."""
        self._start = None
        if self._saver is not None:
            self._settle(run, self._saver.poll())
        series = self._persistent
        if not series.is_due(run.progress.iteration):
            # The end of a run is saved for good at once.
            is_last = run.progress.finished or run.stop_reason is not None
            if self._non_persistent is None or is_last or not self._non_persistent.is_due(run.progress.iteration):
                return
            series = self._non_persistent
        try:
            self._save(run, series)
        except StorageError as error:
            _report_unsaved(run, run.progress.iteration, error)

    def on_train_end(self, run: Run) -> None:
        """Save the last iteration, unless it has been. Raises StorageError when that fails."""
        self._settle(run, self._await_together(run))
        if self._persistent.saved_iteration != run.progress.iteration:
            self._save(run, self._persistent)
            if (outcome := self._await_together(run)) is not None:
                self._note_saved(run, outcome.check(), outcome)
        if self._non_persistent is not None and self.settings.non_persistent_ckpt_type == "in_memory":
            # All is saved for good: they only take memory.
            try:
                remove_others(find_rank_directory(self._non_persistent.root, run.groups.world.rank()), ())
            except StorageError as error:
                report_error(StorageError(f"{error}; the run is complete, and they take memory until they are removed"))

    def on_error(self, run: Run, error: Exception) -> None:
        """Save the last iteration that was completed, if the ranks that are left hold all of it and all of it is good;
        say so, or why not. Every rank that is left comes here: its peers' connections end with this one's."""
        with _deaf_to_loaders(run):
            self._save_what_is_left(run, error)

    def _save_what_is_left(self, run: Run, error: Exception) -> None:
        run.leave_groups()
        if self._saver is not None:
            self._settle(run, self._saver.wait(_PATIENCE_SECONDS))
        evaluates = is_evaluated(run.config.validation, run.progress.iteration)
        own = take_condition(run, error, self._start, evaluates=evaluates)
        try:
            world, ranks = gather_survivors(run, own)
        except NoEmergencySaveError as reason:
            if run.groups.world.rank() == reason.speaker:
                say(f"note: iteration {own.iteration} was not saved in an emergency save: {reason}", sys.stderr)
            return
        lost = run.groups.world.size() - world.size()
        # Of the ranks that are left; the groups of the others are closed.
        run.groups = dataclasses.replace(run.groups, world=world)
        if run.progress.iteration == self._persistent.saved_iteration:
            return
        if not on_every_rank(world, lambda: bool(run.save_locks))[0]:
            # The lock was the first rank's, which is lost.
            run.save_locks = prepare_save(self.settings, world)
        self._snapshot_of, self._under_way = dataclasses.replace(run.progress), self._persistent
        began_at = time.monotonic()
        if run.is_first_rank:
            of_whom = f" of {world.size()} ranks, {lost} of {lost + world.size()} being lost" if lost else ""
            say(f"note: iteration {own.iteration} is saved in an emergency save{of_whom}", sys.stderr)
        path = save_checkpoint(run, ranks=ranks)
        assert path is not None, "without a saver a save is complete"
        elapsed = time.monotonic() - began_at
        self._note_saved(run, path, SaveResult(own.iteration, path, None, elapsed, elapsed))

    def on_close(self, run: Run) -> None:
        """Finish the save under way, and let another run have --save."""
        try:
            if self._saver is not None:
                self._settle(run, self._saver.wait(_PATIENCE_SECONDS))
                self._saver.close()
        finally:
            for lock in run.save_locks:
                lock.release()

    def _save(self, run: Run, series: _Series) -> None:
        """Save, or begin to where training need not wait. Raises StorageError."""
        run.read_metrics()  # a step that has failed is found out before its weights are saved
        if self._saver is not None:
            self._settle(run, self._saver.wait())
        self._snapshot_of, self._under_way = dataclasses.replace(run.progress), series
        keeps_all = self.settings.start_over or series.is_ours
        if series is self._persistent and keeps_all and series.holds_foreign(run.progress.iteration):
            iteration = run.progress.iteration
            kept = on_first_rank(run.groups.world, lambda: set_aside(series.root, iteration))
            if kept is not None and run.is_first_rank:
                say(f"checkpoint: iteration {iteration} of an earlier run stays as {kept}")
        self._note_foreign(run)
        started_at = time.monotonic()
        with contextlib.nullcontext() if self._watch is None else self._watch.saving():
            path = save_checkpoint(
                run, self._saver, non_persistent_root=None if series is self._persistent else series.root
            )
        if path is not None:
            elapsed = time.monotonic() - started_at
            self._note_saved(run, path, SaveResult(run.progress.iteration, path, None, elapsed, elapsed))

    def _note_foreign(self, run: Run) -> None:
        """Before a save, which moves the tracker, and after it, when what was replaced is this run's."""
        if run.is_first_rank:
            try:
                self._under_way.note_foreign()
            except StorageError as error:
                report_error(StorageError(f"{error}; training goes on"))

    def _await_together(self, run: Run) -> SaveResult | None:
        """Wait for the save under way on all ranks at the same moment."""
        if self._saver is None:
            return None
        outcome = self._saver.wait()
        # The store that tells the outcome may go with the first rank, which leaves only when all have heard it.
        on_every_rank(run.groups.world, lambda: None)
        return outcome

    def _settle(self, run: Run, outcome: SaveResult | None) -> None:
        """Take note of how a save ended that training did not wait for."""
        if outcome is None:
            return
        try:
            self._note_saved(run, outcome.check(), outcome)
        except StorageError as error:
            _report_unsaved(run, outcome.iteration, error)

    def _note_saved(self, run: Run, path: Path, outcome: SaveResult) -> None:
        run.saved_progress = self._snapshot_of
        if run.is_first_rank:
            stall = f", training waited {outcome.stalled_seconds:.2f} s" if self._saver is not None else ""
            say(f"checkpoint: saved {path} in {outcome.elapsed_seconds:.2f} s{stall}")
        run.hooks.on_save(run)
        # The previous checkpoint goes only when this one is complete.
        superfluous = self._under_way.note_saved(outcome.iteration)
        self._note_foreign(run)
        for iteration in superfluous if run.is_first_rank else ():
            try:
                remove_checkpoint(self._under_way.root, iteration)
            except StorageError as error:
                report_error(StorageError(f"iteration {iteration} was not removed: {error}; training goes on"))


def _report_unsaved(run: Run, iteration: int, error: StorageError) -> None:
    if run.is_first_rank:
        report_error(StorageError(f"iteration {iteration} was not saved: {error}; training goes on"))


@contextlib.contextmanager
def _deaf_to_loaders(run: Run) -> Iterator[None]:
    """Keep the end of data loader processes, which torchrun's SIGTERM is for, too, from being an error of whatever
    their rank is doing then; torch makes it one in the main thread's handler of SIGCHLD."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
        # Nobody needs them any more, and torch forgets those that have been closed.
        run.data.close()
    finally:
        signal.signal(signal.SIGCHLD, usual or signal.SIG_DFL)
