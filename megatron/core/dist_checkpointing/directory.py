# SPDX-License-Identifier: Apache-2.0
"""A directory of checkpoints, and how a save becomes visible only when it is complete.

    root/
      latest_checkpointed_iteration.txt            tracker: "20"; a hint, not the truth
      iter_0000010/  iter_0000020/                 complete checkpoints, each with a manifest
      iter_0000030.tmp-1f3a9c07/                   a save under way, or left by a crash
      save-00000001.lock                           the run that writes here (directory_lock.py)

    save:  files, each flushed -> manifest -> flush directory -> tracker's next content
           -> rename to iter_0000030 -> flush root -> replace the tracker -> flush root

A crash between any two of these leaves the old state or the new one. Nothing is ever written into a directory that
has its final name. A saved iteration that exists already (a run that went back and came here again) is moved aside
for the rename.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import sys
import uuid
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

from megatron.core.dist_checkpointing.crash_points import reach
from megatron.core.dist_checkpointing.durable import read_file, replace_file, storage_errors, sync_directory, write_file
from megatron.core.dist_checkpointing.manifest import (
    MANIFEST_NAME,
    Manifest,
    check_lengths,
    read_manifest,
)
from megatron.core.errors import CheckpointError, ConfigError, say
from megatron.core.paths import explain_unmakeable_directory

TRACKER_NAME = "latest_checkpointed_iteration.txt"
COMMON_NAME = "common.pt"
"""In a checkpoint of upstream's torch_dist: settings and progress, which its newest releases keep with the tensors."""
_EARLIER_NAME = "earlier_iterations.txt"

ITERATION = re.compile(r"iter_([0-9]{7,12})")
"""Name of a checkpoint's directory."""
# Names that only an interrupted save leaves behind; anything else in the directory is not ours to remove.
_LEFTOVER = re.compile(r"(iter_[0-9]{7,12})\.(tmp|old)-[0-9a-f]{8}")
_TRACKER_LEFTOVER = re.compile(re.escape(TRACKER_NAME) + r"\.tmp-[0-9a-f]{8}")


def iteration_directory(root: Path, iteration: int) -> Path:
    """Return the path of the checkpoint of an iteration."""
    return root / f"iter_{iteration:07d}"


def saved_iterations(root: Path) -> list[int]:
    """Iterations that have a directory, newest first; whether they are complete is not looked at."""
    if not root.is_dir():
        return []
    matches = (ITERATION.fullmatch(entry.name) for entry in root.iterdir() if entry.is_dir())
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def latest_iteration(root: Path) -> int | None:
    """The iteration that the tracker names where it has a directory, else the newest that has; None without any."""
    saved = saved_iterations(root)
    tracked = read_tracker(root / TRACKER_NAME)
    return tracked if tracked in saved else next(iter(saved), None)


def find_directory(root: Path, iteration: int | None = None) -> Path | None:
    """The directory of an iteration, by default of latest_iteration(); None where it does not exist."""
    wanted = latest_iteration(root) if iteration is None else iteration
    if wanted is None:
        return None
    path = iteration_directory(root, wanted)
    return path if path.is_dir() else None


def read_earlier(root: Path) -> set[int]:
    """Iterations that were in `root` when the run began whose checkpoints the tracker names, and are not that run's."""
    try:
        content = read_file(root / _EARLIER_NAME, 2**20)
    except OSError:
        return set()
    return {int(word) for word in content.split() if word.isdigit()}


def write_earlier(root: Path, iterations: Iterable[int]) -> None:
    """Write down which of these iterations `root` still holds. Raises StorageError."""
    held = {iteration for iteration in iterations if iteration_directory(root, iteration).is_dir()}
    if held != read_earlier(root):
        with storage_errors(f"writing {root / _EARLIER_NAME}"):
            replace_file(root / _EARLIER_NAME, "".join(f"{iteration}\n" for iteration in sorted(held)).encode())


def list_superseded(root: Path, newest: int, keep_last: int, others: Container[int] = ()) -> list[int]:
    """Iterations of the complete checkpoints that `keep_last` others up to and with iteration `newest` make
    superfluous.

    Iterations beyond `newest` belong to a run that went back, `others` to another run, and links to what made them:
    none of these counts or is listed.
    """
    older = [iteration for iteration in list_complete(root) if iteration <= newest and iteration not in others]
    return [iteration for iteration in older if not iteration_directory(root, iteration).is_symlink()][keep_last:]


def list_complete(root: Path) -> list[int]:
    """Iterations whose checkpoint is complete, newest first: with a manifest, and every file in the length that it
    says."""
    complete = []
    for iteration in saved_iterations(root):
        path = iteration_directory(root, iteration)
        try:
            check_lengths(path, read_manifest(path))
        except CheckpointError:
            continue
        complete.append(iteration)
    return complete


def set_aside(root: Path, iteration: int) -> Path | None:
    """Let a checkpoint that another of its iteration is about to replace stay, as `iter_0000010.earlier-1`. Returns
    where it is now; None where there is none. Raises StorageError."""
    path = iteration_directory(root, iteration)
    if not path.is_dir():
        return None
    free = next(name for n in itertools.count(1) if not (name := path.with_name(f"{path.name}.earlier-{n}")).exists())
    with storage_errors(f"renaming {path}"):
        os.rename(path, free)
        sync_directory(root)
    return free


def remove_checkpoint(root: Path, iteration: int) -> None:
    """Remove an old checkpoint; a link to one stays, and what it leads to. Raises StorageError."""
    path = iteration_directory(root, iteration)
    if path.is_symlink():
        return
    with storage_errors(f"removing {path}"):
        # Under the name of a leftover it is no checkpoint any more, and should we be interrupted halfway through, the
        # next start removes the rest.
        doomed = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")
        os.rename(path, doomed)
        reach("old-unmarked")
        shutil.rmtree(doomed)
    reach("old-removed")


# ---- saving


def make_save_directory(root: Path, flag: str = "--save") -> None:
    """Make the directory that a flag names where it does not exist yet. Raises ConfigError where it is no directory and
    cannot be made one."""
    problem = explain_unmakeable_directory(root)
    if problem is not None:
        raise ConfigError(f"{flag} {root} {problem}")
    with refuse_unwritable(root, flag):
        root.mkdir(exist_ok=True)


@contextlib.contextmanager
def refuse_unwritable(root: Path, flag: str = "--save") -> Iterator[None]:
    """Turn an OSError inside into a ConfigError: permissions, read-only mounts and quotas are known for certain only by
    writing."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{flag} {root} cannot be written to: {error.strerror or error}") from error


def settle_leftovers(root: Path) -> list[str]:
    """Finish or remove what a crash left; only the run that holds the directory's lock may. Returns what was done.

    Raises OSError.
    """
    reach("leftovers-next")
    done = []
    for entry in list_leftovers(root):
        done.append(_settle(entry))
        reach("leftover-settled")
    return done


def list_leftovers(root: Path) -> list[Path]:
    """Return what a save that is under way, or was interrupted, has in the directory. Raises OSError."""
    return [
        entry
        for entry in sorted(root.iterdir())
        if _TRACKER_LEFTOVER.fullmatch(entry.name) or _LEFTOVER.fullmatch(entry.name)
    ]


def begin_save(root: Path, iteration: int) -> Path:
    """A fresh directory to write the files of a checkpoint into. Raises StorageError."""
    # Random, so that a second job on the same directory never writes into ours.
    path = root / f"iter_{iteration:07d}.tmp-{uuid.uuid4().hex[:8]}"
    with storage_errors(f"starting a checkpoint in {root}"):
        reach("directory-next")
        path.mkdir()
    reach("directory-made")
    return path


def begin_save_alone(path: Path) -> Path:
    """A fresh directory next to `path`, which is missing, an empty directory, or an earlier checkpoint, which it is to
    replace with a warning. Raises CheckpointError, StorageError."""
    if (path / MANIFEST_NAME).is_file():
        say(f"warning: {path} holds a checkpoint already, which is overwritten", sys.stderr)
    elif path.exists() and not (path.is_dir() and next(path.iterdir(), None) is None):
        raise CheckpointError(f"{path} is not an empty directory; save each checkpoint into a directory of its own")
    temporary = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")
    with storage_errors(f"starting the checkpoint {path}"):
        temporary.mkdir()
    return temporary


def commit_save_alone(temporary: Path, manifest: Manifest) -> Path:
    """Make such a checkpoint visible; its files are written and flushed. Returns its directory. Raises OSError."""
    final = temporary.with_name(temporary.name.rpartition(".tmp-")[0])
    _write_manifest(temporary, manifest)
    replaced = None
    if (final / MANIFEST_NAME).is_file():  # of an earlier checkpoint, which stays until the new one is complete
        replaced = temporary.with_name(f"{temporary.name}-replaced")
        os.rename(final, replaced)
    os.rename(temporary, final)  # POSIX replaces an empty directory, and refuses any other
    sync_directory(final.parent)
    if replaced is not None:
        shutil.rmtree(replaced)
    return final


def commit_save(temporary: Path, manifest: Manifest) -> Path:
    """Make the checkpoint in `temporary` visible; its files are written and flushed. Returns its final directory.

    Raises OSError; the checkpoints that were there before are then untouched.
    """
    root = temporary.parent
    final = iteration_directory(root, manifest.iteration)
    suffix = temporary.name.rpartition("-")[2]
    _write_manifest(temporary, manifest)

    # Should the power fail after the rename, this file tells the next start that the tracker was to follow.
    next_tracker = root / f"{TRACKER_NAME}.tmp-{suffix}"
    write_file(next_tracker, str(manifest.iteration).encode(), "tracker")
    replaced = final.with_name(f"{final.name}.old-{suffix}")
    # rename() cannot replace a directory that is not empty.
    if final.exists():
        os.rename(final, replaced)
        reach("earlier-moved-aside")
    os.rename(temporary, final)
    reach("renamed")
    sync_directory(root)
    reach("rename-flushed")
    os.replace(next_tracker, root / TRACKER_NAME)
    reach("tracker-replaced")
    sync_directory(root)
    reach("tracker-replace-flushed")
    # From here on the save counts: what cannot be removed now is removed at the next start.
    with contextlib.suppress(OSError):
        _remove_replaced(replaced)
    reach("earlier-removed")
    return final


def _remove_replaced(path: Path) -> None:
    """Remove a directory that lost its name to a newer one; of a link to one only the link. Raises OSError."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _write_manifest(temporary: Path, manifest: Manifest) -> None:
    """Flush every directory of the checkpoint; the manifest comes last, and with it the checkpoint is complete."""
    # A file survives only if its name does: the entries of every directory are flushed as well.
    for directory in sorted(entry for entry in temporary.rglob("*") if entry.is_dir()):
        sync_directory(directory)
    reach("directories-flushed")
    manifest.write(temporary)
    sync_directory(temporary)
    reach("checkpoint-complete")


def abandon_save(temporary: Path) -> None:
    """Remove what a failed save has left; errors are of no interest any more."""
    root, suffix = temporary.parent, temporary.name.rpartition("-")[2]
    shutil.rmtree(temporary, ignore_errors=True)
    for leftover in (root / f"{TRACKER_NAME}.tmp-{suffix}", *root.glob(f"iter_*.old-{suffix}")):
        try:
            _settle(leftover)
        except OSError:
            continue


def _settle(leftover: Path) -> str:
    """Finish or remove one file or directory that an interrupted save left. Raises OSError."""
    root = leftover.parent
    match = _LEFTOVER.fullmatch(leftover.name)
    if match is None:
        iteration = read_tracker(leftover) if leftover.exists() else None
        if iteration is not None and _completes(root, iteration):
            # It is whole and flushed: to write it once more may be more than a full disk takes.
            os.replace(leftover, root / TRACKER_NAME)
            sync_directory(root)
            return f"finished the save of iteration {iteration}, which had been interrupted"
        leftover.unlink(missing_ok=True)
        return f"removed {leftover.name} of an interrupted save"
    if match[2] == "old" and not (root / match[1]).exists():
        os.rename(leftover, root / match[1])
        return f"put {match[1]} back, which an interrupted save had moved aside"
    _remove_replaced(leftover)
    return f"removed {leftover.name} of an interrupted save"


def _completes(root: Path, iteration: int) -> bool:
    """Return whether the save of this iteration got as far as its final name, and the tracker did not follow."""
    tracked = read_tracker(root / TRACKER_NAME)
    # A tracker that is ahead already was written by a later save, and must not go back.
    is_visible = (iteration_directory(root, iteration) / MANIFEST_NAME).exists()
    return is_visible and (tracked is None or tracked < iteration)


def read_tracker(tracker: Path) -> int | None:
    """The number in a tracker file; None when it holds anything else or cannot be read."""
    try:
        # 64 bytes are plenty for a number, and a file that was mixed up may have gigabytes.
        text = read_file(tracker, 64).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if re.fullmatch(r"[0-9]{1,12}", text) else None
