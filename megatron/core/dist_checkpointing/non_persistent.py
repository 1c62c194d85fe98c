# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of which only the newest stays, in a directory of their own beside the persistent ones.

    root/iter_0000900/                     persistent
    root/non_persistent/iter_0000990/      the newest of the others; non_persistent.json: {"since": "<run_id>"}

Which of the two is newer is not told by their numbers, because a run may go back to an earlier iteration, nor by times,
which copying changes. A non-persistent checkpoint therefore names the persistent one that was the newest when it was
saved, by the run_id of its manifest: as long as that is still the newest, nothing persistent has been saved since.
"""

from __future__ import annotations

from pathlib import Path

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.directory import (
    FoundCheckpoint,
    Verify,
    find_checkpoint,
    iteration_directory,
    list_candidates,
    take_first_good,
)
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, read_manifest, verify_files
from megatron.core.errors import CheckpointError

DIRECTORY_NAME = "non_persistent"
DOCUMENT = "non_persistent"


def build_document(root: Path) -> dict[str, str | None]:
    """What a non-persistent checkpoint that is saved now says of the persistent ones in `root`."""
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
    first = [others.pop(0)] if _is_newer(others[0], persistent[0]) else []
    # sorted() is stable: of two with the same number the persistent one comes first.
    rest = sorted(persistent[1:] + others, key=_get_iteration, reverse=True)
    return [*first, persistent[0], *rest]


def _is_newer(other: Path, persistent: Path) -> bool:
    """Whether the newest non-persistent checkpoint was saved after the newest persistent one."""
    newest = _read_run_id(persistent)
    try:
        since = serialization.read_document(other, DOCUMENT)["since"]
    except (CheckpointError, TypeError, KeyError):
        since = None
    # Without the word of both, the numbers are all there is.
    return (
        since == newest
        if since is not None and newest is not None
        else _get_iteration(other) > _get_iteration(persistent)
    )


def _get_iteration(path: Path) -> int:
    return int(path.name.removeprefix("iter_"))


def _read_run_id(path: Path) -> str | None:
    """None for a checkpoint that is damaged, or of upstream's."""
    try:
        return read_manifest(path).run_id
    except CheckpointError:
        return None
