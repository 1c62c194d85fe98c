# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on the ranks' own nodes: each rank has its part of the run's state in a directory of its own.

    node 0   place/rank_00000/iter_0000990/    a complete checkpoint of one process, with a manifest of its own
    node 1   place/rank_00001/iter_0000990/    local.json: {"save": "<the same on all ranks>", "number": 7, ...}

Tensors are stored as the rank holds them, so that only a run of the same layout can go on from there; local.json has a
checksum of that layout. A save counts when every rank has its part: the one before stays until then, and a rank without
its part, as after a change of its node, makes all of them take an earlier one.
"""

from __future__ import annotations

import json
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron.core.collectives import all_gather_object
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.agreement import on_every_rank, on_first_rank, with_everyone
from megatron.core.dist_checkpointing.directory import (
    FoundCheckpoint,
    check_number,
    iteration_directory,
    remove_checkpoint,
    saved_iterations,
)
from megatron.core.dist_checkpointing.directory_lock import DirectoryLock
from megatron.core.dist_checkpointing.load_exchange import Read, SharedReads, choose_readers, exchange
from megatron.core.dist_checkpointing.manifest import Manifest, read_manifest, verify_files
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.errors import CheckpointError, StorageError
from megatron.core.process_groups_config import Group, SingleRankGroup

DOCUMENT = "local"
_ALONE = SingleRankGroup()


def find_rank_directory(place: Path, rank: int) -> Path:
    """Where a rank's own parts lie in a directory of its node."""
    return place / f"rank_{rank:05d}"


class Offer(NamedTuple):
    """What one rank says of a part that it has."""

    number: int
    """Counts the saves: the newest has the highest, also after a run has gone back to an earlier iteration."""
    iteration: int
    since: str | None
    """The run_id of the persistent checkpoint that was the newest then; see non_persistent.py."""
    layout: int
    """A checksum of how the state was divided among the ranks."""
    is_shared: bool
    """Whether replicas have divided the writing among themselves."""


@dataclass(frozen=True)
class FoundPart:
    """This rank's part of a local checkpoint of which every rank has one, all undamaged."""

    checkpoint: FoundCheckpoint
    is_shared: bool


# ---- saving


def save(
    tensors: ShardedStateDict,
    directory: Path,
    iteration: int,
    *,
    documents: Mapping[str, Any],
    since: str | None,
    layout: Mapping[str, int],
    group: Group,
    replicas: Sequence[Group] = (),
    lock: DirectoryLock | None = None,
) -> Path:
    """Save this rank's part into `directory`, which is its own; returns the part's directory when every rank has its
    part. Every member of `group` calls this.

    documents: name -> what to store as <name>.json, on every rank. since: see Offer, the first member's counts. layout:
    sizes of the parallel axes. replicas: groups whose members divide what they all hold among themselves. lock: of
    `directory`. Raises StorageError on every member when one of them failed; earlier checkpoints stay as they are.
    """
    numbers = all_gather_object(max((offer.number for offer in _list_offers(directory).values()), default=0), group)
    identity, since = on_first_rank(group, lambda: (uuid.uuid4().hex, since))
    offer = Offer(1 + max(numbers), iteration, since, compute_layout(tensors, layout, group), bool(replicas))
    own = _list_whole(_divide(tensors, replicas).own_reads)
    said = {**documents, DOCUMENT: {"save": identity, **offer._asdict()}}
    return with_everyone(
        group, lambda: serialization.save(own, directory, iteration, documents=said, group=_ALONE, lock=lock)
    )


def remove_others(directory: Path, iteration: int) -> None:
    """Remove this rank's parts of all saves but one, once every rank has its part of that. Raises StorageError."""
    for other in saved_iterations(directory):
        if other != iteration:
            remove_checkpoint(directory, other)


# ---- loading


def find(
    directory: Path,
    layout: int,
    group: Group,
    is_wanted: Callable[[Offer], bool],
) -> tuple[FoundPart | None, list[str]]:
    """This rank's part of the newest save of which every member of `group` has an undamaged one in its own directory,
    and why a newer one was passed over. Every member calls this and gets the same answer.

    layout: compute_layout() of this run. is_wanted: asked on the first member before the files are read.
    """
    offers = _list_offers(directory)
    everyone = all_gather_object(offers, group)
    known: dict[str, Offer] = {identity: offer for part in everyone for identity, offer in part.items()}
    passed_over: list[str] = []
    for identity in sorted(known, key=lambda identity: (known[identity].number, identity), reverse=True):
        offer = known[identity]
        what = f"the local checkpoint of iteration {offer.iteration}"
        # Before anything is told: one that nobody would take is no loss.
        if not on_first_rank(group, lambda offer=offer: is_wanted(offer)):  # type: ignore[misc]
            continue
        if offer.layout != layout:
            passed_over.append(f"{what} was written in another layout")
            continue
        missing = [rank for rank, part in enumerate(everyone) if identity not in part]
        if missing:
            ranks = f"rank {missing[0]} has" if len(missing) == 1 else f"{len(missing)} ranks, {missing[0]} first, have"
            passed_over.append(f"{ranks} no file of {what}; was a node replaced?")
            continue
        path = iteration_directory(directory, offer.iteration)
        found, problem = _verify(path)
        problems = [text for text in all_gather_object(problem, group) if text is not None]
        if not problems:
            assert found is not None
            return FoundPart(found, offer.is_shared), passed_over
        passed_over.append(f"{what} cannot be loaded: {problems[0]}")
    return None, passed_over


def load(tensors: ShardedStateDict, part: FoundPart, *, group: Group, replicas: Sequence[Group]) -> None:
    """Fill the tensors of all members of `group`, which are those of the save. Raises CheckpointError on every member;
    the tensors may then hold anything."""
    shared = _divide(tensors, replicas if part.is_shared else ())

    def read() -> None:
        serialization.load(_list_whole(shared.own_reads), part.checkpoint, _ALONE)

    on_every_rank(group, read)
    exchange(shared)


def compute_layout(tensors: ShardedStateDict, layout: Mapping[str, int], group: Group) -> int:
    """A checksum of what each member of `group` holds of the run's state, the same on all of them."""
    parts = sorted((tensor.key, _describe(tensor)) for tensor in tensors.values())
    own = zlib.crc32(json.dumps([list(layout.items()), parts]).encode())
    return zlib.crc32(json.dumps(all_gather_object(own, group)).encode())


def _describe(tensor: ShardedTensor) -> str:
    """Which part of a tensor this is, and in which form."""
    boxes = [block.box for block in tensor.blocks]
    return f"{tensor.global_shape} {tensor.local_shape} {tensor.dtype} {boxes}"


def _divide(tensors: ShardedStateDict, replicas: Sequence[Group]) -> SharedReads:
    """Who writes and reads what of which all members of a group have the same part; the same for saving and loading."""
    reads = [
        Read(MetadataIndex(tensor.key), (zlib.crc32(_describe(tensor).encode()),), tensor.data)
        for tensor in tensors.values()
        if tensor.data.numel()
    ]
    return choose_readers(reads, replicas)


def _list_whole(reads: Sequence[Read]) -> ShardedStateDict:
    """The tensors as they lie in this rank's memory, each as if it were all there is."""
    return {read.box_index.fqn: ShardedTensor.whole(read.box_index.fqn, read.target) for read in reads}


def _list_offers(directory: Path) -> dict[str, Offer]:
    """The parts in a rank's directory by the save that they are of. A damaged one is left out."""
    offers = {}
    for iteration in saved_iterations(directory):
        path = iteration_directory(directory, iteration)
        try:
            check_number(path, read_manifest(path))
            said = dict(serialization.read_document(path, DOCUMENT))
            identity, offer = str(said.pop("save")), Offer(**said)
        except (CheckpointError, TypeError, ValueError, KeyError):
            continue
        if type(offer.number) is int and offer.iteration == iteration:
            offers[identity] = offer
    return offers


def _verify(path: Path) -> tuple[FoundCheckpoint | None, str | None]:
    """A part whose files are all as they were written, or why it is not."""
    try:
        manifest: Manifest = read_manifest(path)
        verify_files(path, manifest)
    except (CheckpointError, StorageError) as error:
        return None, str(error)
    return FoundCheckpoint(path, manifest), None
