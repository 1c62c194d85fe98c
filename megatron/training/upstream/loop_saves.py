# SPDX-License-Identifier: Apache-2.0
"""Saves of a user's loop: where they are stored, who may write there, and the one that is under way."""

from __future__ import annotations

import atexit
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.async_save import AsyncSaver, SaveResult
from megatron.core.dist_checkpointing.directory import list_superseded, remove_checkpoint
from megatron.core.dist_checkpointing.writer_process import WriterProcess
from megatron.core.errors import ConfigError, StorageError, report_error, say
from megatron.core.process_groups_config import Group
from megatron.training.checkpoint.save import save_checkpoint
from megatron.training.checkpoint.save_directories import find_non_persistent_directory, prepare_save
from megatron.training.config.checkpoint import CheckpointConfig

_PATIENCE_SECONDS = 60.0
"""Seconds that the end of a program waits for ranks that may be gone."""


class LoopSaves:
    """Holds --save from the first save to the end of the process: a user's loop does not say when it is over."""

    def __init__(self, settings: CheckpointConfig, world: Group) -> None:
        """Every rank calls this. Raises ConfigError where settings do not say where to save, and what prepare_save
        raises."""
        if settings.save is None:
            raise ConfigError("save_checkpoint() saves to args.save, which is None; set it, or give --save")
        self.settings, self._world = settings, world
        self.locks = prepare_save(settings, world)
        self._saver: AsyncSaver | None = None
        self._is_non_persistent = False
        """True if the save under way is non-persistent: only the newest of these is kept."""
        if settings.async_save:
            process = None
            if settings.use_persistent_ckpt_worker:
                process = WriterProcess(settings.async_ckpt_cpu_priority, settings.async_ckpt_io_priority)
            self._saver = AsyncSaver(process)
            # A save under way at the end of the program is finished.
            atexit.register(self._end)

    def save(self, run: Any, *, non_persistent: bool) -> Path | None:
        """Save; returns the directory, or None where saving goes on in the background. Raises StorageError."""
        root = None
        if non_persistent:
            if not self.settings.saves_non_persistent:
                raise ConfigError("non_persistent_ckpt=True needs --non-persistent-save-interval and its type")
            root = find_non_persistent_directory(self.settings, str(self.settings.save))
        self.finish(blocking=True)
        # Local ones remove those before themselves.
        self._is_non_persistent = non_persistent and not self.settings.saves_locally
        path = save_checkpoint(run, self._saver, non_persistent_root=root)
        if path is not None:
            self._remove_superseded(path, run.progress.iteration)
        return path

    def finish(self, *, blocking: bool, terminate: bool = False) -> None:
        """Take note of the save under way if it has come to its end, or wait for it. A failure is told, and costs no
        more than that checkpoint. terminate: the saver is not needed any more."""
        if self._saver is None:
            return
        self._note(self._saver.wait() if blocking or terminate else self._saver.poll())
        if terminate:
            self._saver.close()

    def leave(self) -> None:
        """Finish the save under way, and let others have --save."""
        self.finish(blocking=True, terminate=True)
        for lock in self.locks:
            lock.release()

    def _end(self) -> None:
        if self._saver is not None:
            self._note(self._saver.wait(_PATIENCE_SECONDS))
            self._saver.close()

    def _note(self, outcome: SaveResult | None) -> None:
        if outcome is None:
            return
        is_first = self._world.rank() == 0
        try:
            path = outcome.check()
        except StorageError as error:
            if is_first:
                report_error(StorageError(f"iteration {outcome.iteration} was not saved: {error}"))
            return
        if is_first:
            say(f"checkpoint: saved {path} in {outcome.elapsed_seconds:.2f} s, "
                f"training waited {outcome.stalled_seconds:.2f} s")  # fmt: skip
        self._remove_superseded(path, outcome.iteration)

    def _remove_superseded(self, path: Path, iteration: int) -> None:
        if self._is_non_persistent and self._world.rank() == 0:
            for number in list_superseded(path.parent, iteration, 1):
                try:
                    remove_checkpoint(path.parent, number)
                except StorageError as error:
                    report_error(StorageError(f"iteration {number} was not removed: {error}"))
