# SPDX-License-Identifier: Apache-2.0
"""One tensor in the form that torch.save gives it, so that its values can be written and read in slices.

It is a zip archive without compression, which torch reads by the names of its entries:

    archive/data.pkl     the dtype, shape and strides, as a pickle
    archive/byteorder    "little"
    archive/version      "3"
    archive/data/0       the values, row by row; their first byte at a multiple of 64

render_head     everything before the values
render_tail     all that follows them, their checksum included
find_values     where the values begin in an archive, ours or torch.save's

The layout follows PKWARE's .ZIP File Format Specification, with 64-bit sizes throughout, as torch writes it.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

_FOLDER = "archive"
_VALUES = f"{_FOLDER}/data/0"
_ALIGNMENT = 64
_STORAGES = {
    torch.float64: torch.DoubleStorage, torch.float32: torch.FloatStorage, torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage, torch.int64: torch.LongStorage, torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage, torch.int8: torch.CharStorage, torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage, torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
}  # fmt: skip
"""The classes that stand for a dtype in a pickle; newer dtypes are named next to untyped storage."""

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_CENTRAL_HEADER = struct.Struct("<4s6H3I5H2I")
_DESCRIPTOR = struct.Struct("<4sI2Q")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR_64 = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
_SIZE_64 = struct.Struct("<2H2Q")
_VERSION, _UTF8, _SUMS_FOLLOW, _FIRST_DAY = 45, 1 << 11, 1 << 3, 0x21
_IN_64_BITS, _IN_64_BITS_16 = 0xFFFFFFFF, 0xFFFF


class _ZipEntry(NamedTuple):
    """A file of the archive."""

    name: str
    offset: int
    """Of its header."""
    num_bytes: int
    crc32: int = 0

    def render_central(self) -> bytes:
        """Its line in the archive's directory."""
        sizes = _SIZE_64.pack(1, 16, self.num_bytes, self.num_bytes)
        flags = _UTF8 | (_SUMS_FOLLOW if self.name == _VALUES else 0)
        header = _CENTRAL_HEADER.pack(
            b"PK\1\2", _VERSION, _VERSION, flags, 0, 0, _FIRST_DAY, self.crc32, _IN_64_BITS, _IN_64_BITS,
            len(self.name), len(sizes), 0, 0, 0, 0, self.offset,
        )  # fmt: skip
        return header + self.name.encode() + sizes


class Head(NamedTuple):
    """Header before the values."""

    content: bytes
    entries: tuple[_ZipEntry, ...]
    """The last one is the values, whose checksum is not known yet."""


def render_head(dtype: torch.dtype, shape: Sequence[int]) -> Head:
    """The archive of a tensor in row-major order, up to its first value."""
    files = {"data.pkl": _pickle(dtype, shape), "byteorder": sys.byteorder.encode(), "version": b"3\n"}
    content = bytearray()
    entries = []
    for name, data in files.items():
        entry = _ZipEntry(f"{_FOLDER}/{name}", len(content), len(data), zlib.crc32(data))
        entries.append(entry)
        content += _render_local(entry.name, _UTF8, entry.crc32, len(data), b"") + data
    values = _ZipEntry(_VALUES, len(content), _count_values(shape) * dtype.itemsize)
    sizes = _SIZE_64.pack(1, 16, 0, 0)
    # A field without meaning, as torch has one, moves the values to where a processor likes to have them.
    end = len(content) + _LOCAL_HEADER.size + len(_VALUES) + len(sizes) + 4
    padding = -end % _ALIGNMENT
    extra = sizes + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    content += _render_local(_VALUES, _UTF8 | _SUMS_FOLLOW, 0, _IN_64_BITS, extra)
    return Head(bytes(content), (*entries, values))


def render_tail(head: Head, crc32: int) -> bytes:
    """The rest of the archive after the values, whose checksum is `crc32`."""
    values = head.entries[-1]._replace(crc32=crc32)
    descriptor = _DESCRIPTOR.pack(b"PK\7\x08", crc32, values.num_bytes, values.num_bytes)
    start = len(head.content) + values.num_bytes + len(descriptor)
    central = b"".join(entry.render_central() for entry in (*head.entries[:-1], values))
    count, size = len(head.entries), len(central)
    end_64 = _END_64.pack(b"PK\6\6", _END_64.size - 12, _VERSION, _VERSION, 0, 0, count, count, size, start)
    locator = _LOCATOR_64.pack(b"PK\6\7", 0, start + size, 1)
    end = _END.pack(b"PK\5\6", 0, 0, _IN_64_BITS_16, _IN_64_BITS_16, _IN_64_BITS, _IN_64_BITS, 0)
    return descriptor + central + end_64 + locator + end


def find_values(file: io.FileIO, start: int, length: int, dtype: torch.dtype, shape: Sequence[int]) -> int | None:
    """Return where in `file` the values of the archive at [start, start + length) begin.

    None unless it is the archive of one tensor of this dtype and shape whose values are stored row by row. Nothing is
    unpickled. Raises OSError.
    """
    head = render_head(dtype, shape).content
    file.seek(start)
    if file.read(len(head)) == head:
        return start + len(head)
    try:
        return _find_in_zip(file, start, length, dtype, shape)
    # Anything may be wrong with a damaged archive; who reads it in another way will say what.
    except (zipfile.BadZipFile, KeyError, ValueError, NotImplementedError, RuntimeError, struct.error, EOFError):
        return None


def _find_in_zip(file: io.FileIO, start: int, length: int, dtype: torch.dtype, shape: Sequence[int]) -> int | None:
    """The same for an archive that torch.save wrote itself, with its entries in another order."""
    with zipfile.ZipFile(_Window(file, start, length)) as archive:
        folder = archive.infolist()[0].filename.partition("/")[0]
        values = archive.getinfo(f"{folder}/data/0")
        expected = _pickle(dtype, shape)
        # What is compressed may become any length; torch compresses nothing.
        if any(entry.compress_type for entry in archive.infolist()):
            return None
        if archive.getinfo(f"{folder}/data.pkl").file_size != len(expected):
            return None
        is_plain = archive.read(f"{folder}/data.pkl") == expected
        # Old releases of torch wrote no byteorder.
        if f"{folder}/byteorder" in archive.namelist():
            is_plain &= archive.read(f"{folder}/byteorder") == sys.byteorder.encode()
    if not is_plain or values.compress_type or values.file_size != _count_values(shape) * dtype.itemsize:
        return None
    file.seek(start + values.header_offset)
    header = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    return start + values.header_offset + _LOCAL_HEADER.size + header[-2] + header[-1]


class _Window(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: io.FileIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError(f"seek to {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._position)]
        self._file.seek(self._start + self._position)
        count = self._file.readinto(view) or 0
        self._position += count
        return count


def _count_values(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _render_local(name: str, flags: int, crc32: int, num_bytes: int, extra: bytes) -> bytes:
    header = _LOCAL_HEADER.pack(
        b"PK\3\4", _VERSION, flags, 0, 0, _FIRST_DAY, crc32, num_bytes, num_bytes, len(name), len(extra)
    )
    return header + name.encode() + extra


class _Values(NamedTuple):
    """Stands for the storage of a tensor in its pickle."""

    storage: type
    length: int


class _Description:
    """Is pickled as the tensor would be."""

    def __init__(self, dtype: torch.dtype, shape: Sequence[int]) -> None:
        self.dtype, self.shape = dtype, shape

    def __reduce__(self) -> tuple[Any, ...]:
        # Of a tensor without values, for the names of torch's functions.
        function, (storage, offset, _, _, *rest) = torch.empty(0, dtype=self.dtype).__reduce_ex__(2)
        count = _count_values(self.shape)
        if isinstance(storage, torch.UntypedStorage):
            values = _Values(torch.UntypedStorage, count * self.dtype.itemsize)
        else:
            values = _Values(_STORAGES[self.dtype], count)
        strides = torch.empty(torch.Size(self.shape), dtype=self.dtype, device="meta").stride()
        return function, (values, offset, tuple(self.shape), tuple(strides), *rest)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Values):
            return ("storage", obj.storage, "0", "cpu", obj.length)
        return None


def _pickle(dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    """Return what torch.save writes about a tensor in addition to its values."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(_Description(dtype, shape))
    return buffer.getvalue()
