# SPDX-License-Identifier: Apache-2.0
"""Save and load a whole checkpoint: tensors of all processes, JSON documents, and the files copied along.

iter_0000010/
  .metadata  __0_0.distcp  ...    tensors (torch_dist.py)
  <name>.json                     documents: numbers, texts, lists, dictionaries
  tokenizer/...                   attachments: files copied as they are
  tensors.json                    rows without padding of padded tensors
  metadata.json                   format, as upstream writes it
  manifest.json                   sizes and checksums of all of them: written last
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX
from torch.distributed.checkpoint.metadata import Metadata

from megatron.core.dist_checkpointing.agreement import on_every_rank, on_first_rank
from megatron.core.dist_checkpointing.crash_points import reach
from megatron.core.dist_checkpointing.directory import (
    abandon_save,
    begin_save,
    begin_save_alone,
    commit_save,
    commit_save_alone,
    settle_leftovers,
)
from megatron.core.dist_checkpointing.directory_lock import DirectoryLock
from megatron.core.dist_checkpointing.durable import storage_errors, write_file
from megatron.core.dist_checkpointing.finding import FoundCheckpoint, Verify, find_checkpoint
from megatron.core.dist_checkpointing.manifest import FileRecord, Manifest, check_lengths, read_manifest, record_file
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.tensor_reading import read_tensors
from megatron.core.dist_checkpointing.torch_dist import write_tensors
from megatron.core.dist_checkpointing.validation import KeyReport
from megatron.core.dist_checkpointing.verification import Look, find_together
from megatron.core.errors import CheckpointError
from megatron.core.process_groups_config import Group

# Put here by a table of upstream's names; declared for type checkers.
StrictHandling: Any
check_is_distributed_checkpoint: Any
get_default_load_sharded_strategy: Any
get_default_save_sharded_strategy: Any
load_common_state_dict: Any
load_content_metadata: Any
load_tensors_metadata: Any

TENSORS_DOCUMENT = "tensors"
FORMAT_DOCUMENT = {"metadata": {"sharded_backend": "torch_dist", "sharded_backend_version": 1}}
"""Document with the name of the format, by its name."""


def save(
    tensors: ShardedStateDict,
    root: Path,
    iteration: int,
    *,
    documents: Mapping[str, Any],
    attachments: Mapping[str, Path] | None = None,
    group: Group,
    lock: DirectoryLock | None = None,
    is_alone: bool = False,
) -> Path:
    """Save a checkpoint of all members of `group`; it becomes visible when it is complete. Returns its directory.

    documents: name -> what to store as <name>.json; attachments: name in the checkpoint -> file to copy; both are
    taken from the first member. lock: of `root`, on the first member; the save fails where it has been lost. is_alone:
    `root` is the directory of this checkpoint, missing or empty, instead of one for all iterations. Raises StorageError
    on every member when it failed; checkpoints that were there stay as they are.
    """

    def write(temporary: Path) -> _Rest:
        records: dict[str, FileRecord] = {}
        for written in on_every_rank(group, lambda: write_tensors(temporary, tensors, group)):
            records |= written
        reach("tensors-written")
        accompany = gather_documents(gather_valid_rows(tensors, group), documents, attachments or {}, group)
        return lambda directory: records | accompany(directory)

    return save_files(write, root, iteration, group=group, lock=lock, is_alone=is_alone)


_Rest = Callable[[Path], Mapping[str, FileRecord]]
"""Last part of a save, run by the first member when all others have written: write the rest, and return the records of
all files."""


@dataclasses.dataclass(frozen=True)
class SaveTarget:
    """Place of one save: how it begins there and becomes visible, both refused where `lock` is lost."""

    root: Path
    iteration: int
    world_size: int
    lock: DirectoryLock | None = None
    is_alone: bool = False
    """`root` is the directory of this checkpoint; see save."""

    def begin(self) -> Path:
        """Make the directory to write into. Raises StorageError, CheckpointError."""
        if self.is_alone:
            return begin_save_alone(self.root)
        if self.lock is not None:
            self.lock.check()
            # What a save of before could not remove: its disk failed, and may have recovered.
            with contextlib.suppress(OSError):
                settle_leftovers(self.root)
        return begin_save(self.root, self.iteration)

    def finish(self, temporary: Path, write: _Rest) -> Path:
        """Write the rest and make the checkpoint visible. Raises StorageError."""
        with storage_errors(f"writing {temporary}"):
            manifest = Manifest(self.iteration, uuid.uuid4().hex, self.world_size, write(temporary))
            if self.is_alone:
                return commit_save_alone(temporary, manifest)
            if self.lock is None:
                return commit_save(temporary, manifest)
            # Once more: writing may have taken longer than others wait for a sign of life of a process that was
            # stopped.
            self.lock.check()
            path = commit_save(temporary, manifest)
            self.lock.note_save()
            return path


def save_files(
    write: Callable[[Path], _Rest],
    root: Path,
    iteration: int,
    *,
    group: Group,
    lock: DirectoryLock | None = None,
    is_alone: bool = False,
) -> Path:
    """Save other files, as complete or invisible; return the directory.

    write: called by every member of `group` with the directory to write into, returns what the first member calls at
    the end with it, to write the rest and to return the records of all files. lock, is_alone: as for `save`. Raises
    StorageError on every member when it failed.
    """
    target = SaveTarget(root, iteration, group.size(), lock, is_alone)
    # One rank chooses the name; all write into the same directory.
    temporary = on_first_rank(group, target.begin)
    try:
        reach("tensors-next")
        rest = write(temporary)
        # Every rank has written and flushed its files by now (`write` waits for all), so the manifest can promise them.
        return on_first_rank(group, lambda: target.finish(temporary, rest))
    except BaseException:
        # BaseException: an interrupt from the keyboard leaves half a checkpoint, too.
        if group.rank() == 0:
            abandon_save(temporary)
        raise


def gather_valid_rows(tensors: ShardedStateDict, group: Group) -> dict[str, int]:
    """Rows without padding of all padded tensors, by key; every member of `group` calls this."""
    # No single rank has every padded tensor: the embedding is on the first stage, the output layer on the last.
    valid_rows: dict[str, int] = {}
    for rows in on_every_rank(group, lambda: _valid_rows(tensors)):
        valid_rows |= rows
    return valid_rows


def gather_documents(
    valid_rows: Mapping[str, int], documents: Mapping[str, Any], attachments: Mapping[str, Path], group: Group
) -> Callable[[Path], dict[str, FileRecord]]:
    """Return what is stored next to the tensors, as it is now; every member of `group` calls this.

    Returns what the first member calls with the directory of the save; it writes them and returns their records. It
    raises OSError.
    """
    own = {TENSORS_DOCUMENT: {"valid_rows": valid_rows}, **FORMAT_DOCUMENT}
    # As text already: training may change a document before it is written.
    texts: dict[str, str] = {}

    def render() -> None:
        texts.update({name: json.dumps(content, indent=1) + "\n" for name, content in {**documents, **own}.items()})

    on_first_rank(group, render)

    def write(directory: Path) -> dict[str, FileRecord]:
        records = write_documents(directory, texts)
        reach("documents-written")
        records |= copy_attachments(directory, attachments)
        reach("attachments-copied")
        return records

    return write


def find(root: Path, iteration: int | None, group: Group, *, leave_tensors: bool = False) -> FoundCheckpoint | None:
    """The checkpoint to load, as the first member of `group` finds it (see find_checkpoint); all members must see
    it. leave_tensors: see agree()."""
    return agree(functools.partial(find_checkpoint, root, iteration), group, leave_tensors=leave_tensors)


def agree(
    look: Look, group: Group, *, leave_tensors: bool = False, damaged: Mapping[Path, str] | None = None
) -> FoundCheckpoint | None:
    """Return what `look` finds on the first member of `group`, on every one; all of them verify its files. Raises
    CheckpointError where one does not see it.

    leave_tensors: files of tensors in our format are left to load(), which verifies what it reads. damaged: checkpoints
    that are known not to be good, and why.
    """

    def look_past(verify: Verify) -> FoundCheckpoint | None:
        def verify_known(path: Path, manifest: Manifest) -> None:
            if damaged and path in damaged:
                raise CheckpointError(damaged[path])
            check_lengths(path, manifest)
            later = _list_tensor_files(manifest) if leave_tensors else {}
            now = {name: record for name, record in manifest.files.items() if name not in later}
            verify(path, dataclasses.replace(manifest, files=now))

        return look(verify_known)

    found = find_together(look_past, group)
    if found is None:
        return None
    on_every_rank(group, lambda: _check_same(found, group.rank()))
    return dataclasses.replace(found, unverified=_list_tensor_files(found.manifest) if leave_tensors else {})


def _list_tensor_files(manifest: Manifest) -> dict[str, FileRecord]:
    """The records of the files of tensors in our format."""
    if f"{TENSORS_DOCUMENT}.json" not in manifest.files:
        return {}
    return {name: record for name, record in manifest.files.items() if name.endswith(DEFAULT_SUFFIX)}


def load(
    tensors: ShardedStateDict,
    checkpoint: FoundCheckpoint,
    group: Group,
    *,
    may_lack: bool = False,
    may_have_more: bool = False,
    replicas: Sequence[Group] = (),
    contents: Metadata | None = None,
) -> KeyReport:
    """Fill the tensors of all members of `group`; returns, on every member, what was tolerated.

    may_lack: tensors that the checkpoint lacks keep their values, may_have_more: parameters that no member has are left
    out; see validation.judge_wanted. replicas: groups whose members share the reading, see load_exchange.py. contents:
    see `read_tensors`. Files that are not verified yet are so on the way. Raises CheckpointError on every member,
    DamagedCheckpointError where a file is damaged; the tensors may then hold anything.
    """
    return read_tensors(
        checkpoint.path, tensors, group, valid_rows=read_valid_rows(checkpoint.path), may_lack=may_lack,
        may_have_more=may_have_more, unverified=checkpoint.unverified, replicas=replicas, contents=contents,
    )  # fmt: skip


def read_document(checkpoint: Path, name: str) -> Any:
    """The content of <name>.json. Raises CheckpointError when it is missing or no JSON."""
    path = checkpoint / f"{name}.json"
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def read_valid_rows(checkpoint: Path) -> dict[str, int]:
    """Rows without padding of the padded tensors in a checkpoint, by key. Raises CheckpointError."""
    document = read_document(checkpoint, TENSORS_DOCUMENT)
    rows = document.get("valid_rows") if isinstance(document, dict) else None
    if not isinstance(rows, dict) or not all(type(count) is int and count >= 0 for count in rows.values()):
        raise CheckpointError(f"{checkpoint / TENSORS_DOCUMENT}.json is not as it was written: it holds no valid_rows")
    return rows


def _valid_rows(tensors: ShardedStateDict) -> dict[str, int]:
    return {key: tensor.valid_rows for key, tensor in tensors.items() if tensor.valid_rows is not None}


def write_documents(directory: Path, texts: Mapping[str, str]) -> dict[str, FileRecord]:
    """Write each text as <name>.json; return their records. Raises OSError."""
    records = {}
    for name, text in texts.items():
        path = directory / f"{name}.json"
        write_file(path, text.encode(), "document")
        records[path.name] = record_file(path)
    return records


def copy_attachments(directory: Path, attachments: Mapping[str, Path]) -> dict[str, FileRecord]:
    """Copy files to their names in the directory; return their records. Raises OSError."""
    records = {}
    for name, source in attachments.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, source.read_bytes())
        records[name] = record_file(path)
    return records


def _check_same(found: FoundCheckpoint, rank: int) -> None:
    """Raise CheckpointError when this process sees another checkpoint at the path, or none."""
    manifest = read_manifest(found.path)
    # Two nodes with a local disk of the same name would each load another checkpoint.
    if manifest.run_id != found.manifest.run_id:
        raise CheckpointError(
            f"{found.path}: rank {rank} sees another checkpoint there than rank 0; is it a shared directory?"
        )
