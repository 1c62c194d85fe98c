# SPDX-License-Identifier: Apache-2.0
"""--hang-timeout, as each rank takes part in it: it keeps a progress record, and ends when the watcher of its host says
that the job is hung."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron.core.errors import TemporaryError, say, tell_launcher
from megatron.core.process_groups_config import group_ranks
from megatron.core.progress_record import ENDED, SAVE, STEP, VERDICT, ProgressRecord
from megatron.core.traffic import Meter
from megatron.training.config.container import RunConfig
from megatron.training.launch import hang_watcher
from megatron.training.launch.launch import Launch

T = TypeVar("T")
_POLL_SECONDS = 0.25
_PATIENCE_SECONDS = 3.0
"""A run that is over before needs no watcher; a run with a limit gets one before anything can hang."""
_DIRECTORIES = "megatron_hang_watch_"
_NEW_SECONDS = 60.0
"""A directory that is younger may not be locked yet."""
_MOST_ENTRIES = 20
"""Of the flight recorder, in the report."""
_FEW_STEPS = 10
_SHORTEST_SECONDS = 60.0
_USUAL_STEPS = 20.0
"""A step that takes so many times as long as the longest of the first ones is taken for hung."""


@dataclass(frozen=True)
class HangLimits:
    """Times of a watch, and what follows a hang."""

    seconds: float | None
    """Silence of a step that is taken for a hang; None where it follows from the first steps."""
    most_seconds: float
    """The same until then, and of a save."""
    poll_seconds: float = hang_watcher.POLL_SECONDS
    """Between two looks of the watcher."""
    rejoin_seconds: float = 0.0
    """Time in which ranks must come out of the step, to begin again; 0: they end."""
    termination_seconds: float = 0.0
    """Between SIGTERM and SIGKILL for a rank that does not."""


class HangWatch:
    """Of this process. All that it does is for the watcher; no error of it ends a run."""

    def __init__(
        self, launch: Launch, store: dist.Store, limits: HangLimits, save: str | None, cut: Callable[[], None]
    ) -> None:
        """save: where a report is written; cut: ends the connections of this process's groups. Raises OSError where
        records cannot be kept."""
        self._launch, self._limits, self._save, self._cut = launch, limits, save, cut
        self._directory, self._lock = _agree_on_directory(launch, store)
        self._path = self._directory / f"rank_{launch.rank}.progress"
        self._record = ProgressRecord.make(self._path, launch.rank)
        self._record.set_limit(limits.most_seconds if limits.seconds is None else limits.seconds)
        self._record.set_save_limit(limits.most_seconds)
        self._meters: dict[dist.ProcessGroup, Meter] = {}
        self._stack_file = self._path.with_suffix(".stack").open("w")
        # In C, without the interpreter lock: also where a thread holds it.
        faulthandler.register(hang_watcher.STACK_SIGNAL, self._stack_file, all_threads=True)
        self._ended = threading.Event()
        self._steps = 0
        self._longest_seconds = 0.0
        self._began_at = 0.0
        self._starts_watcher = launch.is_first_of_host
        if limits.seconds is not None:
            self._start_watcher()
        threading.Thread(target=self._listen, name="hang watch", daemon=True).start()

    def build_meter(self, group: dist.ProcessGroup, axis: str, inner: Meter | None) -> Meter:
        """Return what notes the collectives of a group, under the first axis that has it, and hands them on."""
        if group not in self._meters:
            self._meters[group] = self._record.build_meter(axis, group_ranks(group), inner)
        return self._meters[group]

    def begin_step(self, iteration: int) -> None:
        """Note that an iteration begins."""
        self._began_at = time.monotonic()
        self._record.begin_step(iteration)

    def count(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the same micro-batches, and note each."""
        for batch in batches:
            self._record.take_microbatch()
            yield batch

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Note that a save begins, and that it is over."""
        self._record.begin_save()
        try:
            yield
        finally:
            self._record.leave_step()

    def end_step(self) -> float | None:
        """Note that the iteration is over; return the limit in seconds where it follows from the steps so far, once."""
        self._record.leave_step()
        self._steps += 1
        # The first one compiles and connects.
        if self._steps > 1:
            self._longest_seconds = max(self._longest_seconds, time.monotonic() - self._began_at)
        if self._limits.seconds is not None or self._steps != _FEW_STEPS:
            return None
        limit = max(_SHORTEST_SECONDS, _USUAL_STEPS * self._longest_seconds)
        self._record.set_limit(limit)
        return limit

    def close(self) -> None:
        """Leave in order; further calls do nothing."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._record.leave_step(ENDED)
        faulthandler.unregister(hang_watcher.STACK_SIGNAL)
        self._stack_file.close()
        for path in (self._path, self._path.with_suffix(".stack"), self._path.with_suffix(hang_watcher.RECORDER)):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not the last one of this host
            self._directory.rmdir()
        if self._lock is not None:
            os.close(self._lock)

    def _listen(self) -> None:
        starts_at, says = time.monotonic() + _PATIENCE_SECONDS, False
        while not self._ended.wait(_POLL_SECONDS):
            if time.monotonic() >= starts_at:
                self._start_watcher()
            told = self._record.told
            if told and not says:
                says = True
                # An observer: whatever is wrong with it, the others' stacks are there.
                with contextlib.suppress(Exception):
                    self._path.with_suffix(hang_watcher.RECORDER).write_text(read_flight_recorder())
            if told == VERDICT:
                self._leave()
                return

    def _start_watcher(self) -> None:
        """Start the watcher of this host, once, on its first rank."""
        if not self._starts_watcher:
            return
        self._starts_watcher = False
        launch, root = self._launch, str(Path(hang_watcher.__file__).parents[3])
        # Found where this process has found it, whatever the current directory is.
        program = (
            f"import sys; sys.path.insert(0, {root!r}); from {hang_watcher.__name__} import main; main(sys.argv[1:])"
        )
        limits = self._limits
        store = (launch.master_addr, launch.master_port, _prefix(launch), launch.world_size)
        times = (limits.poll_seconds, limits.rejoin_seconds, limits.termination_seconds)
        arguments = [str(self._directory), *map(str, (*store, *times))]
        with contextlib.suppress(OSError):
            subprocess.Popen(
                [sys.executable, "-c", program, *arguments, *([self._save] if self._save else [])],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def _leave(self) -> None:
        """End this process, whatever its main thread waits for; one that may begin again, only if it does not."""
        if self._limits.rejoin_seconds:
            self._cut()
            deadline = time.monotonic() + self._limits.rejoin_seconds
            while time.monotonic() < deadline:
                # What it does before it begins again, a save for example, takes what it takes.
                if self._ended.wait(_POLL_SECONDS) or self._record.read().phase not in (STEP, SAVE):
                    return
        sentence = "the job makes no progress"
        with contextlib.suppress(OSError):
            sentence = (self._directory / hang_watcher.VERDICT_FILE).read_text()
        error = TemporaryError(sentence)
        tell_launcher(error)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(error.exit_code)


def read_flight_recorder() -> str:
    """Return the collectives that torch's flight recorder, of NCCL or of gloo, holds for unfinished, a line for each;
    the last one where none is."""
    functions = torch._C._distributed_c10d
    # torch has no public function for it. NCCL's is there in builds with CUDA only.
    is_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    dump = getattr(functions, "_dump_nccl_trace_json" if is_nccl else "_dump_fr_trace_json")
    entries = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    under_way = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
    head = f"{len(under_way)} of {len(entries)} collectives are under way; the first of them, or the last of all:"
    return "\n".join([head, *(_describe_entry(entry) for entry in under_way[:_MOST_ENTRIES] or entries[-1:])])


def _describe_entry(entry: dict[str, Any]) -> str:
    sizes = ", ".join("x".join(map(str, size)) or "1" for size in entry["input_sizes"])
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    state = "finished" if entry["retired"] else entry["state"]
    return f"{entry['profiling_name']} number {number} of group {entry['process_group'][1]} ({sizes}): {state}"


def build_hang_watch(config: RunConfig, launch: Launch, store: dist.Store, cut: Callable[[], None]) -> HangWatch | None:
    """Return the watch of a run of several processes; None with --hang-timeout 0, and where it cannot be had. cut: ends
    the connections of this process's groups."""
    seconds, again = config.reliability.hang_timeout, config.in_process
    if seconds == 0:
        return None
    try:
        # Before anything is known of the steps: a little less than collectives wait, which end the run unnamed.
        limits = HangLimits(seconds, 54.0 * config.distributed.distributed_timeout_minutes)
        if again.inprocess_restart:
            limits = HangLimits(
                again.inprocess_soft_timeout if seconds is None else seconds,
                limits.most_seconds,
                again.inprocess_monitor_process_interval,
                again.inprocess_hard_timeout - again.inprocess_soft_timeout,
                again.inprocess_termination_grace_time,
            )
        return HangWatch(launch, store, limits, config.checkpoint.save, cut)
    except (OSError, ValueError, RuntimeError) as error:
        say(f"warning: rank {launch.rank} is not watched for hangs ({' '.join(str(error).split())})", sys.stderr)
        return None


def _prefix(launch: Launch) -> str:
    return f"megatron/hang/{launch.attempt}.{launch.beginning}"


def _agree_on_directory(launch: Launch, store: dist.Store) -> tuple[Path, int | None]:
    """The directory of this host's ranks, which the first of them makes and keeps locked; in memory where there is such
    a place."""
    # Two nodes may have one name: containers, or two launchers on one machine.
    key = f"{_prefix(launch)}/directory/{socket.gethostname()}/{launch.node}"
    lock = None
    if launch.is_first_of_host:
        place = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())
        _remove_abandoned(place)
        directory = tempfile.mkdtemp(prefix=_DIRECTORIES, dir=place)
        lock = os.open(directory, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_SH)
        store.set(key, directory)
    return Path(store.get(key).decode()), lock


def _remove_abandoned(place: Path) -> None:
    """Remove directories of jobs that were killed: nobody holds their lock."""
    for path in place.glob(f"{_DIRECTORIES}*"):
        with contextlib.suppress(OSError):  # another user's, or another job's that is alive
            if time.time() - path.stat().st_mtime < _NEW_SECONDS:
                continue
            lock = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
