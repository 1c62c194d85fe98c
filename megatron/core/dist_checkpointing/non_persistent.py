# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of which only the newest stays, in a separate directory next to the persistent ones.

    root/iter_0000900/                     persistent
    root/non_persistent/iter_0000990/      the newest of the others; non_persistent.json: {"since": "<run_id>"}

Which of the two is newer is not told by their numbers, because a run may go back to an earlier iteration, nor by times,
which copying changes. A non-persistent checkpoint therefore names the persistent one that was the newest when it was
saved, by the run_id of its manifest: as long as that is still the newest, nothing persistent has been saved since.
"""

from __future__ import annotations

from pathlib import Path

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.directory import iteration_directory
from megatron.core.dist_checkpointing.finding import (
    FoundCheckpoint,
    Verify,
    find_checkpoint,
    list_candidates,
    take_first_good,
)
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, read_manifest, verify_files
from megatron.core.errors import CheckpointError

DIRECTORY_NAME = "non_persistent"
DOCUMENT = "non_persistent"


def build_document(root: Path) -> dict[str, str | None]:
    """Return what a non-persistent checkpoint that is saved now says of the persistent ones in `root`."""
    persistent = list_candidates(root, [])
    return {"since": _read_run_id(persistent[0]) if persistent else None}


def find_newest(
    root: Path, other: Path, iteration: int | None = None, verify: Verify = verify_files
) -> FoundCheckpoint | None:
    """The newest good checkpoint of a directory and of the non-persistent ones in `other`; see find_checkpoint.

    An iteration that is asked for is looked for in both, first in `root`. Raises CheckpointError.
    """
    if not other.is_dir() or (root / MANIFEST_NAME).exists():
        return find_checkpoint(root, iteration, verify)
    if iteration is not None:
        is_elsewhere = not iteration_directory(root, iteration).is_dir()
        is_there = iteration_directory(other, iteration).is_dir()
        return find_checkpoint(other if is_elsewhere and is_there else root, iteration, verify)
    skipped: list[str] = []
    return take_first_good(root, list_all_candidates(root, other, skipped), skipped, verify)


def list_all_candidates(root: Path, other: Path, problems: list[str]) -> list[Path]:
    """Checkpoints of both directories in the order in which a run tries to load them; what is odd about the trackers is
    added to `problems`."""
    persistent = list_candidates(root, problems) if root.is_dir() else []
    others = list_candidates(other, problems) if other.is_dir() else []
    if not others or not persistent:
        return persistent + others
    is_newer = _is_newer(_read_since(others[0]), _get_iteration(others[0]), persistent[0])
    first = [others.pop(0)] if is_newer else []
    # sorted() is stable: of two with the same number the persistent one comes first.
    rest = sorted(persistent[1:] + others, key=_get_iteration, reverse=True)
    return [*first, persistent[0], *rest]


def is_newer_than_all(since: str | None, iteration: int, root: Path, other: Path) -> bool:
    """Return whether a checkpoint from elsewhere, whose document says `since`, is newer than all of both
    directories."""
    persistent = list_candidates(root, []) if root.is_dir() else []
    # Of a run whose persistent checkpoints somebody has removed since: it is to start again.
    if not persistent and since is not None:
        return False
    if persistent and not _is_newer(since, iteration, persistent[0]):
        return False
    newest = next(iter(list_all_candidates(root, other, [])), None)
    return newest is None or newest.parent != other or iteration > _get_iteration(newest)


def _is_newer(since: str | None, iteration: int, persistent: Path) -> bool:
    """Return whether a non-persistent checkpoint was saved after the newest persistent one."""
    newest = _read_run_id(persistent)
    # Without the word of both, the numbers are all there is.
    return since == newest if since is not None and newest is not None else iteration > _get_iteration(persistent)


def _read_since(path: Path) -> str | None:
    """None where a non-persistent checkpoint does not say it."""
    try:
        since = serialization.read_document(path, DOCUMENT)["since"]
    except (CheckpointError, TypeError, KeyError):
        return None
    return since if isinstance(since, str) else None


def _get_iteration(path: Path) -> int:
    return int(path.name.removeprefix("iter_"))


def _read_run_id(path: Path) -> str | None:
    """None for a checkpoint that is damaged, or of upstream's."""
    try:
        return read_manifest(path).run_id
    except CheckpointError:
        return None
