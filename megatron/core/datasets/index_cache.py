"""Keep built indices on disk, so that the next start maps them instead of building them.

A set of arrays lives in one directory as

    <md5>-<name>-description.txt     what the arrays were made from; its md5 is the key
    <md5>-<name>-<array>.npy         one file per array
    <md5>-<name>-checksums.json      crc32 and size of each .npy, written last

Every file is written under a temporary name and renamed, so a reader sees whole files or none. Arrays without a
matching checksum (cut, bit-flipped, replaced) are built again. One process builds, the others wait for its lock;
a process that dies releases it. A directory that cannot be written costs one warning: the arrays stay in memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import time
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]

_LOCK_TIMEOUT_SECONDS = 120.0
_READ_BYTES = 1 << 24
_MAPPED_ABOVE_BYTES = 1 << 20  # a mapping holds a file descriptor, and a blend has three arrays per dataset


class IndexCache:
    """The cached arrays of one description.

    directory     where to keep them; None: nowhere
    name          a readable part of the file names, such as GPTDataset-train
    description   text that determines the arrays completely
    array_names   the arrays that belong together
    """

    def __init__(self, directory: str | None, name: str, description: str, array_names: tuple[str, ...]) -> None:
        key = hashlib.md5(description.encode(), usedforsecurity=False).hexdigest()
        self.directory = directory
        self.description = description
        self.array_names = array_names
        self._stem = None if directory is None else os.path.join(directory, f"{key}-{name}")

    def load_or_build(self, build: Callable[[], Arrays]) -> Arrays:
        """The arrays from disk (large ones mapped, read-only) or else from `build`, then kept for the next time."""
        if self._stem is None:
            return build()
        arrays = self.load()
        if arrays is not None:
            return arrays
        try:
            os.makedirs(os.path.dirname(self._stem), exist_ok=True)
        except OSError as error:
            self._warn(error)
            return build()
        with self._lock() as locked:
            if locked:
                self._remove_leftovers()
                arrays = self.load()  # another process may have built them meanwhile
            if arrays is None:
                arrays = build()
                self._store(arrays)
        return arrays

    def load(self) -> Arrays | None:
        """The arrays from disk, or None where they are missing, incomplete or damaged."""
        try:
            with open(self._path("checksums.json"), encoding="utf-8") as file:
                checksums = json.load(file)
            arrays = {}
            for name in self.array_names:
                path = self._path(f"{name}.npy")
                if checksums[name] != _checksum(path):
                    return None
                is_large = checksums[name][1] > _MAPPED_ABOVE_BYTES
                arrays[name] = np.load(path, mmap_mode="r" if is_large else None, allow_pickle=False)
            return arrays
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def _remove_leftovers(self) -> None:
        """Temporary files of a process that was killed: only the holder of the lock writes them."""
        for path in glob.glob(f"{glob.escape(str(self._stem))}-*.tmp*"):
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _store(self, arrays: Arrays) -> None:
        try:
            checksums = {name: self._write_array(f"{name}.npy", arrays[name]) for name in self.array_names}
            self._write_text("description.txt", self.description)
            self._write_text("checksums.json", json.dumps(checksums, indent=1))
        except OSError as error:
            self._warn(error)

    def _write_array(self, suffix: str, array: npt.NDArray[Any]) -> list[int]:
        with self._written(suffix) as temporary:
            with open(temporary, "wb") as file:
                _write_npy(file, array)
            return _checksum(temporary)

    def _write_text(self, suffix: str, text: str) -> None:
        with self._written(suffix) as temporary, open(temporary, "w", encoding="utf-8") as file:
            file.write(text)

    @contextlib.contextmanager
    def _written(self, suffix: str) -> Iterator[str]:
        """A temporary name that becomes the final one at the end of the block, or disappears."""
        path = self._path(suffix)
        temporary = f"{path}.tmp-{uuid.uuid4().hex}"
        try:
            yield temporary
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[bool]:
        """Hold the lock of these arrays: True; False where it cannot be had, which is slower but not wrong."""
        try:
            descriptor = os.open(self._path("lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError:
            yield False
            return
        try:
            yield _wait_for_lock(descriptor)
        finally:
            os.close(descriptor)

    def _path(self, suffix: str) -> str:
        return f"{self._stem}-{suffix}"

    def _warn(self, error: OSError) -> None:
        # Python shows a warning of the same text once.
        warnings.warn(
            f"index cache {self.directory}: {error.strerror}; the indices stay in memory and are built again at the "
            "next start (--data-cache-path chooses another directory)",
            RuntimeWarning,
            stacklevel=2,
        )


def _wait_for_lock(descriptor: int) -> bool:
    deadline = time.monotonic() + _LOCK_TIMEOUT_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False  # the holder hangs
            time.sleep(0.02)
        except OSError:
            return False  # a file system without locks


def _write_npy(file: IO[bytes], array: npt.NDArray[Any]) -> None:
    """numpy's .npy format; unlike numpy.save, a failing write says why (no space, file too large)."""
    array = np.ascontiguousarray(array)
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    file.write(array.data)


def _checksum(path: str) -> list[int]:
    """[crc32, bytes] of a file."""
    crc = size = 0
    with open(path, "rb") as file:
        while piece := file.read(_READ_BYTES):
            crc = zlib.crc32(piece, crc)
            size += len(piece)
    return [crc, size]
