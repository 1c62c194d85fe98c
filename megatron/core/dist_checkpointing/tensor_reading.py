# SPDX-License-Identifier: Apache-2.0
"""Tensors filled from the files of torch.distributed.checkpoint, in one pass over what is read.

on every process                                         together
read the table of contents, plan what to read       ->   do checkpoint and model fit?
with replicas: which of it this process reads for all of them (load_exchange.py)
say which boxes it reads                            ->   who verifies which: each box once, by a process that reads it
read boxes, fill tensors, compute checksums         ->   are all files as the manifest says?
with replicas: send what was read, receive the rest

What is read is verified in the same pass, so that the tensors have been filled where damage is found: the checkpoint is
then refused, and loading another one fills them again.
"""

from __future__ import annotations

import io
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron.core.dist_checkpointing.checksums import FileSegment, join_checksums, list_segments
from megatron.core.dist_checkpointing.load_exchange import Read, SharedReads, choose_readers, exchange
from megatron.core.dist_checkpointing.manifest import DamagedCheckpointError, FileRecord, compare_checksums
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, describe_chunk
from megatron.core.dist_checkpointing.safe_pickle import read_metadata, refuse_outside
from megatron.core.dist_checkpointing.saved_boxes import RenamedTable, SavedSlice
from megatron.core.dist_checkpointing.shard_files import Fill, SavedBox, compute_range_checksum, read_boxes
from megatron.core.dist_checkpointing.torch_dist import METADATA_NAME, dcp_errors, join_ranks
from megatron.core.dist_checkpointing.validation import KeyReport, WantedTensors, judge_wanted, list_shapes, list_wanted
from megatron.core.errors import CheckpointError
from megatron.core.process_groups_config import Group

_THREADS = 4
"""One waits for the disk while another computes a checksum."""


def read_tensors(
    directory: Path,
    tensors: ShardedStateDict,
    group: Group,
    *,
    valid_rows: Mapping[str, int] | None = None,
    translate: Callable[[Metadata], RenamedTable] | None = None,
    may_lack: bool = False,
    may_have_more: bool = False,
    unverified: Mapping[str, FileRecord] | None = None,
    replicas: Sequence[Group] = (),
    contents: Metadata | None = None,
) -> KeyReport:
    """Fill the tensors of all members of `group` from the checkpoint in `directory`; returns what was tolerated.

    valid_rows: see validation.list_wanted. translate: gives the table of contents our names, where the checkpoint has
    others. may_lack, may_have_more: see validation.judge_wanted. unverified: files that are to be compared with
    these records on the way; they are then read whole, each byte of them by one process at least. replicas: groups
    whose members read a share each of what all of them want, and exchange it. contents: the checkpoint's table of
    contents, where it has been read before. Raises CheckpointError on every member, DamagedCheckpointError where a file
    is not as its record says; the tensors may then be filled with anything.
    """
    own: list[_Plan] = []

    def look() -> WantedTensors:
        metadata = read_metadata(directory / METADATA_NAME) if contents is None else contents
        table = None if translate is None else translate(metadata)
        named = metadata if table is None else table.metadata
        wanted, sources = list_wanted(tensors.values(), list_shapes(named), valid_rows or {})
        found = [(saved, read) for key, saved in sources.items() for read in _list_reads(tensors[key], saved, named)]
        reads = [read if table is None else _read_slice(read, table.slices[saved]) for saved, read in found]
        own.append(_Plan(metadata, named, wanted, reads))
        return wanted

    def judge(everyone: list[WantedTensors]) -> list[KeyReport]:
        """On the first process: do checkpoint and model fit?"""
        saved = own[0].named.state_dict_metadata
        report = judge_wanted(everyone, saved, may_lack=may_lack, may_have_more=may_have_more)
        return [report] * len(everyone)

    with dcp_errors("reading", directory):
        report = join_ranks(group).reduce_scatter("plan", look, judge)
    try:
        with dcp_errors("reading", directory):
            shared = _read_share(directory, group, own[0], unverified or {}, replicas)
    except DamagedCheckpointError as error:
        error.lacking = frozenset(report.lacking)
        raise
    exchange(shared)
    return report


class _Plan(NamedTuple):
    """The part of a checkpoint that one process wants."""

    contents: Metadata
    """The checkpoint's table of contents."""
    named: Metadata
    """The same under our names."""
    wanted: WantedTensors
    reads: list[Read]


def _read_share(
    directory: Path, group: Group, plan: _Plan, unverified: Mapping[str, FileRecord], replicas: Sequence[Group]
) -> SharedReads:
    """Read this process's share and verify the files; returns what is left to exchange."""
    ranks = join_ranks(group)
    boxes: dict[MetadataIndex, _BoxLocation] = {}

    def look_up() -> None:
        # All boxes of files that are verified, otherwise those that are asked for.
        keys = plan.contents.state_dict_metadata if unverified else {read.box_index.fqn for read in plan.reads}
        boxes.update(_list_boxes(directory, plan.contents, keys))

    ranks.all_gather("look up", look_up)
    shared = choose_readers(plan.reads, replicas)
    parts = _list_parts(unverified, boxes)
    mine: list[int] = []
    if unverified:
        numbers = {part.box_index: number for number, part in enumerate(parts) if part.box_index is not None}
        wanted: Counter[int] = Counter()
        for read in shared.own_reads:
            if read.box_index in numbers:
                wanted[numbers[read.box_index]] += read.target.numel()
        mine = ranks.reduce_scatter("share", lambda: wanted, lambda all_wanted: _choose_verifiers(parts, all_wanted))
    jobs = _list_jobs(directory, parts, mine, shared.own_reads, boxes)
    computed = ranks.all_gather("read", lambda: _run(jobs))
    if unverified:
        checksums = {number: crc32 for share in computed for number, crc32 in share.items()}
        segments = [FileSegment(part.name, part.start, part.num_bytes) for part in parts]
        found = join_checksums(segments, [checksums[number] for number in range(len(parts))])
        compare_checksums(directory, unverified, found)
    return shared


# ---- places of tensors


def _list_reads(tensor: ShardedTensor, key: str, metadata: Metadata) -> Iterator[Read]:
    """Yield the parts of the boxes saved under `key` that fill this process's part of the tensor."""
    saved = metadata.state_dict_metadata[key]
    assert isinstance(saved, TensorStorageMetadata)
    for item in create_read_items_for_chunk_list(key, saved, [describe_chunk(block.box) for block in tensor.blocks]):
        assert item.dest_index.index is not None
        target = tensor.block(item.dest_index.index).detach()
        for dim, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        yield Read(item.storage_index, tuple(item.storage_offsets), target)


def _read_slice(read: Read, place: SavedSlice) -> Read:
    """The same read from where the checkpoint keeps the tensor, which may be one layer of a stack."""
    offset = tuple(read.box_index.offset or ())
    if place.layer is None:
        return read._replace(box_index=MetadataIndex(place.key, torch.Size(offset)))
    start = place.starts[offset]
    index = MetadataIndex(place.key, torch.Size((start, *offset)))
    return Read(index, (place.layer - start, *read.offsets), read.target.unsqueeze(0))


class _BoxLocation(NamedTuple):
    """Place of a saved box."""

    name: str
    """Of the file."""
    box: SavedBox


class _VerifiedRange(NamedTuple):
    """A stretch of a file that one process verifies: the archive of a box, or what is none."""

    name: str
    start: int
    num_bytes: int
    box_index: MetadataIndex | None


def _list_boxes(directory: Path, metadata: Metadata, keys: Collection[str]) -> dict[MetadataIndex, _BoxLocation]:
    """File and place of each saved box of these tensors. Raises CheckpointError where one is outside of `directory`."""
    boxes: dict[MetadataIndex, _BoxLocation] = {}
    names: set[str] = set()
    for key in keys:
        tensor = metadata.state_dict_metadata[key]
        if not isinstance(tensor, TensorStorageMetadata):
            continue
        for chunk in tensor.chunks:
            index = MetadataIndex(key, chunk.offsets)
            place = metadata.storage_data[index]
            if place.relative_path not in names:
                refuse_outside(directory, place.relative_path)
                names.add(place.relative_path)
            box = SavedBox(place.offset, place.length, tensor.properties.dtype, tuple(chunk.sizes))
            boxes[index] = _BoxLocation(place.relative_path, box)
    return boxes


def _list_parts(files: Mapping[str, FileRecord], boxes: Mapping[MetadataIndex, _BoxLocation]) -> list[_VerifiedRange]:
    """The files as boxes and what lies between them, each file's in order. The same on all processes."""
    by_file: dict[str, list[tuple[SavedBox, MetadataIndex]]] = {name: [] for name in files}
    for index, (name, box) in boxes.items():
        if name in by_file:
            by_file[name].append((box, index))
    parts: list[_VerifiedRange] = []
    for name in sorted(files):
        own, end = [], 0
        for box, index in sorted(by_file[name], key=lambda entry: entry[0].start):
            # A box that reaches into another one, or beyond the end: reading it raises; bytes count once.
            if box.start < end or box.length < 0 or box.start + box.length > files[name].bytes:
                continue
            own += _list_gap(name, end, box.start)
            own.append(_VerifiedRange(name, box.start, box.length, index))
            end = box.start + box.length
        parts += own + _list_gap(name, end, files[name].bytes)
    return parts


def _list_gap(name: str, start: int, end: int) -> list[_VerifiedRange]:
    return [
        _VerifiedRange(name, start + part.start, part.num_bytes, None) for part in list_segments({name: end - start})
    ]


def _choose_verifiers(parts: Sequence[_VerifiedRange], wanted: Sequence[Mapping[int, int]]) -> list[list[int]]:
    """Numbers of the parts that each process verifies: of those that want the most of a part, and so read it anyway,
    the one with the fewest bytes so far; of all, where nobody wants it.

    wanted: for each process how many elements of which part it reads.
    """
    readers: dict[int, list[int]] = {}
    most: dict[int, int] = {}
    for rank, share in enumerate(wanted):
        for number, count in share.items():
            if count > most.get(number, 0):
                readers[number], most[number] = [], count
            if count == most[number]:
                readers[number].append(rank)
    load = [0] * len(wanted)
    shares: list[list[int]] = [[] for _ in wanted]
    # What only one can take comes first, so that the rest evens it out.
    for number in sorted(range(len(parts)), key=lambda number: len(readers.get(number, load))):
        rank = min(readers.get(number) or range(len(load)), key=load.__getitem__)
        load[rank] += parts[number].num_bytes
        shares[rank].append(number)
    return shares


# ---- reading


@dataclass(frozen=True)
class _Job:
    """Work that one thread does without a pause."""

    path: Path
    start: int
    box: SavedBox | None
    num_bytes: int
    number: int | None
    """Of the part whose checksum is wanted."""
    fills: Sequence[Fill]
    is_unverified: bool
    """This process or another one is verifying the file: what is wrong with it is damage."""

    def run(self) -> int | None:
        """Fill the tensors; returns the checksum. Raises OSError, CheckpointError."""
        try:
            # Opened for each: the system reads ahead of one place in an open file.
            with io.FileIO(self.path) as file:
                if self.box is not None:
                    return read_boxes(file, self.box, self.fills, verify=self.number is not None)
                return compute_range_checksum(file, self.start, self.num_bytes)
        except CheckpointError as error:
            if not self.is_unverified or isinstance(error, DamagedCheckpointError):
                raise
            # Its length was right when the checkpoint was chosen.
            what = str(error).removeprefix(str(self.path)).lstrip(": ")
            raise DamagedCheckpointError(f"{self.path} is damaged ({what})") from None
        except OSError as error:
            error.filename = error.filename or str(self.path)
            if not self.is_unverified:
                raise
            raise DamagedCheckpointError(f"{error.filename} cannot be read: {error.strerror or error}") from error


def _list_jobs(
    directory: Path,
    parts: Sequence[_VerifiedRange],
    mine: Sequence[int],
    reads: Sequence[Read],
    boxes: Mapping[MetadataIndex, _BoxLocation],
) -> list[_Job]:
    """Return what this process reads and verifies, from start to end of each file, as a disk reads fastest."""
    fills: dict[MetadataIndex, list[Fill]] = {}
    for read in reads:
        fills.setdefault(read.box_index, []).append(Fill(read.offsets, read.target))
    unverified = {part.name for part in parts}
    jobs = []
    for number in mine:
        part = parts[number]
        box = None if part.box_index is None else boxes[part.box_index].box
        own = [] if part.box_index is None else fills.pop(part.box_index, [])
        jobs.append(_Job(directory / part.name, part.start, box, part.num_bytes, number, own, True))
    for index, own in fills.items():
        name, box = boxes[index]
        jobs.append(_Job(directory / name, box.start, box, box.length, None, own, name in unverified))
    return sorted(jobs, key=lambda job: (job.path, job.start))


def _run(jobs: Sequence[_Job]) -> dict[int, int]:
    """Do all of it by several threads; checksums by the number of the part."""
    checksums: dict[int, int] = {}
    waiting = deque(jobs)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                job = waiting.popleft()
            crc32 = job.run()
            if job.number is not None and crc32 is not None:
                checksums[job.number] = crc32

    with ThreadPoolExecutor(max(1, min(_THREADS, len(jobs)))) as threads:
        try:
            for running in [threads.submit(work) for _ in range(min(_THREADS, len(jobs)))]:
                running.result()
        finally:
            # After an error, or Ctrl-C, the others end with what they are reading.
            waiting.clear()
    return checksums
