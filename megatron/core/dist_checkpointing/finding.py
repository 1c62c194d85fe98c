# SPDX-License-Identifier: Apache-2.0
"""The checkpoint of a directory that a run loads: the tracker's, or the newest that is complete and undamaged."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron.core.dist_checkpointing.directory import (
    ITERATION,
    TRACKER_NAME,
    iteration_directory,
    read_tracker,
    saved_iterations,
)
from megatron.core.dist_checkpointing.manifest import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    read_manifest,
    verify_files,
)
from megatron.core.errors import CheckpointError


@dataclass(frozen=True)
class FoundCheckpoint:
    """A complete checkpoint whose files are all as its manifest says, or as long, those that are `unverified`."""

    path: Path
    manifest: Manifest
    skipped: list[str] = field(default_factory=list)
    """Reasons to pass over newer ones, for one warning to the user."""
    unverified: Mapping[str, FileRecord] = field(default_factory=dict)
    """Files of tensors that have not been read yet; serialization.load() compares them with these records."""


Verify = Callable[[Path, Manifest], None]
"""Raises CheckpointError unless every file of a directory is as its manifest says."""


def find_checkpoint(root: Path, iteration: int | None = None, verify: Verify = verify_files) -> FoundCheckpoint | None:
    """The checkpoint to load: the given iteration, else the tracker's, else the newest that is complete and undamaged.

    root: a directory of checkpoints, or the directory of one checkpoint. None when there is nothing in it yet. Raises
    CheckpointError when the given iteration cannot be loaded, or when there are checkpoints but none can be.
    """
    # --load may also name the directory of one checkpoint.
    if (root / MANIFEST_NAME).exists():
        return _verified(root, verify)
    if iteration is not None:
        path = iteration_directory(root, iteration)
        if not path.is_dir():
            saved = ", ".join(map(str, saved_iterations(root))) or "none"
            raise CheckpointError(f"--ckpt-step {iteration}: {path} does not exist; saved iterations: {saved}")
        return _verified(path, verify)
    skipped: list[str] = []
    return take_first_good(root, list_candidates(root, skipped), skipped, verify)


def take_first_good(
    root: Path, candidates: list[Path], skipped: list[str], verify: Verify = verify_files
) -> FoundCheckpoint | None:
    """The first of the candidates that is complete and undamaged; None where there are none.

    skipped: what is odd about the directory; why a candidate was not taken is added. Raises CheckpointError when there
    are checkpoints but none can be loaded.
    """
    for path in candidates:
        try:
            found = _verified(path, verify)
        except CheckpointError as error:
            skipped.append(str(error))
            continue
        directory = path.parent
        newest = saved_iterations(directory)[0]
        if not skipped and found.manifest.iteration < newest:
            # A user who wrote the tracker to go back wants that; where it was damaged, this is the only sign of it.
            skipped.append(
                f"{directory / TRACKER_NAME} names iteration {found.manifest.iteration} although "
                f"{iteration_directory(directory, newest)} is newer"
            )
        return FoundCheckpoint(found.path, found.manifest, skipped)
    if skipped:
        raise CheckpointError(f"no checkpoint in {root} can be loaded: {'; '.join(skipped)}")
    return None


def list_candidates(root: Path, problems: list[str]) -> list[Path]:
    """Directories that a run tries to load, in order; what is odd about the tracker is added to `problems`."""
    iterations = saved_iterations(root)
    if not os.path.lexists(root / TRACKER_NAME):
        if iterations:
            problems.append(f"{root / TRACKER_NAME} is missing")
        return [iteration_directory(root, iteration) for iteration in iterations]
    hint = read_tracker(root / TRACKER_NAME)
    pending = [read_tracker(path) for path in root.glob(f"{TRACKER_NAME}.tmp-*")]
    # The power may have failed between the rename and the tracker: the file that was to become the tracker then knows
    # of a newer checkpoint than the tracker does.
    interrupted = max((p for p in pending if p is not None and p in iterations and p > (hint or 0)), default=None)
    if interrupted is not None:
        hint = interrupted
    if hint is None:
        problems.append(f"{root / TRACKER_NAME} does not hold the number of an iteration")
    elif hint not in iterations:
        problems.append(f"{iteration_directory(root, hint)}, which {TRACKER_NAME} names, does not exist")
    else:
        # The tracker's first, then from the newest to the oldest.
        iterations.sort(key=lambda iteration: (iteration != hint, -iteration))
    return [iteration_directory(root, iteration) for iteration in iterations]


def check_number(path: Path, manifest: Manifest) -> None:
    """Raise CheckpointError where a checkpoint's directory has another iteration's name."""
    match = ITERATION.fullmatch(path.name)
    # Loading it would continue with the wrong samples and learning rate, without any other sign.
    if match and int(match[1]) != manifest.iteration:
        raise CheckpointError(f"{path} holds iteration {manifest.iteration}: it was renamed or mixed up")


def _verified(path: Path, verify: Verify) -> FoundCheckpoint:
    manifest = read_manifest(path)
    check_number(path, manifest)
    verify(path, manifest)
    return FoundCheckpoint(path, manifest)
