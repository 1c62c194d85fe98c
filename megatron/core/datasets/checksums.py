# SPDX-License-Identifier: Apache-2.0
"""`PREFIX.sum`: checksums of a token dataset, so that a flipped bit on disk is an error instead of another token.

The file is optional: tools/verify_dataset.py --write-sum makes it. Where it exists, a reader checks the whole index
when it opens the dataset, and each block of tokens when it first reads from it, so that opening stays quick.

    offset  type               field (little endian)
    0       8 bytes            magic "MMIDSUM" and a zero byte
    8       uint64             version, 1
    16      uint64             size of .bin in bytes
    24      uint64             size of .idx in bytes
    32      uint32             crc32 of .idx
    36      uint32             bytes of a block of .bin
    40      uint32             crc32 of the table
    44      uint32             crc32 of the 44 bytes before
    48      uint32 [blocks]    table: crc32 of each block of .bin, the last one being shorter
"""

from __future__ import annotations

import contextlib
import os
import struct
import uuid
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from megatron.core.datasets.indexed_format import Array, file_size, get_bin_path, get_idx_path, map_file
from megatron.core.errors import DataError, StorageError

BLOCK_BYTES = 1 << 14
"""Small, because a reader of one short document must check a whole block; 4 bytes per block are 0.02 % of the data."""

_MAGIC = b"MMIDSUM\x00"
_VERSION = 1
_HEADER = struct.Struct("<8sQQQIIII")
_CHECKED_HEADER_BYTES = _HEADER.size - 4
_READ_BYTES = 1 << 24

Reader = Callable[[int, int], bytes | memoryview]
"""(offset, size) -> these bytes of .bin."""


def get_sum_path(path_prefix: str) -> str:
    """The file of checksums that belongs to a prefix."""
    return path_prefix + ".sum"


@dataclass(frozen=True)
class Checksums:
    """The content of PREFIX.sum, and which blocks of .bin this process has found good."""

    path_prefix: str
    bin_bytes: int
    idx_bytes: int
    idx_crc: int
    block_bytes: int
    table: Array
    """uint32 [blocks]."""
    checked: Array
    """uint8 [blocks]: 1 for a block that was compared already."""

    def check_index(self) -> None:
        """Compare all of .idx. Raises DataError."""
        path = get_idx_path(self.path_prefix)
        found = _crc_of_file(path)
        if found != self.idx_crc:
            raise self._damaged(path, 0, self.idx_bytes, self.idx_crc, found)

    def check(self, offset: int, size: int, read: Reader) -> None:
        """Compare the blocks of .bin that bytes [offset, offset + size) lie in, unless that was done before."""
        # A block is compared once per process: reads come back to the same documents in every epoch.
        first, last = offset // self.block_bytes, (offset + size - 1) // self.block_bytes
        for block in range(first, last + 1):
            if not self.checked[block]:
                start = block * self.block_bytes
                self.compare(block, read(start, min(self.block_bytes, self.bin_bytes - start)))
                self.checked[block] = 1

    def compare(self, block: int, content: bytes | memoryview) -> None:
        """Compare one block of .bin. Raises DataError."""
        found, expected = zlib.crc32(content), int(self.table[block])
        if found != expected:
            start = block * self.block_bytes
            raise self._damaged(get_bin_path(self.path_prefix), start, len(content), expected, found)

    def _damaged(self, path: str, start: int, length: int, expected: int, found: int) -> DataError:
        return DataError(
            f"{path}: bytes {start} to {start + length} have checksum {found:08x}, expected {expected:08x} by "
            f"{get_sum_path(self.path_prefix)}: damaged or changed; copy the dataset again, or, if it is as it should "
            "be, write the checksums anew with tools/verify_dataset.py --write-sum"
        )


def read_checksums(path_prefix: str) -> Checksums | None:
    """The checksums of a dataset; None where it has no .sum file.

    Raises DataError for a file that is damaged or belongs to other data.
    """
    path = get_sum_path(path_prefix)
    if not os.path.lexists(path):
        return None
    remedy = "copy it again, delete it, or write it anew with tools/verify_dataset.py --write-sum"
    size = file_size(path)
    buffer = map_file(path, size)
    if size < _HEADER.size:
        raise DataError(f"{path}: expected at least {_HEADER.size} bytes, have {size}; {remedy}")
    head = buffer[: _HEADER.size].tobytes()
    magic, version, bin_bytes, idx_bytes, idx_crc, block_bytes, table_crc, header_crc = _HEADER.unpack(head)
    # The checks go from cheap to dear, and from what makes the others meaningless.
    if magic != _MAGIC or version != _VERSION:
        raise DataError(f"{path}: begins with {head[:16]!r}, expected {_MAGIC!r} and version {_VERSION}; {remedy}")
    table_bytes = 4 * -(bin_bytes // -block_bytes) if block_bytes else -1
    is_whole = size == _HEADER.size + table_bytes and zlib.crc32(head[:_CHECKED_HEADER_BYTES]) == header_crc
    if not is_whole or zlib.crc32(buffer[_HEADER.size :].data) != table_crc:
        raise DataError(f"{path}: does not agree with its own checksum; {remedy}")
    for other, described in ((get_bin_path(path_prefix), bin_bytes), (get_idx_path(path_prefix), idx_bytes)):
        if file_size(other) != described:
            raise DataError(f"{path}: describes {other} with {described} bytes, it has {file_size(other)}; {remedy}")
    table = np.frombuffer(buffer, dtype="<u4", offset=_HEADER.size)
    checked = np.zeros(len(table), dtype=np.uint8)
    return Checksums(path_prefix, bin_bytes, idx_bytes, idx_crc, block_bytes, table, checked)


def verify_checksums(path_prefix: str) -> bool:
    """Compare everything with PREFIX.sum; False where there is none. Raises DataError at the first difference."""
    sums = read_checksums(path_prefix)
    if sums is None:
        return False
    sums.check_index()
    for block, content in enumerate(_pieces(get_bin_path(path_prefix), sums.block_bytes)):
        sums.compare(block, content)
    return True


def write_checksums(path_prefix: str) -> str:
    """Write PREFIX.sum from the files as they are; returns its path. It appears when it is whole."""
    bin_path, idx_path = get_bin_path(path_prefix), get_idx_path(path_prefix)
    bin_bytes = file_size(bin_path)
    table = np.fromiter(map(zlib.crc32, _pieces(bin_path, BLOCK_BYTES)), dtype="<u4")
    fields = (_MAGIC, _VERSION, bin_bytes, file_size(idx_path), _crc_of_file(idx_path), BLOCK_BYTES)
    head = struct.pack("<8sQQQIII", *fields, zlib.crc32(table.data))
    path = get_sum_path(path_prefix)
    temporary = f"{path}.tmp-{uuid.uuid4().hex}"
    try:
        with open(temporary, "wb") as file:
            file.write(head + struct.pack("<I", zlib.crc32(head)))
            file.write(table.data)
            file.flush()
            os.fsync(file.fileno())
        # A reader must never meet half of a table: it would call good data damaged.
        os.replace(temporary, path)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}; nothing was left under this name") from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    return path


def _crc_of_file(path: str) -> int:
    crc = 0
    for piece in _pieces(path, _READ_BYTES):
        crc = zlib.crc32(piece, crc)
    return crc


def _pieces(path: str, size: int) -> Iterator[bytes]:
    try:
        with open(path, "rb", buffering=max(size, 1 << 20)) as file:
            while piece := file.read(size):
                yield piece
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from error
