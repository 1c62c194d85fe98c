# SPDX-License-Identifier: Apache-2.0
"""Where a run's checkpoints go: the directories are made, locked and tidied before training begins."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron.core.dist_checkpointing import non_persistent
from megatron.core.dist_checkpointing.agreement import on_first_rank
from megatron.core.dist_checkpointing.directory import make_save_directory, refuse_unwritable, settle_leftovers
from megatron.core.dist_checkpointing.directory_lock import DirectoryLock
from megatron.core.errors import say
from megatron.core.process_groups_config import Group
from megatron.training.config.checkpoint import CheckpointConfig


def find_non_persistent_directory(settings: CheckpointConfig, root: str) -> Path:
    """Where the checkpoints lie of which only the newest stays, for --save or --load `root`."""
    given = settings.non_persistent_global_ckpt_dir
    return Path(root) / non_persistent.DIRECTORY_NAME if given is None else Path(given)


def prepare_save(settings: CheckpointConfig, world: Group) -> list[DirectoryLock]:
    """Before training: can checkpoints be saved? Also finishes or removes what a crash left in their directories.

    Returns the locks of these directories on the first rank, none on the others and without --save. Raises on every
    rank ConfigError when one is a file, cannot be made or cannot be written to, TemporaryError when another run has it.
    """
    if settings.save is None:
        return []
    root = Path(settings.save)
    locks: list[DirectoryLock] = []

    def take(directory: Path, flag: str) -> list[str]:
        make_save_directory(directory, flag)
        with refuse_unwritable(directory, flag):
            locks.append(DirectoryLock(directory, lambda sentence: say_once(world, sentence)))
            # Only now: before, what looks like a leftover may be the save of a run that goes on.
            return [f"{directory}: {done}" for done in settle_leftovers(directory)]

    def prepare() -> list[str]:
        if settings.ckpt_convert_save is not None:
            make_save_directory(Path(settings.ckpt_convert_save))
        done = take(root, "--save")
        own = find_non_persistent_directory(settings, str(root))
        if settings.non_persistent_global_ckpt_dir is None:
            # It belongs to whoever has --save. An earlier run may have left something in it.
            with refuse_unwritable(own):
                if settings.saves_non_persistent:
                    own.mkdir(exist_ok=True)
                return done + ([f"{own}: {what}" for what in settle_leftovers(own)] if own.is_dir() else [])
        return done + (take(own, "--non-persistent-global-ckpt-dir") if settings.saves_non_persistent else [])

    try:
        for done in on_first_rank(world, prepare):
            say_once(world, done)
    except BaseException:
        for lock in locks:
            lock.release()
        raise
    return locks


def say_once(world: Group, sentence: str) -> None:
    """On the first rank: a line on checkpoints."""
    if world.rank() == 0:
        say(f"checkpoint: {sentence}")


def warn_once(world: Group, sentence: str) -> None:
    """The same as a warning."""
    if world.rank() == 0:
        say(f"warning: {sentence}", sys.stderr)
