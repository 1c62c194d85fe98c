# SPDX-License-Identifier: Apache-2.0
"""Directories of a run's checkpoints: the directories are made, locked and tidied before training begins."""

from __future__ import annotations

import os
import re
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path

from megatron.core.dist_checkpointing import non_persistent
from megatron.core.dist_checkpointing.agreement import on_first_rank, with_everyone
from megatron.core.dist_checkpointing.directory import (
    list_complete,
    make_save_directory,
    refuse_unwritable,
    settle_leftovers,
)
from megatron.core.dist_checkpointing.directory_lock import DirectoryLock
from megatron.core.dist_checkpointing.local_checkpoints import find_rank_directory
from megatron.core.errors import ConfigError, say
from megatron.core.process_groups_config import Group
from megatron.core.upstream_checkpoints.common_state import find_upstream_checkpoint
from megatron.core.upstream_checkpoints.rank_file import find_legacy_file
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.container import RunConfig
from megatron.training.run import Progress


def find_non_persistent_directory(settings: CheckpointConfig, root: str) -> Path:
    """Return where the checkpoints go of which only the newest stays, for --save `root`."""
    return find_local_directory(settings, root) if settings.saves_locally else find_global_directory(settings, root)


def find_global_directory(settings: CheckpointConfig, root: str) -> Path:
    """Return where those lie that all ranks share, for --save or --load `root`."""
    given = settings.non_persistent_global_ckpt_dir
    return Path(root) / non_persistent.DIRECTORY_NAME if given is None else Path(given)


def find_local_directory(settings: CheckpointConfig, root: str) -> Path:
    """Return where those lie that each rank has on its node, for --save or --load `root`; one for each --save, because
    runs share a node's disk."""
    assert settings.local_ckpt_dir is not None
    real = os.path.realpath(root)
    name = f"{os.path.basename(real)}-{zlib.crc32(os.fsencode(real)):08x}"
    return Path(settings.local_ckpt_dir) / name


def list_non_persistent_directories(settings: CheckpointConfig, root: str) -> set[Path]:
    """Return where such checkpoints of --load `root` may lie."""
    is_local = settings.local_ckpt_dir is not None
    return {find_global_directory(settings, root), *([find_local_directory(settings, root)] if is_local else [])}


def prepare_save(settings: CheckpointConfig, world: Group) -> list[DirectoryLock]:
    """Before training: can checkpoints be saved? Also finishes or removes what a crash left in their directories.

    Returns the locks of these directories on the first rank, and on every rank the lock of its directory of local
    checkpoints; none without --save. Raises on every rank ConfigError when one is a file, cannot be made or cannot be
    written to, TemporaryError when another run has it.
    """
    if settings.save is None:
        return []
    root = Path(settings.save)
    locks: list[DirectoryLock] = []
    saves_globally = settings.saves_non_persistent and not settings.saves_locally

    def take(directory: Path, flag: str) -> list[str]:
        make_save_directory(directory, flag)
        with refuse_unwritable(directory, flag):
            locks.append(DirectoryLock(directory, lambda sentence: say_once(world, sentence), flag=flag))
            # Only now: before, what looks like a leftover may be the save of a run that goes on.
            return [f"{directory}: {done}" for done in settle_leftovers(directory)]

    def prepare() -> list[str]:
        if settings.ckpt_convert_save is not None:
            make_save_directory(Path(settings.ckpt_convert_save), "--ckpt-convert-save")
        done = take(root, "--save" if settings.ckpt_convert_save is None else "--ckpt-convert-save")
        own = find_global_directory(settings, str(root))
        if settings.non_persistent_global_ckpt_dir is None:
            # It belongs to the run that has --save. An earlier run may have left something in it.
            with refuse_unwritable(own):
                if saves_globally:
                    own.mkdir(exist_ok=True)
                return done + ([f"{own}: {what}" for what in settle_leftovers(own)] if own.is_dir() else [])
        return done + (take(own, "--non-persistent-global-ckpt-dir") if saves_globally else [])

    def prepare_local() -> list[str]:
        own = find_rank_directory(find_local_directory(settings, str(root)), world.rank())
        given = settings.non_persistent_local_ckpt_dir
        flag = "--non-persistent-ckpt-type in_memory" if given is None else "--non-persistent-local-ckpt-dir"
        # Only what is below the directory that was named is ours to make.
        for directory in (own.parent.parent, own.parent):
            make_save_directory(directory, flag)
        return take(own, flag)

    try:
        for done in on_first_rank(world, prepare):
            say_once(world, done)
        if settings.saves_locally:
            with_everyone(world, prepare_local)
    except BaseException:
        for lock in locks:
            lock.release()
        raise
    return locks


def find_lock(locks: Iterable[DirectoryLock], directory: Path) -> DirectoryLock | None:
    """The lock among these that a directory is under; None without one."""
    return next((lock for lock in locks if lock.covers(directory)), None)


def refuse_to_undo(config: RunConfig, world: Group, progress: Progress) -> None:
    """Raise ConfigError on every rank where a run that begins with iteration 1 would save before, or in the place of, a
    complete checkpoint in --save, so that the newest weights look lost."""
    settings = config.checkpoint
    will_save = not (progress.finished or config.validation.skip_train or settings.ckpt_convert_format)
    if settings.save is None or settings.start_over or not will_save or progress.iteration > 0:
        return
    root = Path(settings.save)
    newest = on_first_rank(world, lambda: find_newest_complete(root))
    if newest:
        raise ConfigError(
            f"--save {root} holds iteration {newest}, which this run, beginning with iteration 1, would undo or save "
            f"anew; give --load {root} without --finetune to go on from there, another directory, or --start-over, "
            "which keeps what is there"
        )


def find_newest_complete(root: Path) -> int | None:
    """The newest iteration of which a directory has a complete checkpoint, of ours or of upstream's; None without."""
    upstreams = find_upstream_checkpoint(root)
    file = find_legacy_file(root)
    paths = [path for path in (upstreams, None if file is None else file.parent.parent) if path is not None]
    named = [int(match[1]) for path in paths if (match := re.fullmatch("iter_([0-9]+)", path.name))]
    return max([*list_complete(root)[:1], *named], default=None)


def say_once(world: Group, sentence: str) -> None:
    """On the first rank: a line on checkpoints."""
    if world.rank() == 0:
        say(f"checkpoint: {sentence}")


def warn_once(world: Group, sentence: str) -> None:
    """The same as a warning."""
    if world.rank() == 0:
        say(f"warning: {sentence}", sys.stderr)
