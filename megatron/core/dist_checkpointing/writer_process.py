# SPDX-License-Identifier: Apache-2.0
"""A process that writes what its parent has copied into shared memory, one save after the other.

It is a fresh Python, not a fork: it shares neither the GPU, nor locks, nor the interpreter with training. It ends when
its parent ends, also when that is killed, and a Ctrl-C in the terminal does not reach it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from megatron.core.dist_checkpointing.crash_points import hand_over, take_over
from megatron.core.dist_checkpointing.snapshot import BoxPlace, Snapshot, SnapshotMemory, map_memory
from megatron.core.dist_checkpointing.torch_dist import Written, write_share
from megatron.core.errors import StorageError
from megatron.core.parent_death import end_with_parent

_PROGRAM = "import sys; sys.path[:] = sys.argv[4:]; from megatron.core.dist_checkpointing.writer_process import serve; "
_PROGRAM += "serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])"
_END_SECONDS = 5.0
"""A process without work ends within milliseconds; one that hangs on its disk is killed after so long."""

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""The number of this system call, which the C library has no function for."""


@dataclass(frozen=True)
class _Order:
    """Order to the process: what it is to write."""

    directory: Path
    share: SavePlan
    places: Mapping[MetadataIndex, BoxPlace]
    memory_bytes: int | None
    """Of new memory, whose descriptor follows; None where the memory is the same as before."""


class WriterProcess:
    """The parent's side. `start` belongs to the thread that lives as long as the run, `write` to any one thread."""

    def __init__(self, niceness: int = 0, disk_class: int = 0) -> None:
        """niceness: added to this process's; at 19 it writes only when nobody else wants the processor. disk_class: of
        ionice on Linux: 0 follows from the niceness, 1 real time, 2 best effort, 3 idle."""
        self.niceness, self.disk_class = niceness, disk_class
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._socket: socket.socket | None = None
        self._mapped = 0
        """The generation of the memory that the process has mapped."""

    @property
    def pid(self) -> int | None:
        """The id of the process; None where none has been started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process unless there is one. It becomes ready while training goes on. Raises OSError."""
        if self._process is not None and self._process.poll() is None and self._connection is not None:
            return
        self.end()
        ours, theirs = socket.socketpair()
        arguments = [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(os.getpid()), hand_over(), *sys.path]
        with theirs:
            # A new session: the terminal sends Ctrl-C to the processes of its session.
            self._process = subprocess.Popen(
                arguments, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._socket, self._connection = ours, Connection(os.dup(ours.fileno()))
        # Before it has torch in memory: an import is no less a disturbance than writing.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, os.getpriority(os.PRIO_PROCESS, 0) + self.niceness)
        if self.disk_class:
            _set_disk_class(self._process.pid, self.disk_class)

    def write(self, directory: Path, share: SavePlan, snapshot: Snapshot, memory: SnapshotMemory) -> Written:
        """Let it write a snapshot, which lies in `memory`, and wait for it. Raises what went wrong there, or
        StorageError when the process was lost."""
        process, connection = self._process, self._connection
        assert process is not None and connection is not None, "start() comes first"
        is_new = memory.generation != self._mapped
        order = _Order(directory, share, snapshot.places, memory.num_bytes if is_new else None)
        try:
            connection.send(order)
            if is_new:
                send_handle(connection, memory.descriptor, process.pid)
                self._mapped = memory.generation
            answer = connection.recv()
        except (EOFError, OSError):
            self._connection = None
            connection.close()
            code = process.wait()
            raise StorageError(
                f"the process {process.pid} that writes checkpoints was lost "
                f"({f'killed by signal {-code}' if code < 0 else f'exit code {code}'})"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, Written), answer
        return answer

    def end(self) -> None:
        """End the process; it has nothing to write any more."""
        if self._socket is not None:
            # Closing is not enough: a forked process, a loader's for example, has a copy of it.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process, self._socket, self._connection, self._mapped = None, None, None, 0


def _set_disk_class(pid: int, disk_class: int) -> None:
    """Do what `ionice -c` does; nothing on a system that has no such call, or does not allow it."""
    number = _IOPRIO_SET.get(platform.machine()) if sys.platform == "linux" else None
    if number is not None:
        # 1: the id is a process's. Within best effort, 4 is the middle of its levels.
        ctypes.CDLL(None).syscall(number, 1, pid, disk_class << 13 | (4 if disk_class == 2 else 0))


def serve(descriptor: int, parent: int, crash_points: str) -> None:
    """The process itself: write what is ordered over the socket, until the other end is closed."""
    take_over(crash_points)
    end_with_parent(parent)
    # A scheduler sends the end of a job to all of its processes. The parent decides what is still written.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    connection = Connection(descriptor)
    memory = torch.empty(0, dtype=torch.uint8)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            order: _Order = connection.recv()
            if order.memory_bytes is not None:
                received = recv_handle(connection)
                memory = map_memory(received, order.memory_bytes)
                os.close(received)
            connection.send(_write(order, memory))


def _write(order: _Order, memory: torch.Tensor) -> Written | Exception:
    try:
        return write_share(order.directory, order.share, Snapshot(memory, order.places).find)
    except OSError as error:
        return error
    except Exception as error:
        # As text: an exception of another library may not survive the way through the socket.
        return RuntimeError(f"{type(error).__name__}: {str(error)[:300]}")
