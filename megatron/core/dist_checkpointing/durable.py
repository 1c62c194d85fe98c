"""Files that survive a power cut: written, flushed to the device, and given their name only when they are whole.

write_file        the bytes are on the device when it returns
replace_file      the old content or the new one, never a part of either
sync_directory    names in a directory (creations, renames) are on the device when it returns
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from megatron.core.errors import StorageError


@contextlib.contextmanager
def storage_errors(doing: str) -> Iterator[None]:
    """Turn an OSError inside into a StorageError that says what was being done, where, and what the system answered."""
    try:
        yield
    except OSError as error:
        where = f"{os.fspath(error.filename)}: " if error.filename else ""
        raise StorageError(f"{doing} failed: {where}{error.strerror or error}") from error


def write_file(path: Path, content: bytes) -> None:
    """Create `path` with this content and flush it to the device. Raises OSError; FileExistsError when it is there."""
    # "x": a file of this name would be another writer's, and must not be overwritten.
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        # flush() only hands the bytes to the operating system; a power cut would take them from there.
        os.fsync(file.fileno())


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


def sync_directory(path: Path) -> None:
    """Flush the directory's list of names to the device. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
