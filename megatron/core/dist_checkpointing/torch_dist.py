# SPDX-License-Identifier: Apache-2.0
"""Tensors on disk in the format of torch.distributed.checkpoint (DCP): `.metadata` and one `__<rank>_0.distcp` per
process.

Files and plans are torch's; what is different from its reader and writer:
- values are written and read in slices, and never all of a file's at once (shard_files.py);
- each file's checksum is computed while it is written, for the manifest;
- a full or failing disk is reported with its path;
- `.metadata` is a pickle: it is read by an unpickler that knows only what belongs there.

tensor_reading.py reads them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from megatron.core.collectives import all_gather_object
from megatron.core.dist_checkpointing.crash_points import reach
from megatron.core.dist_checkpointing.durable import create_file
from megatron.core.dist_checkpointing.manifest import FileRecord
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.save_plan import choose_all_writers, find_block, list_boxes, sort_boxes
from megatron.core.dist_checkpointing.shard_files import BoxSource, write_boxes
from megatron.core.errors import CheckpointError, MegatronError, StorageError
from megatron.core.process_groups_config import Group, SingleRankGroup, torch_group

METADATA_NAME = ".metadata"


@dataclass(frozen=True)
class WritePlan:
    """Division of the writing in one save, as this process sees it."""

    share: SavePlan
    """The boxes that this process writes."""
    contents: Metadata | None
    """The table of contents without places in files; on the first process only."""


@dataclass(frozen=True)
class Written:
    """Record of what one process has written."""

    results: list[WriteResult]
    """Position in its files of each box."""
    records: dict[str, FileRecord]
    """Size and checksum of its files."""


def write_tensors(directory: Path, tensors: ShardedStateDict, group: Group) -> dict[str, FileRecord]:
    """Write the tensors of all members of `group` into an empty directory; flushed to the device on return.

    Returns the records of the files that this process wrote. Raises, on every member, StorageError when any of them
    could not write.
    """
    plan = plan_write(directory, tensors, group)
    records: dict[str, FileRecord] = {}

    def write() -> list[WriteResult]:
        written = write_share(directory, plan.share, functools.partial(find_block, tensors))
        records.update(written.records)
        return written.results

    def finish(results: list[list[WriteResult]]) -> None:
        records.update(write_contents(directory, plan, results))

    with dcp_errors("writing", directory):
        join_ranks(group).all_reduce("write", write, finish)
    return records


def plan_write(directory: Path, tensors: ShardedStateDict, group: Group) -> WritePlan:
    """Divide the writing among the members of `group`, which all call this. Raises CheckpointError on every member
    where the boxes do not make up the tensors."""
    writer = _ContentsWriter(directory)
    contents: list[Metadata] = []

    def plan_all(plans: list[SavePlan]) -> list[SavePlan]:
        plans, metadata = choose_all_writers(plans)
        contents.append(metadata)
        return writer.prepare_global_plan(plans)

    with dcp_errors("writing", directory):
        share = join_ranks(group).reduce_scatter("plan", functools.partial(list_boxes, tensors), plan_all)
    return WritePlan(sort_boxes(share), contents[0] if contents else None)


class RepeatedPlan:
    """The plan of consecutive saves. It is reused as long as no process's tensors change their structure; their values,
    and their places, may change."""

    def __init__(self) -> None:
        self._structure: list[Any] = []
        self._plan: WritePlan | None = None

    def make(self, directory: Path, tensors: ShardedStateDict, group: Group) -> tuple[WritePlan, bool]:
        """Return the plan, and whether it is a new one; like plan_write()."""
        structure = [
            (tensor.key, tensor.dtype, tensor.global_shape, tensor.blocks, tensor.is_copy, tensor.valid_rows)
            for tensor in tensors.values()
        ]
        is_same = self._plan is not None and structure == self._structure
        if not all(all_gather_object(is_same, group)):
            self._plan = None
            self._plan = plan_write(directory, tensors, group)
            self._structure = structure
            return self._plan, True
        assert self._plan is not None
        # Where boxes lie in the files is written into it.
        contents = None if self._plan.contents is None else dataclasses.replace(self._plan.contents)
        return WritePlan(self._plan.share, contents), False


def write_share(directory: Path, share: SavePlan, source: BoxSource) -> Written:
    """Write and flush the boxes of one process. Raises OSError."""
    # As torch's writer calls it, which has given each process a prefix.
    path = directory / f"{share.storage_data.prefix}0{DEFAULT_SUFFIX}"
    results, record = write_boxes(path, share.items, source)
    return Written(results, {path.name: record})


def write_contents(directory: Path, plan: WritePlan, results: list[list[WriteResult]]) -> dict[str, FileRecord]:
    """On the first process: write the table of contents, given what all processes have written. Raises OSError."""
    assert plan.contents is not None, "only the first process of a group has the table of contents"
    writer = _ContentsWriter(directory)
    names = {name: name for name in plan.contents.state_dict_metadata}
    writer.finish(plan.contents, [[_renew(result, names) for result in share] for share in results])
    return writer.files.records


def _renew(result: WriteResult, names: dict[str, str]) -> WriteResult:
    """The same of fresh objects. A pickle tells which of its objects are one and the same, and the bytes of the table
    of contents shall not depend on how results came here."""
    index, place = result.index, result.storage_data
    offset = None if index.offset is None else torch.Size(list(index.offset))
    storage = dataclasses.replace(place, relative_path=sys.intern(place.relative_path))
    return WriteResult(MetadataIndex(names[index.fqn], offset, index.index), result.size_in_bytes, storage)


class _RecordingFileSystem(FileSystem):
    """torch's file system; remembers each file's record."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with create_file(Path(path), "metadata") as file:
            yield file
        self.records[Path(path).name] = FileRecord(file.bytes_written, file.crc32)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        reach("metadata-renamed")
        # `.metadata` is written under a temporary name first.
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class _ContentsWriter(FileSystemWriter):
    """torch's writer of the table of contents; values are written by shard_files.py."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, single_file_per_rank=True, sync_files=True, overwrite=False)
        self.fs = self.files = _RecordingFileSystem()

    def storage_meta(self) -> StorageMeta | None:
        """No paths and no random ids: a checkpoint's bytes are a function of what is in it."""
        return StorageMeta()


def join_ranks(group: Group) -> _DistWrapper:
    """torch's collectives of objects in which an error of one process is raised on all, as dcp.save() uses them."""
    found = None if isinstance(group, SingleRankGroup) else torch_group(group)
    return _DistWrapper(found, use_dist=found is not None, coordinator_rank=0)


@contextlib.contextmanager
def dcp_errors(doing: Literal["reading", "writing"], directory: Path) -> Iterator[None]:
    """DCP raises one exception, no subclass of Exception, with all processes' exceptions in it; find the one that
    matters."""
    try:
        yield
    except CheckpointException as failure:
        causes = {rank: cause for rank, (cause, _) in failure.failures.items()}
        # Several ranks fail at once when one of them did; an error of ours, or the user's Ctrl-C, tells more than the
        # rest.
        for cause in causes.values():
            if isinstance(cause, MegatronError | KeyboardInterrupt):
                raise cause from None
        for rank, cause in causes.items():
            if isinstance(cause, OSError):
                where = f"{os.fspath(cause.filename)}: " if cause.filename else ""
                reason = cause.strerror or cause
                raise StorageError(f"{doing} {directory} failed on rank {rank}: {where}{reason}") from failure
        rank, cause = next(iter(causes.items()))
        error_type = StorageError if doing == "writing" else CheckpointError
        reason = f"{type(cause).__name__}: {str(cause)[:300]}"
        raise error_type(f"{doing} {directory} failed on rank {rank}: {reason}") from failure
