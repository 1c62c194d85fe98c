# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on the ranks' nodes: each rank has its part of the run's state in a separate directory.

    node 0   place/rank_00000/iter_0000990/                    a complete checkpoint of one process, with a manifest
             place/rank_00000/copy_of_rank_00001/iter_0000990/ the same as on node 1, where copies are kept
    node 1   place/rank_00001/iter_0000990/                    local.json: {"save": "<the same on all ranks>", ...}
             place/rank_00001/copy_of_rank_00000/iter_0000990/

Tensors are stored as the rank holds them, so that only a run of the same layout can go on from there; local.json has a
checksum of that layout. A save counts when every rank has its part: the one before stays until then. A rank without its
part, or with a damaged one, takes it from a rank on whose node it lies: because one of them has changed its node, or
because copies are kept. Where no rank has it, all ranks take an earlier save.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import uuid
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron.core.collectives import all_gather_object
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.agreement import on_every_rank, on_first_rank, with_everyone
from megatron.core.dist_checkpointing.directory import (
    iteration_directory,
    remove_checkpoint,
    saved_iterations,
    settle_leftovers,
)
from megatron.core.dist_checkpointing.directory_lock import DirectoryLock
from megatron.core.dist_checkpointing.durable import storage_errors
from megatron.core.dist_checkpointing.finding import FoundCheckpoint, check_number
from megatron.core.dist_checkpointing.load_exchange import Read, SharedReads, choose_readers, exchange
from megatron.core.dist_checkpointing.manifest import read_manifest, verify_files
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.part_transfer import PartTransfer, transfer
from megatron.core.errors import CheckpointError, StorageError
from megatron.core.process_groups_config import Group, SingleRankGroup

DOCUMENT = "local"
_PART_OWNER = re.compile(r"(?:copy_of_)?rank_([0-9]{5,})")
_ALONE = SingleRankGroup()


def find_rank_directory(place: Path, rank: int) -> Path:
    """Return the place of a rank's parts in a directory of its node."""
    return place / f"rank_{rank:05d}"


def find_copies_directory(directory: Path, rank: int) -> Path:
    """Return the place of copies of another rank's parts in a rank's directory."""
    return directory / f"copy_of_rank_{rank:05d}"


class Copying(NamedTuple):
    """Layout of copies among ranks: `factor` ranks at a distance of `jump` from each other."""

    jump: int
    factor: int

    def list_partners(self, rank: int) -> list[int]:
        """The others of a rank's set, in the order in which it sends them its part. The number of ranks is a multiple
        of jump * factor."""
        block, place = divmod(rank, self.jump * self.factor)
        column, row = place % self.jump, place // self.jump
        first = block * self.jump * self.factor + column
        return [first + (row + step) % self.factor * self.jump for step in range(1, self.factor)]


class Offer(NamedTuple):
    """Statement of one rank on a part that it has."""

    number: int
    """Counts the saves: the newest has the highest, also after a run has gone back to an earlier iteration."""
    iteration: int
    since: str | None
    """The run_id of the persistent checkpoint that was the newest then; see non_persistent.py."""
    layout: int
    """A checksum of how the state was divided among the ranks."""
    is_shared: bool
    """True if replicas have divided the writing among themselves."""


@dataclass(frozen=True)
class FoundPart:
    """This rank's part of a local checkpoint of which every rank has one, all undamaged."""

    checkpoint: FoundCheckpoint
    is_shared: bool
    moved: tuple[str, ...] = ()
    """Ranks that had to take their part from another one; the same on all ranks."""


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
    """Save this rank's part into `directory`, which only it uses; returns the part's directory when every rank has its
    part. Every member of `group` calls this.

    documents: name -> what to store as <name>.json, on every rank. since: see Offer, the first member's counts. layout:
    sizes of the parallel axes. replicas: groups whose members divide what they all hold among themselves. lock: of
    `directory`. Raises StorageError on every member when one of them failed; earlier checkpoints stay as they are.
    """
    # Saves of the whole node: a rank that has just come to it has none, and would start counting again.
    seen = [
        *_list_offers(directory).values(),
        *(part.offer for part in _list_elsewhere(directory, range(group.size()))),
    ]
    numbers = all_gather_object(max((offer.number for offer in seen), default=0), group)
    identity, since = on_first_rank(group, lambda: (uuid.uuid4().hex, since))
    offer = Offer(1 + max(numbers), iteration, since, compute_layout(tensors, layout, group), bool(replicas))
    own = _list_whole(_divide(tensors, replicas).own_reads)
    said = {**documents, DOCUMENT: {"save": identity, **offer._asdict()}}
    return with_everyone(
        group, lambda: serialization.save(own, directory, iteration, documents=said, group=_ALONE, lock=lock)
    )


def copy_to_partners(path: Path, directory: Path, copying: Copying, group: Group) -> list[str]:
    """Keep a copy of this rank's part `path`, which lies in its `directory`, with each of its partners; returns what
    went wrong on any rank. Every member of `group` calls this, with parts of the same save."""
    partners = copying.list_partners(group.rank())
    transfers = [
        PartTransfer(rank, partner)
        for step in range(copying.factor - 1)
        for rank in range(group.size())
        for partner in [copying.list_partners(rank)[step]]
    ]

    own = {partner: _prepare(find_copies_directory(directory, partner)) for partner in partners}
    # Only the copies that a rank has no place for are left out: its part may need one most, and the others' do not
    # depend on it.
    prepared = all_gather_object(own, group)
    problems = {item: prepared[item.destination][item.source] for item in transfers}
    possible = [item for item in transfers if problems[item] is None]
    outcomes = transfer(possible, lambda _: path, lambda item: find_copies_directory(directory, item.source), group)
    problems |= dict(zip(possible, outcomes, strict=True))
    return [
        f"rank {item.destination} has no copy of the part of rank {item.source}: {problem}"
        for item, problem in problems.items()
        if problem is not None
    ]


def _prepare(root: Path) -> str | None:
    """Make a directory of copies, and tidy it up; why that failed, None where it did not."""
    try:
        root.mkdir(exist_ok=True)
        settle_leftovers(root)
    except OSError as error:
        return f"{error.filename or root}: {error.strerror or error}"
    return None


def find_oldest(directory: Path, group: Group) -> int | None:
    """The iteration of the oldest save of which every member of `group` has its part in its directory; the same on all
    of them. Every member calls this."""
    own = _list_offers(directory)
    common = set(own).intersection(*all_gather_object(list(own), group))
    oldest = min((own[identity] for identity in common), default=None, key=lambda offer: offer.number)
    return None if oldest is None else oldest.iteration


def remove_others(directory: Path, iterations: Collection[int], keeps_copies_of: Collection[int] = ()) -> None:
    """Remove this rank's parts of all saves except these iterations', once every rank has its part of them, and all
    copies except of these iterations and of the ranks in keeps_copies_of. Raises StorageError."""
    kept = [find_copies_directory(directory, rank) for rank in keeps_copies_of]
    for root in (directory, *kept):
        for other in saved_iterations(root):
            if other not in iterations:
                remove_checkpoint(root, other)
    for root in directory.glob("copy_of_rank_*"):
        if root not in kept:
            with storage_errors(f"removing {root}"):
                shutil.rmtree(root)


# ---- loading


def find(
    directory: Path,
    layout: int,
    group: Group,
    is_wanted: Callable[[Offer], bool],
) -> tuple[FoundPart | None, list[str]]:
    """This rank's part of the newest save of which every member of `group` has an undamaged one in its directory, or
    can get one from another member, and why a newer one was passed over. Every member calls this and gets the same
    answer.

    layout: compute_layout() of this run. is_wanted: asked on the first member before the files are read.
    """
    own = _list_offers(directory)
    everyone = all_gather_object(own, group)
    # The newest save may be only on other nodes: where ranks have changed places, or come back to where they were
    # before, they have only older parts, or none.
    elsewhere = {part.save: part.offer for part in _list_elsewhere(directory, range(group.size()))}
    known: dict[str, Offer] = {}
    for offers in [*all_gather_object(elsewhere, group), *everyone]:
        known |= offers
    passed_over: list[str] = []
    for identity in sorted(known, key=lambda identity: (known[identity].number, identity), reverse=True):
        offer = known[identity]
        what = f"the local checkpoint of iteration {offer.iteration}"
        # Before anything is told: one that no rank would take is no loss.
        if not on_first_rank(group, lambda offer=offer: is_wanted(offer)):  # type: ignore[misc]
            continue
        if offer.layout != layout:
            passed_over.append(f"{what} was written in another layout")
            continue
        lacking = [rank for rank, part in enumerate(everyone) if identity not in part]
        places = _find_places(directory, identity, lacking, group)
        if homeless := [rank for rank in lacking if rank not in places]:
            ranks = (
                f"rank {homeless[0]} has" if len(homeless) == 1 else f"{len(homeless)} ranks, {homeless[0]} first, have"
            )
            passed_over.append(f"{ranks} no file of {what}; was a node replaced?")
            continue
        path = iteration_directory(directory, offer.iteration)
        problem = _find_damage(path, identity) if identity in own else None
        problems = {rank: text for rank, text in enumerate(all_gather_object(problem, group)) if text is not None}
        places |= _find_places(directory, identity, sorted(problems), group)
        moved, problems = _fetch(directory, dict.fromkeys(lacking, "") | problems, places, group)
        if problems:
            passed_over.append(f"{what} cannot be loaded: {problems[min(problems)]}")
            continue
        said = tuple(f"rank {rank} takes its file of {what} from rank {source}" for rank, source in moved.items())
        found = FoundCheckpoint(path, with_everyone(group, lambda: read_manifest(path)))  # noqa: B023 - called at once
        return FoundPart(found, offer.is_shared, said), passed_over
    return None, passed_over


def load(tensors: ShardedStateDict, part: FoundPart, *, group: Group, replicas: Sequence[Group]) -> None:
    """Fill the tensors of all members of `group`, the same ones as of the save. Raises CheckpointError on every member;
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
    """Return which part of a tensor this is, and in which form."""
    boxes = [block.box for block in tensor.blocks]
    return f"{tensor.global_shape} {tensor.local_shape} {tensor.dtype} {boxes}"


def _divide(tensors: ShardedStateDict, replicas: Sequence[Group]) -> SharedReads:
    """Return who writes and reads what of which all members of a group have the same part; the same for saving and
    loading."""
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


def _find_damage(path: Path, identity: str) -> str | None:
    """Return why a part's files are not as they were written for this save; None where they are."""
    # What was fetched for another save, which then lacked something else, may have taken its place.
    if identity not in _list_offers(path.parent):
        return f"{path} was replaced by another save's"
    try:
        verify_files(path, read_manifest(path))
    except (CheckpointError, StorageError) as error:
        return str(error)
    return None


# ---- parts that lie elsewhere


class _PartLocation(NamedTuple):
    """Place of a part on another rank's node, or on the local one outside the rank's directory."""

    holder: int
    """A rank that sees it."""
    path: Path


class _PartElsewhere(NamedTuple):
    """A part on this rank's node, outside its directory or as a copy of another's."""

    save: str
    owner: int
    """The rank whose part it is."""
    offer: Offer
    path: Path


def _list_elsewhere(directory: Path, owners: Collection[int]) -> list[_PartElsewhere]:
    """Parts of these ranks on this rank's node, except for its parts in its directory."""
    place = directory.parent
    found = []
    for root in sorted([*place.glob("rank_*"), *place.glob("rank_*/copy_of_rank_*")]):
        owner = _PART_OWNER.fullmatch(root.name)
        if owner is None or int(owner[1]) not in owners or root == directory:
            continue
        for save, offer in _list_offers(root).items():
            found.append(_PartElsewhere(save, int(owner[1]), offer, iteration_directory(root, offer.iteration)))
    return found


def _find_places(directory: Path, identity: str, owners: Sequence[int], group: Group) -> dict[int, list[_PartLocation]]:
    """Return where parts of a save lie elsewhere: rank whose part it is -> places, in the order in which to try
    them."""
    if not owners:
        return {}
    rank = group.rank()
    seen = _list_elsewhere(directory, owners)
    own = [(part.owner, _PartLocation(rank, part.path)) for part in seen if part.save == identity]
    places: dict[int, list[_PartLocation]] = {}
    for owner, place in (entry for part in all_gather_object(own, group) for entry in part):
        places.setdefault(owner, []).append(place)
    for owner, found in places.items():
        found.sort()
        # Each asks another rank where several see all of them, and itself where it sees its part.
        first = owner % len(found)
        places[owner] = sorted(found[first:] + found[:first], key=lambda place: place.holder != owner)  # noqa: B023
    return places


def _fetch(
    directory: Path, problems: Mapping[int, str], places: Mapping[int, list[_PartLocation]], group: Group
) -> tuple[dict[int, int], dict[int, str]]:
    """Copy parts into the directories of the ranks that have a problem with theirs; returns for each the rank it has it
    from now, or the problem that is left, the same on every member."""
    left, sources = dict(problems), {}
    untried = {rank: list(places.get(rank, ())) for rank in left}
    # What is missing shows when the copy begins.
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
    while chosen := {rank: untried[rank].pop(0) for rank in sorted(left) if untried[rank]}:
        transfers = [PartTransfer(place.holder, rank) for rank, place in chosen.items()]
        outcomes = transfer(transfers, lambda item: chosen[item.destination].path, lambda _: directory, group)  # noqa: B023
        for item, problem in zip(transfers, outcomes, strict=True):
            if problem is None:
                sources[item.destination] = item.source
                del left[item.destination]
                continue
            rank, path = item.destination, chosen[item.destination].path
            if problem not in left[rank]:
                left[rank] = "; ".join(filter(None, (left[rank], problem)))
            # All ranks of a node see the same files there: what lies elsewhere may be whole.
            untried[rank].sort(key=lambda place: place.path == path)  # noqa: B023 - called at once
    return sources, left
