# SPDX-License-Identifier: Apache-2.0
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
import hashlib
import json
import os
import time
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from megatron.core.errors import DataError

Arrays = Mapping[str, npt.NDArray[Any]]

_LOCK_TIMEOUT_SECONDS = 120.0
_READ_BYTES = 1 << 24
_NO_ARRAY = (OSError, ValueError, EOFError)  # what numpy raises for a file that is none
_UNTRUSTWORTHY = (
    "--dataloader-fast-cache-load: {} is missing or damaged; build the indices with tools/build_dataset_cache.py and "
    "the flags of this run, or leave the flag out"
)
_MAPPED_ABOVE_BYTES = 1 << 16  # a mapping holds a file descriptor, and a blend has three arrays per dataset


@dataclass(frozen=True)
class CachePolicy:
    """Effort spent on cached arrays at the start of a job."""

    is_trusted: bool = False
    """They must be there, and are not read to compare checksums: quick where thousands of processes start."""
    is_deferred: bool = False
    """Each is mapped when it is first used."""


class DeferredArrays(Arrays):
    """Arrays on disk by name, each opened when it is asked for."""

    def __init__(self, paths: dict[str, str]) -> None:
        self._paths = paths
        self._opened: dict[str, npt.NDArray[Any]] = {}

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        if name not in self._opened:
            try:
                self._opened[name] = _load_npy(self._paths[name])
            except _NO_ARRAY as error:
                raise DataError(_UNTRUSTWORTHY.format(self._paths[name])) from error
        return self._opened[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


class IndexCache:
    """The cached arrays of one description.

    directory     where to keep them; None: nowhere
    name          a readable part of the file names, such as GPTDataset-train
    description   text that determines the arrays completely
    array_names   the arrays that belong together
    """

    def __init__(
        self,
        directory: str | None,
        name: str,
        description: str,
        array_names: tuple[str, ...],
        policy: CachePolicy = CachePolicy(),  # noqa: B008 (frozen)
    ) -> None:
        # md5 as in upstream's cache names; it only has to tell descriptions apart.
        key = hashlib.md5(description.encode(), usedforsecurity=False).hexdigest()
        self.policy = policy
        self.directory = directory
        self.description = description
        self.array_names = array_names
        self._stem = None if directory is None else os.path.join(directory, f"{key}-{name}")

    def load_or_build(self, build: Callable[[], Arrays]) -> Arrays:
        """The arrays from disk, or else from `build`, then kept for the next time.

        Large ones are mapped read-only, also when they were just built: a blend of many datasets does not hold the
        indices of all of them in memory.
        """
        if self._stem is None:
            return build()
        if self.policy.is_trusted:
            return self._trusted()
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
                arrays = self.load()  # another process may have built them meanwhile
            if arrays is None:
                arrays = build()
                # The holder of the lock writes under fixed names: what it leaves when it is killed, the next one uses.
                if self._store(arrays, "tmp" if locked else f"tmp-{uuid.uuid4().hex}"):
                    arrays = self._open() or arrays
        return arrays

    def load(self) -> Arrays | None:
        """The arrays from disk, or None where they are missing, incomplete or damaged."""
        try:
            with open(self._path("checksums.json"), encoding="utf-8") as file:
                checksums = json.load(file)
            for name in self.array_names:
                # An .npy file that was cut or flipped can still be read as numbers, that is as other samples.
                if checksums[name] != _checksum(self._path(f"{name}.npy")):
                    return None
        # Building the arrays again mends any damage.
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return self._open()

    def _open(self) -> Arrays | None:
        """The arrays on disk, which are known to be good; None where they have gone."""
        try:
            return {name: _load_npy(self._path(f"{name}.npy")) for name in self.array_names}
        except _NO_ARRAY:
            return None

    def _trusted(self) -> Arrays:
        """The arrays on disk, as they are. Raises DataError where they are missing or no arrays."""
        paths = {name: self._path(f"{name}.npy") for name in self.array_names}
        # Existence is all that is asked: thousands of processes reading every array would take the file system down.
        is_complete = all(map(os.path.exists, [*paths.values(), self._path("checksums.json")]))
        arrays = (DeferredArrays(paths) if self.policy.is_deferred else self._open()) if is_complete else None
        if arrays is None:
            raise DataError(_UNTRUSTWORTHY.format(f"{self._stem}-*.npy"))
        return arrays

    def _store(self, arrays: Arrays, ending: str) -> bool:
        """Write the arrays, first with an ending to their names; False, and a warning, where that is not possible."""
        try:
            checksums = {}
            for name in self.array_names:
                # The checksums are written last, so their presence says that all arrays are there.
                with self._written(f"{name}.npy", ending) as temporary:
                    with open(temporary, "wb") as file:
                        _write_npy(file, arrays[name])
                    checksums[name] = _checksum(temporary)
            for suffix, text in (
                ("description.txt", self.description),
                ("checksums.json", json.dumps(checksums, indent=1)),
            ):
                with self._written(suffix, ending) as temporary, open(temporary, "w", encoding="utf-8") as file:
                    file.write(text)
        except OSError as error:
            self._warn(error)
            return False
        return True

    @contextlib.contextmanager
    def _written(self, suffix: str, ending: str) -> Iterator[str]:
        """A temporary name that becomes the final one at the end of the block, or disappears."""
        path = self._path(suffix)
        temporary = f"{path}.{ending}"
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
            # The kernel releases the lock when the descriptor closes, also when the process is killed.
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
            # Polling instead of blocking, because a holder that hangs must not hang everybody.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False  # the holder hangs
            time.sleep(0.02)
        except OSError:
            return False  # a file system without locks


def _load_npy(path: str) -> npt.NDArray[Any]:
    """An array on disk: mapped, read-only, unless it is small."""
    is_large = os.path.getsize(path) > _MAPPED_ABOVE_BYTES
    array: npt.NDArray[Any] = np.load(path, mmap_mode="r" if is_large else None, allow_pickle=False)
    return array


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
