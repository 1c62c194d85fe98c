# SPDX-License-Identifier: Apache-2.0
"""The files that preprocessing writes: one job per prefix at a time, and final names only for complete files.

| file                                  | when                                                         |
|---------------------------------------|--------------------------------------------------------------|
| PREFIX_KEY_document.bin, .idx         | always; with partitions, these put together                  |
| PREFIX_PARTITION_KEY_document.bin/.idx| with --partitions above 1                                    |
| ..._sentence.bin, .idx                | instead of _document, with --split-sentences                 |
| PREFIX.lock                           | while a job runs; an abandoned one is taken over             |
| *.tmp-…                               | while a job runs; left over by a killed job, removed by the next one |
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path
from megatron.core.datasets.preprocessing.documents import EncodedChunk, EncodedDocuments
from megatron.core.errors import ConfigError, DataError, StorageError
from megatron.core.paths import explain_no_directory

Level = Literal["document", "sentence"]
"""Unit of a sequence."""


def output_prefixes(
    prefix: str, keys: Sequence[str], partitions: int, level: Level
) -> tuple[dict[str, str], dict[tuple[int, str], str]]:
    """The datasets of a job without .bin and .idx: by key, and their parts by partition and key."""
    whole = {key: f"{prefix}_{key}_{level}" for key in keys}
    parts = {
        (partition, key): whole[key] if partitions == 1 else f"{prefix}_{partition}_{key}_{level}"
        for partition in range(partitions)
        for key in keys
    }
    return whole, parts


class DatasetWriter:
    """Builders for every partition and key; `finish` gives the files their names, leaving early removes them.

    Raises ConfigError if output exists and `overwrite` is False, or if the output directory is missing.
    """

    def __init__(
        self,
        prefix: str,
        keys: Sequence[str],
        partitions: int,
        dtype: str,
        *,
        overwrite: bool,
        level: Level = "document",
    ) -> None:
        self._keys = keys
        self._partitions = partitions
        self._merged, self._parts = output_prefixes(prefix, keys, partitions, level)
        self._dtype = dtype
        self.num_sequences = dict.fromkeys(keys, 0)
        self.num_tokens = dict.fromkeys(keys, 0)
        paths = dict.fromkeys([*self._parts.values(), *self._merged.values()])
        _check_free(paths, overwrite)
        _remove_leftovers(paths)
        self._builders: dict[tuple[int, str], IndexedDatasetBuilder] = {}

    def __enter__(self) -> DatasetWriter:
        try:
            for part, path in self._parts.items():
                self._builders[part] = IndexedDatasetBuilder(get_bin_path(path), self._dtype)
        except BaseException:
            self._abort()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._abort()

    def add(self, chunk: EncodedChunk) -> None:
        """Append the documents of a chunk."""
        for (partition, key), documents in chunk.streams.items():
            _add_documents(self._builders[partition, key], documents)
            self.num_sequences[key] += len(documents.sequence_lengths)
            self.num_tokens[key] += len(documents.tokens)

    def finish(self) -> list[str]:
        """Complete all files and return the prefixes of the datasets, one per key."""
        for part, path in self._parts.items():
            self._builders[part].finalize(get_idx_path(path))
        if self._partitions > 1:
            for key, path in self._merged.items():
                with IndexedDatasetBuilder(get_bin_path(path), self._dtype) as builder:
                    for partition in range(self._partitions):
                        builder.add_index(self._parts[partition, key])
                    builder.finalize(get_idx_path(path))
        return list(self._merged.values())

    def _abort(self) -> None:
        for builder in self._builders.values():
            builder.abort()


@contextlib.contextmanager
def output_lock(prefix: str) -> Iterator[None]:
    """Hold PREFIX.lock; a second job on the prefix raises ConfigError. The lock of a killed job counts for nothing."""
    path = f"{prefix}.lock"
    directory = os.path.dirname(prefix) or "."
    problem = explain_no_directory(Path(directory))
    if problem is not None:
        remedy = "create it" if problem == "does not exist" else "choose another"
        raise ConfigError(f"--output-prefix {prefix}: the directory {directory} {problem}; {remedy}")
    descriptor = _acquire(path, prefix)
    try:
        with contextlib.suppress(OSError):  # only for the message of the other job: a full disk is reported elsewhere
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
        os.close(descriptor)


def _acquire(path: str, prefix: str) -> int:
    """Open and lock the file, making sure that it is still the one under this name."""
    while True:
        try:
            # The file is opened first and locked then, so another job may remove it in between; see below.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except PermissionError as error:
            raise ConfigError(f"--output-prefix {prefix}: {path} cannot be written: {error.strerror}") from error
        except FileNotFoundError as error:
            # /proc and its like: directories of the system that exist and hold no files of users.
            where = os.path.dirname(path) or "."
            raise ConfigError(f"--output-prefix {prefix}: {where} takes no files; choose another directory") from error
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise ConfigError(
                f"--output-prefix {prefix}: {holder} is writing it now; wait for that job or choose another prefix"
            ) from error
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)  # the job before us removed the file between our open and lock


def _check_free(prefixes: Sequence[str] | dict[str, None], overwrite: bool) -> None:
    existing = [
        name for prefix in prefixes for name in (get_bin_path(prefix), get_idx_path(prefix)) if os.path.lexists(name)
    ]
    directories = [name for name in existing if os.path.isdir(name)]
    if directories:
        raise DataError(f"{directories[0]}: is a directory, but output goes there; choose another --output-prefix")
    if existing and not overwrite:
        raise ConfigError(f"{existing[0]} exists; pass --overwrite to replace it, or choose another --output-prefix")


def _remove_leftovers(prefixes: Sequence[str] | dict[str, None]) -> None:
    """Temporary files of killed jobs; we hold the lock, so nobody is writing them."""
    for prefix in prefixes:
        for name in (get_bin_path(prefix), get_idx_path(prefix)):
            for leftover in glob.glob(f"{glob.escape(name)}.tmp-*"):
                with contextlib.suppress(OSError):
                    os.unlink(leftover)


def _add_documents(builder: IndexedDatasetBuilder, documents: EncodedDocuments) -> None:
    sequence = token = 0
    for count in documents.sequence_counts:
        lengths = documents.sequence_lengths[sequence : sequence + count]
        size = sum(lengths)
        builder.add_document(documents.tokens[token : token + size], lengths)
        sequence += count
        token += size
