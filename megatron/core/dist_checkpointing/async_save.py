# SPDX-License-Identifier: Apache-2.0
"""Saving while training goes on: a snapshot is taken, and the rest happens beside the run.

    on the thread of training                 on a thread of each process
    begin: the directory, who writes what
    snapshot into host memory            ->   write it here, or in a separate process
    training goes on                          report to the first process, through the job's key-value store
                                              first process: when all have reported, write the table of contents, the
                                              documents and the manifest, rename, move the tracker; report to all
    poll() or wait()                     <-   the outcome

No thread takes part in a collective, which must come in the same order everywhere and would fall between training's; no
step waits for a device or for another process. What becomes visible is what serialization.save() writes, byte for byte
but for the manifest's run_id.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from megatron.core.dist_checkpointing.agreement import on_first_rank
from megatron.core.dist_checkpointing.crash_points import reach
from megatron.core.dist_checkpointing.directory import abandon_save
from megatron.core.dist_checkpointing.directory_lock import DirectoryLock
from megatron.core.dist_checkpointing.durable import storage_errors
from megatron.core.dist_checkpointing.manifest import FileRecord
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.serialization import SaveTarget, gather_documents, gather_valid_rows
from megatron.core.dist_checkpointing.snapshot import SnapshotMemory, take_snapshot
from megatron.core.dist_checkpointing.torch_dist import (
    RepeatedPlan,
    WritePlan,
    Written,
    write_contents,
    write_share,
)
from megatron.core.dist_checkpointing.writer_process import WriterProcess
from megatron.core.errors import MegatronError, StorageError
from megatron.core.process_groups_config import Group, rendezvous_store

_LOOK_SECONDS = 0.02
"""Between two looks into the store, each some 0.1 ms. Waiting inside of it would keep other threads from it."""
_FIRST_SEARCH_SECONDS, _MOST_SEARCH_SECONDS = 1.0, 30.0
"""After so long, and then at growing intervals, it is looked whether those who are waited for are still there."""


@dataclass(frozen=True)
class SaveResult:
    """Result of a save, the same on all processes."""

    iteration: int
    path: Path | None
    """The complete checkpoint; None where there is none."""
    problem: str | None
    """Reason that there is none."""
    stalled_seconds: float
    """Seconds that training stood still for it: this process's figure, like the next."""
    elapsed_seconds: float

    def check(self) -> Path:
        """The directory of the checkpoint. Raises StorageError where there is none."""
        if self.path is None:
            raise StorageError(self.problem or "unknown")
        return self.path


class AsyncSaver:
    """Saves of one run, one at a time. All members of a group call `start`, and then `wait`."""

    def __init__(
        self, process: WriterProcess | None, list_ended: Callable[[Sequence[int]], list[int]] = lambda ranks: []
    ) -> None:
        """process: writes for this one; None: a thread does. list_ended: which of some ranks have ended; the save under
        way fails when one has that has not reported."""
        self._process, self._list_ended = process, list_ended
        self._memory = SnapshotMemory()
        self._plan = RepeatedPlan()
        self._valid_rows: dict[str, int] = {}
        self._save: _Save | None = None

    def prepare(self) -> None:
        """Start what takes a while to be ready. Raises StorageError."""
        if self._process is not None:
            with storage_errors("starting the process that writes checkpoints"):
                self._process.start()

    def start(
        self,
        tensors: ShardedStateDict,
        root: Path,
        iteration: int,
        *,
        documents: Mapping[str, Any],
        attachments: Mapping[str, Path] | None = None,
        group: Group,
        lock: DirectoryLock | None = None,
        is_alone: bool = False,
    ) -> None:
        """Begin a save; takes the arguments of serialization.save(). The tensors may change when this returns.

        The one before must have come to its outcome. Raises StorageError, on every member, when the save cannot begin,
        and CheckpointError for a separate directory that holds something else.
        """
        assert self._save is None, "wait() for the save before"
        began_at = time.monotonic()
        target = SaveTarget(root, iteration, group.size(), lock, is_alone)
        temporary = on_first_rank(group, target.begin)
        try:
            reach("tensors-next")
            plan, is_new = self._plan.make(temporary, tensors, group)
            if is_new:
                self._valid_rows = gather_valid_rows(tensors, group)
            accompany = gather_documents(self._valid_rows, documents, attachments or {}, group)
        except BaseException:
            if group.rank() == 0:
                abandon_save(temporary)
            raise
        # From here on what fails, fails on one process, which tells the others in its report.
        write = self._snapshot(temporary, tensors, plan)

        def complete(shares: Sequence[Written]) -> Path:
            """On the first process when all have written."""

            def write_rest(directory: Path) -> dict[str, FileRecord]:
                records = {name: record for share in shares for name, record in share.records.items()}
                records |= write_contents(directory, plan, [share.results for share in shares])
                return records | accompany(directory)

            return target.finish(temporary, write_rest)

        self._save = _Save(write, complete, temporary, target, group.rank(), began_at, self._list_ended)
        self._save.start()

    def _snapshot(self, temporary: Path, tensors: ShardedStateDict, plan: WritePlan) -> Callable[[], Written]:
        """Take the snapshot and return what writes it; an error is raised only there."""
        try:
            self.prepare()
            snapshot = take_snapshot(self._memory, tensors, plan.share)
        except Exception as error:
            return _raising(error)
        reach("snapshot-taken")
        memory, process = self._memory, self._process
        if process is None:
            return lambda: write_share(temporary, plan.share, snapshot.find)
        return lambda: process.write(temporary, plan.share, snapshot, memory)

    def poll(self) -> SaveResult | None:
        """The outcome of the save under way, once; None while there is none. Does not wait."""
        return self.wait() if self._save is not None and not self._save.is_alive() else None

    def wait(self, patience_seconds: float | None = None) -> SaveResult | None:
        """Wait for the outcome of the save under way; None where there is no save.

        patience_seconds: how long others may take once this process has written; one that has ended is not waited for.
        """
        save, self._save = self._save, None
        return None if save is None else save.finish(patience_seconds)

    def close(self) -> None:
        """Give memory and process back; call it after wait()."""
        if self._process is not None:
            self._process.end()
        self._memory.release()


class _Save(threading.Thread):
    """One save, from the snapshot to the outcome."""

    def __init__(
        self,
        write: Callable[[], Written],
        complete: Callable[[Sequence[Written]], Path],
        temporary: Path,
        target: SaveTarget,
        rank: int,
        began_at: float,
        list_ended: Callable[[Sequence[int]], list[int]],
    ) -> None:
        super().__init__(name=f"save of iteration {target.iteration}", daemon=True)
        self._write, self._complete = write, complete
        self._temporary, self._rank, self._size = temporary, rank, target.world_size
        self._iteration = target.iteration
        # Every save has a separate prefix in the store: its directory has a random name.
        room = f"megatron/save/{self._temporary.name}"
        self._store = PrefixStore(room, rendezvous_store()) if self._size > 1 else None
        self._list_ended = list_ended
        self._began_at = began_at
        self._stalled_seconds = time.monotonic() - began_at
        self._deadline: float | None = None
        self._patience: float | None = None
        self._answer: dict[str, Any] = {}
        self._ended_at = began_at

    def finish(self, patience_seconds: float | None) -> SaveResult:
        """Wait for the end."""
        self._patience = patience_seconds
        self.join()
        path = self._answer.get("path")
        return SaveResult(
            self._iteration, None if path is None else Path(path), self._answer.get("problem"),
            self._stalled_seconds, self._ended_at - self._began_at,
        )  # fmt: skip

    def run(self) -> None:
        """On the thread itself."""
        doing = f"writing {self._temporary} failed on rank {self._rank}"
        report = _attempt(doing, lambda: _pack(self._write()))
        reach("tensors-written")
        try:
            if self._rank == 0:
                self._answer = self._end(report)
                # Whether anybody hears it does not change what has become of the save.
                with contextlib.suppress(RuntimeError):
                    self._tell("outcome", self._answer)
            else:
                self._tell(f"rank {self._rank}", report)
                self._answer = self._hear({0: "outcome"})[0]
        # The store has gone with the process that served it, or somebody has not come.
        except (RuntimeError, TimeoutError) as error:
            self._answer = {"problem": f"writing {self._temporary} was not finished: {error}"}
        if "path" in self._answer:
            reach("save-done")
        self._ended_at = time.monotonic()

    def _end(self, own: dict[str, Any]) -> dict[str, Any]:
        """On the first process: make the checkpoint visible, or remove what there is of it."""
        try:
            reports = [own, *self._hear({rank: f"rank {rank}" for rank in range(1, self._size)})]
            problem = next((report["problem"] for report in reports if "problem" in report), None)
            reach("shares-reported")
            if problem is None:
                shares = [_unpack(report) for report in reports]
                answer = _attempt(f"writing {self._temporary}", lambda: {"path": str(self._complete(shares))})
                if "path" in answer:
                    return answer
                problem = answer["problem"]
        except (RuntimeError, TimeoutError) as error:
            problem = f"writing {self._temporary} was not finished: {error}"
        abandon_save(self._temporary)
        return {"problem": problem}

    def _tell(self, key: str, value: dict[str, Any]) -> None:
        if self._store is not None:
            self._store.set(key, json.dumps(value))

    def _hear(self, keys: dict[int, str]) -> list[dict[str, Any]]:
        """Return what ranks tell under these keys, when all have. Raises TimeoutError when one will not."""
        if self._store is None or not keys:
            return []
        store: Store = self._store
        pause = _FIRST_SEARCH_SECONDS
        search_at = time.monotonic() + pause
        while not store.check(list(keys.values())):
            if self._is_out_of_patience():
                missing = [key for key in keys.values() if not store.check([key])]
                raise TimeoutError(f"no word of {', '.join(missing)} within {self._patience:.0f} s")
            if time.monotonic() > search_at:
                self._search(keys)
                pause = min(2 * pause, _MOST_SEARCH_SECONDS)
                search_at = time.monotonic() + pause
            time.sleep(_LOOK_SECONDS)
        values = [json.loads(store.get(key)) for key in keys.values()]
        if self._rank == 0:
            # The store lives as long as the job, and a list of boxes may be long.
            for key in keys.values():
                store.delete_key(key)
        return values

    def _search(self, keys: dict[int, str]) -> None:
        """Raise TimeoutError where a rank has ended that has told nothing."""
        assert self._store is not None
        silent = [rank for rank, key in keys.items() if not self._store.check([key])]
        # Its word may have come between the two looks: a rank that leaves in order has told all.
        lost = [rank for rank in self._list_ended(silent) if not self._store.check([keys[rank]])]
        if lost:
            raise TimeoutError(f"rank {lost[0]} has ended")

    def _is_out_of_patience(self) -> bool:
        if self._patience is None:
            return False
        self._deadline = self._deadline or time.monotonic() + self._patience
        return time.monotonic() > self._deadline


def _attempt(doing: str, action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what the action returns; a "problem" instead where it fails."""
    try:
        return action()
    except MegatronError as error:
        return {"problem": str(error)}
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return {"problem": f"{doing}: {where}{error.strerror or error}"}
    except Exception as error:
        return {"problem": f"{doing}: {type(error).__name__}: {str(error)[:300]}"}


def _raising(error: Exception) -> Callable[[], Written]:
    def write() -> Written:
        raise error

    return write


# As JSON: what comes over a network is not unpickled.
def _pack(written: Written) -> dict[str, Any]:
    """A report of what one process has written."""
    boxes = []
    for result in written.results:
        index, place = result.index, result.storage_data
        boxes.append([index.fqn, index.offset, index.index, result.size_in_bytes,
                      place.relative_path, place.offset, place.length])  # fmt: skip
    return {"boxes": boxes, "records": written.records}


def _unpack(report: dict[str, Any]) -> Written:
    results = []
    for name, offset, number, size, path, start, length in report["boxes"]:
        index = MetadataIndex(name, offset, number)
        results.append(WriteResult(index, size, _StorageInfo(path, start, length)))
    return Written(results, {name: FileRecord(*record) for name, record in report["records"].items()})
