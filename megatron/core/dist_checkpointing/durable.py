# SPDX-License-Identifier: Apache-2.0
"""Files that survive a power cut: written, flushed to the device, and given their name only when they are whole.

write_file        the bytes are on the device when it returns
create_file       the same for a writer that takes a file, as torch's do
replace_file      the old content or the new one, never a part of either
begin_flush       the device has begun with them, and a later flush has less to wait for
sync_directory    names in a directory (creations, renames) are on the device when it returns
read_file         the content, if it is a file: a pipe of that name would keep its reader waiting
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import stat
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.crash_points import reach
from megatron.core.errors import StorageError

_SYNC_FILE_RANGE_WRITE = 2
"""Of Linux: begin with pages that are not on their way already."""


@contextlib.contextmanager
def storage_errors(doing: str) -> Iterator[None]:
    """Turn an OSError inside into a StorageError that says what was being done, where, and what the system answered."""
    try:
        yield
    except OSError as error:
        where = f"{os.fspath(error.filename)}: " if error.filename else ""
        raise StorageError(f"{doing} failed: {where}{error.strerror or error}") from error


def write_file(path: Path, content: bytes, crash_point: str | None = None) -> None:
    """Create `path` with this content and flush it to the device. Raises OSError; FileExistsError when it is there.

    crash_point: what the names of the crash points of this file begin with (crash_points.py).
    """
    # "x": a file of this name would be another writer's, and must not be overwritten.
    with open(path, "xb") as file:
        if crash_point:
            reach(f"{crash_point}-created")
        file.write(content)
        file.flush()
        if crash_point:
            reach(f"{crash_point}-unflushed")
        # flush() only hands the bytes to the operating system; a power cut would take them from there.
        os.fsync(file.fileno())
    if crash_point:
        reach(f"{crash_point}-flushed")


class CheckedFile(io.BufferedWriter):
    """A file written from start to end that knows the checksum of its content, and why writing failed."""

    def __init__(self, path: Path, crash_point: str) -> None:
        super().__init__(io.FileIO(path, "xb"))
        self._crash_point = crash_point
        self.crc32 = 0
        self.bytes_written = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            count = super().write(data)
        except OSError as error:
            self.error = error
            raise
        # While the bytes are at hand: reading the file again for its checksum would double the traffic.
        self.crc32 = zlib.crc32(data, self.crc32)
        self.bytes_written += count
        reach(f"{self._crash_point}-begun")
        return count


@contextlib.contextmanager
def create_file(path: Path, crash_point: str) -> Iterator[CheckedFile]:
    """Create `path` for the writer inside; the file is on the device afterwards.

    Raises OSError with the file's name, also where the writer made another exception of it. crash_point: see
    write_file.
    """
    file = CheckedFile(path, crash_point)
    try:
        with file:
            reach(f"{crash_point}-created")
            yield file
            file.flush()
            os.fsync(file.fileno())
    except Exception as error:
        # torch writes through C++, which turns "No space left on device" into an exception about positions.
        cause = file.error or error
        if isinstance(cause, OSError):
            cause.filename = cause.filename or os.fspath(path)
        raise cause from error
    reach(f"{crash_point}-flushed")


def replace_file(path: Path, content: bytes) -> None:
    """Give `path` this content in one step: a reader sees the old content or the new one. Raises OSError."""
    temporary = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        write_file(temporary, content)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    # The rename itself is an entry of the directory, and reaches the device only with it.
    sync_directory(path.parent)


def begin_flush(descriptor: int, start: int, num_bytes: int) -> None:
    """Have the system write these bytes of an open file to the device, without waiting until they are there.

    Does nothing where the system has no such call. What goes wrong is told by the fsync that must follow.
    """
    # Not os.fsync on another thread: an error is reported only to the first caller, never twice.
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call(descriptor, ctypes.c_int64(start), ctypes.c_int64(num_bytes), _SYNC_FILE_RANGE_WRITE)


def sync_directory(path: Path) -> None:
    """Flush the directory's list of names to the device. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_file(path: Path, most_bytes: int | None = None) -> bytes:
    """The content of a regular file, of a longer one its first `most_bytes`. Raises OSError, for anything else as well:
    opening a pipe waits for a writer, and a device may have no end."""
    # Without O_NONBLOCK opening a pipe waits before anyone can look what it is.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
        return file.read(-1 if most_bytes is None else most_bytes)
