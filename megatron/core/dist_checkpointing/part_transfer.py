# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that travel from a directory of one rank into a directory of another, where they share no storage.

    everyone    says what it is about to send, so that all know the manifests, and with them the lengths
    rounds      in each of them a rank sends one checkpoint at most and receives one at most, in pieces of 16 MiB
    receivers   compare each file with its manifest, flush it, and rename the directory when it is whole

Who cannot read or write goes on to the end of its round, so that nobody waits for it, and says so afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core import device
from megatron.core.collectives import all_gather_object, send_and_receive
from megatron.core.dist_checkpointing.directory import abandon_save, begin_save, commit_save
from megatron.core.dist_checkpointing.durable import create_file, storage_errors
from megatron.core.dist_checkpointing.manifest import FileRecord, Manifest, compare_checksums, read_manifest
from megatron.core.errors import CheckpointError, StorageError
from megatron.core.process_groups_config import Group

_PIECE_BYTES = 16 << 20


class PartTransfer(NamedTuple):
    """A checkpoint that goes from one rank of a group to another; within one rank it is copied."""

    source: int
    destination: int


class _Announced(NamedTuple):
    """Announcement of what a source is about to send."""

    path: Path
    manifest: Manifest


def transfer(
    transfers: Sequence[PartTransfer],
    find_source: Callable[[PartTransfer], Path],
    find_root: Callable[[PartTransfer], Path],
    group: Group,
) -> list[str | None]:
    """Carry out the transfers, which are the same on all members of `group`; returns for each why it failed, None where
    it has arrived undamaged, on every member.

    find_source: asked on the source, for the checkpoint's directory. find_root: asked on the destination, for the
    directory of checkpoints, which exists, that gets it; one of the same iteration there is replaced.
    """
    rank = group.rank()
    # Before the first piece: a receiver has to know how many pieces come, and how long each of them is.
    own = {i: _announce(find_source(item)) for i, item in enumerate(transfers) if item.source == rank}
    announced: dict[int, _Announced | str] = {}
    for said_by_one in all_gather_object(own, group):
        announced |= said_by_one
    problems = {i: said for i, said in announced.items() if isinstance(said, str)}
    sent = {i: said for i, said in announced.items() if not isinstance(said, str)}
    unread: dict[int, str] = {}
    unwritten: dict[int, str] = {}
    for members in _list_rounds(transfers, sorted(sent)):
        outgoing = next((i for i in members if transfers[i].source == rank), None)
        incoming = next((i for i in members if transfers[i].destination == rank), None)
        read_problems: list[str] = []
        leaving = iter(()) if outgoing is None else _read(sent[outgoing], read_problems)
        arriving = leaving
        if outgoing is None or outgoing != incoming:
            to = None if outgoing is None else transfers[outgoing].destination
            source = None if incoming is None else transfers[incoming].source
            sizes = [] if incoming is None else _list_sizes(sent[incoming].manifest)
            arriving = _exchange(leaving, to, sizes, source, group)
        if incoming is not None:
            problem = _write(sent[incoming], find_root(transfers[incoming]), arriving)
            unwritten |= {incoming: problem} if problem is not None else {}
        # What is still to be sent, or was sent to a rank that could not write it: its partners in this round send and
        # receive in the same order, and would wait for the pieces left out.
        for _ in arriving:
            pass
        if outgoing is not None and read_problems:
            unread[outgoing] = read_problems[0]
    everyone = all_gather_object((unread, unwritten), group)
    for _, found_at_destination in everyone:
        problems |= found_at_destination
    # A file that could not be read arrives as zeros, and is found damaged there: what its source says is the cause.
    for found_at_source, _ in everyone:
        problems |= found_at_source
    return [problems.get(i) for i in range(len(transfers))]


def _announce(path: Path) -> _Announced | str:
    """The manifest of a checkpoint that is to be sent, or why it cannot be."""
    try:
        return _Announced(path, read_manifest(path))
    except CheckpointError as error:
        return str(error)


def _list_rounds(transfers: Sequence[PartTransfer], indices: Sequence[int]) -> list[list[int]]:
    """The transfers in rounds in which each rank sends one at most, and receives one at most."""
    rounds: list[tuple[list[int], set[int], set[int]]] = []
    # Each into the first round that has both ranks free. All members compute this for themselves and get the same,
    # so that none of them waits for a partner who is in another round.
    for index in indices:
        item = transfers[index]
        for members, sources, destinations in rounds:
            if item.source not in sources and item.destination not in destinations:
                members.append(index)
                sources.add(item.source)
                destinations.add(item.destination)
                break
        else:
            rounds.append(([index], {item.source}, {item.destination}))
    return [members for members, _, _ in rounds]


def _list_sizes(manifest: Manifest) -> list[int]:
    """Bytes of the pieces in which the files of a checkpoint travel, one after the other."""
    return [size for record in _sort_files(manifest).values() for size in _cut(record.bytes)]


def _sort_files(manifest: Manifest) -> dict[str, FileRecord]:
    return {name: manifest.files[name] for name in sorted(manifest.files)}


def _cut(num_bytes: int) -> list[int]:
    return [min(_PIECE_BYTES, num_bytes - start) for start in range(0, num_bytes, _PIECE_BYTES)]


def _read(what: _Announced, problems: list[str]) -> Iterator[Tensor]:
    """The pieces, uint8 [bytes]: zeros when a file cannot be read, which is added to `problems`."""
    for name, record in _sort_files(what.manifest).items():
        path = what.path / name
        with contextlib.ExitStack() as stack:
            file = None
            for size in _cut(record.bytes):
                # Sent also where nothing can be read: the receiver waits for so many bytes.
                piece = torch.zeros(size, dtype=torch.uint8)
                try:
                    file = file or stack.enter_context(open(path, "rb"))
                    file.readinto(piece.numpy().data)
                except OSError as error:
                    problems.append(f"{path} cannot be read: {error.strerror or error}")
                yield piece


def _exchange(
    leaving: Iterator[Tensor], to: int | None, sizes: Sequence[int], source: int | None, group: Group
) -> Iterator[Tensor]:
    """Send all pieces that leave to member `to`, and give what arrives meanwhile from member `source`, in host memory.
    None: nothing leaves, or nothing arrives."""
    # The group's backend may carry nothing but the memory of its devices, as NCCL does.
    where, expected = device.current_device(), iter(sizes)
    # What leaves and what arrives need not have the same number of pieces.
    while True:
        sent, size = next(leaving, None), next(expected, None)
        if sent is None and size is None:
            return
        outgoing = None if sent is None or to is None else (sent.to(where), to)
        incoming = (
            None if size is None or source is None else (torch.empty(size, dtype=torch.uint8, device=where), source)
        )
        for handle in send_and_receive(outgoing, incoming, group):
            handle.wait()
        if incoming is not None:
            yield incoming[0].cpu()


def _write(what: _Announced, root: Path, arriving: Iterator[Tensor]) -> str | None:
    """Make a checkpoint in `root` of the pieces that arrive; returns why that failed."""
    temporary: Path | None = None
    try:
        temporary = begin_save(root, what.manifest.iteration)
        with storage_errors(f"copying a checkpoint into {root}"):
            for name, record in _sort_files(what.manifest).items():
                crc32 = _write_file(temporary / name, _cut(record.bytes), arriving)
                # Named as it lies at its source: that is where it was damaged.
                compare_checksums(what.path, {name: record}, {name: crc32})
            commit_save(temporary, what.manifest)
    except (CheckpointError, StorageError) as error:
        if temporary is not None:
            abandon_save(temporary)
        return str(error)
    return None


def _write_file(path: Path, sizes: Sequence[int], arriving: Iterator[Tensor]) -> int:
    """Write a file of the next pieces; returns its checksum. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with create_file(path, "shard") as file:
        for _ in sizes:
            file.write(next(arriving).numpy().data)
    return file.crc32
