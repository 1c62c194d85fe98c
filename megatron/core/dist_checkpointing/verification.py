# SPDX-License-Identifier: Apache-2.0
"""The checkpoint to load, found by all processes together: the first one chooses, and all of them read for checksums.

first process                               the others
choose a candidate, compare lengths
"verify this one"                      ->   which of them see the same checkpoint?
checksums of its share                      of theirs
compare all with the manifest          <-   report them
choose another one, or end             ->
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from megatron.core.collectives import all_gather_object, broadcast_object
from megatron.core.dist_checkpointing.agreement import on_first_rank
from megatron.core.dist_checkpointing.checksums import FileSegment, compute_checksums, list_segments, take_share
from megatron.core.dist_checkpointing.finding import FoundCheckpoint, Verify
from megatron.core.dist_checkpointing.manifest import Manifest, read_manifest, verify_files
from megatron.core.errors import CheckpointError
from megatron.core.process_groups_config import Group

Look = Callable[[Verify], FoundCheckpoint | None]
"""Finds a checkpoint and has its files verified, as find_checkpoint() does."""


def find_together(look: Look, group: Group) -> FoundCheckpoint | None:
    """Return what `look` finds on the first member of `group`; every member calls this and gets the same result or
    error."""
    if group.size() == 1:
        return look(verify_files)
    if group.rank() > 0:
        while (task := _announce(None, group)) is not None:
            _gather_checksums(*task, group)
        return on_first_rank(group, lambda: None)

    do_others_listen = True

    def verify(path: Path, manifest: Manifest) -> None:
        def compute(segments: list[FileSegment]) -> list[int]:
            nonlocal do_others_listen
            # What is raised here is a collective's: a process was lost, or this one was interrupted in the middle.
            do_others_listen = False
            _announce((path, manifest), group)
            outcomes = _gather_checksums(path, manifest, group)
            do_others_listen = True
            return _join(outcomes)

        verify_files(path, manifest, compute=compute)

    def search() -> FoundCheckpoint | None:
        try:
            return look(verify)
        finally:
            if do_others_listen:
                _announce(None, group)

    return on_first_rank(group, search)


def _announce(task: tuple[Path, Manifest] | None, group: Group) -> tuple[Path, Manifest] | None:
    """Return what the first member tells the others to read; None when there is nothing more."""
    return broadcast_object(task, group)


def _gather_checksums(path: Path, manifest: Manifest, group: Group) -> list[list[int] | OSError]:
    """The checksums of each member's share, or why it has none; on every member."""
    # On a separate disk a process may have another checkpoint, or none: it is told so later, and reads nothing here.
    readers = [rank for rank, sees in enumerate(all_gather_object(_sees(path, manifest), group)) if sees]
    outcome: list[int] | OSError = []
    if group.rank() in readers:
        segments = list_segments({name: record.bytes for name, record in manifest.files.items()})
        share = take_share(segments, readers.index(group.rank()), len(readers))
        try:
            outcome = compute_checksums(path, share)
        except OSError as error:
            # As it travels: with the file's name, and without what belongs to this process.
            outcome = type(error)(error.errno, error.strerror, error.filename)
    return all_gather_object(outcome, group)


def _join(outcomes: Iterable[list[int] | OSError]) -> list[int]:
    """The checksums of all segments. Raises the OSError that anybody had."""
    checksums: list[int] = []
    for outcome in outcomes:
        if isinstance(outcome, OSError):
            raise outcome
        checksums += outcome
    return checksums


def _sees(path: Path, manifest: Manifest) -> bool:
    try:
        return read_manifest(path).run_id == manifest.run_id
    except CheckpointError:
        return False
