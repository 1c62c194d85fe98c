# SPDX-License-Identifier: Apache-2.0
"""Lock on a directory of checkpoints or of metrics: one at a time, also on a network file system.

    root/save-00000003.lock      {"run": "5f0c…", "host": "gpu07", "pid": 4711, …, "beat": "0000000042"}

    take      look at every lock file: each has to be of a run that has ended. Create the next number, which the file
              system gives to one process only, and look again: a file that was not there before is a rival's, who may
              have looked before we created ours; withdraw and start again. Remove the files of the ended runs.
    hold      a thread rewrites the counter in our file every few seconds.
    check     the file is still there, before a save begins and before it becomes visible.
    release   remove the file.

A run has ended when its process is known to be gone, which is checked only on its machine, or when its counter does not
change for PATIENCE_SECONDS of the observer's clock. Times of two machines are never compared. A process rewrites only
its file, so that a process which was stopped and comes back cannot undo the next one's lock.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.core.dist_checkpointing.directory import TRACKER_NAME
from megatron.core.dist_checkpointing.durable import read_file
from megatron.core.errors import StorageError, TemporaryError
from megatron.core.host_memory import name_machine

BEAT_SECONDS = 4.0
# Five beats: a machine that swaps, or a file system that hesitates, is not dead.
PATIENCE_SECONDS = 20.0
_LOOK_SECONDS = 0.2

_LOCK = re.compile(r"save-([0-9]{8})\.lock")


@dataclass(frozen=True)
class Holder:
    """A run that holds a directory, and the process of it that keeps the lock."""

    run: str
    host: str
    pid: int
    since: str
    """Start time by its clock; only for people."""
    machine: str | None
    """Kernel, and its process namespace, that `pid` belongs to; None where the system does not say."""
    process_started: int | None
    """Start time of the process in the kernel's ticks, which tells it from a later process with the same number."""

    @classmethod
    def of_this_process(cls) -> Holder:
        """A new run in this process."""
        pid = os.getpid()
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        return cls(uuid.uuid4().hex[:12], socket.gethostname(), pid, since, name_machine(), _read_process(pid)[1])

    @classmethod
    def parse(cls, content: bytes) -> Holder | None:
        """Return what a lock file says; None for a file that is being written, or is no lock file."""
        try:
            fields = json.loads(content)
            holder = cls(**{name: fields[name] for name in cls.__dataclass_fields__})
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        return holder if isinstance(holder.pid, int) and holder.pid > 0 else None

    def format(self, beats: int) -> bytes:
        """The content of its lock file; of the same length for every number of beats, so that it can be rewritten in
        place."""
        return json.dumps({**asdict(self), "beat": f"{beats:010d}"}).encode() + b"\n"

    def is_gone(self) -> bool | None:
        """True when the process has certainly ended, False when it certainly has not, None when that cannot be told."""
        if self.machine is None or self.machine != name_machine():
            return None
        # A process is in one run at a time: an earlier one of this process was left without being closed.
        if self.pid == os.getpid():
            return True
        is_listed, started = _read_process(self.pid)
        if is_listed:
            return started != self.process_started
        # Processes of other users may be hidden from the list.
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass
        return None

    def __str__(self) -> str:
        return f"run {self.run} (process {self.pid} on {self.host}, since {self.since})"


class DirectoryLock:
    """The right to write into a directory, from its making until `release` or the end of the process."""

    def __init__(self, root: Path, tell: Callable[[str], None], *, flag: str = "--save") -> None:
        """Take the lock of a directory that exists; waits up to PATIENCE_SECONDS for a run that may have ended.

        tell: is given a sentence when it waits, and when it takes over. flag: what a user has named the directory
        with. Raises TemporaryError that names the holder while another run has the directory, OSError where it cannot
        be written to.
        """
        self.root = root
        self.flag = flag
        self.holder = Holder.of_this_process()
        self._start(tell)

    def _start(self, tell: Callable[[str], None]) -> None:
        self.path = _claim(self.root, self.holder, tell, self.flag)
        self.note_save()
        stop = threading.Event()
        # It knows the file and not this object, so that a lock to which nobody refers any more is released.
        arguments = (self.path, self.holder, stop)
        threading.Thread(target=_beat, args=arguments, name="save-lock", daemon=True).start()
        self._end = weakref.finalize(self, _release, *arguments)

    def covers(self, path: Path) -> bool:
        """Return whether it is the lock of this directory: of itself, or of one that it is in."""
        root, inner = Path(os.path.realpath(self.root)), Path(os.path.realpath(path))
        return inner == root or root in inner.parents

    def check(self) -> None:
        """Raise StorageError when another run has taken the directory over, as it may while this process is stopped."""
        if _is_ours(self.path, self.holder):
            return
        others = [holder for content in _read_locks(self.root).values() if (holder := Holder.parse(content))]
        if not others and _read_tracker(self.root) in (b"", self._tracker):
            # Somebody has tidied up: nobody else is there, and nobody else has saved since.
            self._end()
            self._start(lambda _: None)
            return
        whom = f"to {others[0]}" if others else "to another run, which has saved there"
        raise StorageError(
            f"{self.root} was lost {whom} while this run had shown no sign of life for {PATIENCE_SECONDS:.0f} s; "
            f"stop one of the two, and give the other a {self.flag} of its own"
        )

    def note_save(self) -> None:
        """Remember which checkpoint is the newest in the directory: it is ours, or we were to continue from it."""
        self._tracker = _read_tracker(self.root)

    def release(self) -> None:
        """Let the next run have the directory. Further calls do nothing."""
        self._end()


def list_holders(root: Path) -> dict[str, Holder | None]:
    """Return who has, or had, the directory: name of the lock file -> the run in it, None where it names none. Raises
    OSError."""
    return {name: Holder.parse(content) for name, content in _read_locks(root).items()}


# ---- taking


def _claim(root: Path, holder: Holder, tell: Callable[[str], None], flag: str) -> Path:
    """Create the lock file that makes `holder` the only one."""
    while True:
        ended = _await_end_of_others(root, tell, flag)
        path = root / f"save-{1 + max(map(_read_number, ended), default=0):08d}.lock"
        try:
            _create(path, holder)
        except FileExistsError:
            continue
        # A file that was not there, or has another run in it, is a rival's. Creating ours has made a network file
        # system fetch the list again, so that one of two rivals at least sees the other.
        if any(ended.get(name) != content for name, content in _read_locks(root).items() if name != path.name):
            path.unlink(missing_ok=True)
            # At random, so that two that withdrew from each other do not meet again and again.
            time.sleep(random.uniform(0, _LOOK_SECONDS))
            continue
        for name in ended:
            (root / name).unlink(missing_ok=True)
        return path


def _await_end_of_others(root: Path, tell: Callable[[str], None], flag: str) -> dict[str, bytes]:
    """The lock files there, all of runs that have ended. Raises TemporaryError for one of a run that has not."""
    first_seen: dict[str, tuple[bytes, float]] = {}
    while True:
        # Before reading, so that a process which is stopped here does not count that time as time of looking.
        now = time.monotonic()
        locks = _read_locks(root)
        told, waited_for = bool(first_seen), []
        ends = []
        for name, content in locks.items():
            content_then, since = first_seen.setdefault(name, (content, time.monotonic()))
            holder = Holder.parse(content)
            is_gone = None if holder is None else holder.is_gone()
            # A file whose content comes only now is one of a run that has just begun.
            if holder is not None and (is_gone is False or (is_gone is None and content != content_then)):
                raise TemporaryError(
                    f"{flag} {root} is in use by {holder}; wait for its end, stop it, or give another directory"
                )
            who = holder or f"a run that did not write its name into {name}"
            if is_gone:
                ends.append(f"{who}, whose process is gone")
            elif now - since < PATIENCE_SECONDS:
                waited_for.append(f"{who}")
            else:
                ends.append(f"{who}, which has shown no sign of life for {PATIENCE_SECONDS:.0f} s")
        if not waited_for:
            for end in ends:
                tell(f"{root}: taken over from {end}")
            return locks
        if not told:
            tell(f"{root}: waiting up to {PATIENCE_SECONDS:.0f} s for a sign of life of {' and '.join(waited_for)}")
        time.sleep(_LOOK_SECONDS)


def _read_locks(root: Path) -> dict[str, bytes]:
    """Name -> content of the lock files. Raises OSError."""
    found = {}
    for name in sorted(os.listdir(root)):
        # One that is removed while we look is no lock any more.
        with contextlib.suppress(FileNotFoundError):
            if _LOCK.fullmatch(name):
                found[name] = read_file(root / name)
    return found


def _read_number(name: str) -> int:
    match = _LOCK.fullmatch(name)
    assert match is not None, name
    return int(match[1])


def _create(path: Path, holder: Holder) -> None:
    """Create a lock file. Raises FileExistsError where it is there already, OSError where there is no room for it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        os.write(descriptor, holder.format(0))
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


# ---- holding


def _beat(path: Path, holder: Holder, stop: threading.Event) -> None:
    """Rewrite the counter until `stop`, or until the file is not ours any more."""
    beats = 0
    while not stop.wait(BEAT_SECONDS):
        beats += 1
        # What fails now may succeed the next time. In place, because a full disk still takes what replaces as much.
        with contextlib.suppress(OSError):
            if not _is_ours(path, holder):
                return
            descriptor = os.open(path, os.O_WRONLY)
            try:
                os.pwrite(descriptor, holder.format(beats), 0)
            finally:
                os.close(descriptor)


def _is_ours(path: Path, holder: Holder) -> bool:
    """Return whether the file is there and holds our run; True where the storage does not answer."""
    try:
        written = Holder.parse(read_file(path))
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return written is not None and written.run == holder.run


def _release(path: Path, holder: Holder, stop: threading.Event) -> None:
    stop.set()
    # A forked process, a loader's for example, has a copy of the object and not the lock.
    if os.getpid() == holder.pid and _is_ours(path, holder):
        with contextlib.suppress(OSError):
            path.unlink()


# ---- what the system knows


def _read_tracker(root: Path) -> bytes:
    """Return the bytes that say which iteration is the newest; nothing where there is none."""
    try:
        return read_file(root / TRACKER_NAME, 64)
    except OSError:
        return b""


def _read_process(pid: int) -> tuple[bool, int | None]:
    """Return whether the process is listed, and when it started; that is None for one that has ended and is still
    listed."""
    try:
        # Its name, which is in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return True, None if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return False, None
