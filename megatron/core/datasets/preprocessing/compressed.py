"""The bytes of a text file, block by block: plain, .gz, or .zst with the zstandard package."""

from __future__ import annotations

import gzip
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

from megatron.core import optional_deps
from megatron.core.errors import DataError, StorageError

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_FORMATS = {".gz": ("gzip", _GZIP_MAGIC), ".zst": ("Zstandard", _ZSTD_MAGIC)}
_SKIPPABLE_FRAME = b"\x2a\x4d\x18"
"""Bytes 1 to 3 of what some programs write before the first Zstandard frame."""
_OTHER_FORMATS = {
    b"\xfd7zXZ\x00": "xz",
    b"BZh": "bzip2",
    b"PK\x03\x04": "zip",
    b"PAR1": "Parquet",
    b"\x04\x22\x4d\x18": "LZ4",
}
_OTHER_ENDINGS = (".xz", ".bz2", ".zip", ".parquet", ".lz4")
_ZSTD_INPUT_BYTES = 1 << 10
"""Compressed bytes handed over at once: Zstandard can make 32,768 bytes of one."""


class _TruncatedZstd(Exception):
    """The file ends within a frame."""


def is_compressed(path: str) -> bool:
    """Whether the bytes of the text are not those on disk."""
    return path.endswith(tuple(_FORMATS))


def check_format(path: str) -> None:
    """Raise DataError unless this is a file that `read_blocks` reads, ConfigError where a package is missing for it."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise DataError(
                f"--input {path}: is a directory; give a file, or a quoted pattern such as '{path.rstrip('/')}/*.jsonl'"
            )
        if not stat.S_ISREG(mode):
            raise DataError(
                f"--input {path}: is not a regular file (a pipe or a device); write the text to a file first"
            )
        with open(path, "rb") as file:
            head = file.read(8)
    except OSError as error:
        raise DataError(f"--input {path}: cannot be read: {error.strerror}") from error
    if head[1:4] == _SKIPPABLE_FRAME and head[0] >> 4 == 5:
        head = _ZSTD_MAGIC
    name = next((name for magic, name in _OTHER_FORMATS.items() if head.startswith(magic)), None)
    if name or path.endswith(_OTHER_ENDINGS):
        raise DataError(
            f"--input {path}: {name or os.path.splitext(path)[1]} is not read; "
            "convert it to .jsonl, .jsonl.gz or .jsonl.zst"
        )
    for ending, (name, magic) in _FORMATS.items():
        if path.endswith(ending) and head and not head.startswith(magic):
            raise DataError(
                f"--input {path}: does not start like a {name} file (found {head[: len(magic)].hex()}, expected "
                f"{magic.hex()}); rename or compress it"
            )
        if head.startswith(magic) and not path.endswith(ending):
            raise DataError(f"--input {path}: is {name}-compressed but not named {ending}; rename it to {path}{ending}")
    if path.endswith(".zst"):
        _zstandard(path)


def read_blocks(path: str, block_bytes: int) -> Iterator[bytes]:
    """The text of a file in blocks of about `block_bytes`, none of them empty.

    Raises DataError for a damaged file and one that changes while it is read, StorageError where reading fails.
    """
    name = next((name for ending, (name, _) in _FORMATS.items() if path.endswith(ending)), "")
    try:
        with open(path, "rb") as raw:
            opened = os.fstat(raw.fileno())
            read = _reader(path, raw)
            while block := read(block_bytes):
                yield block
            now = os.fstat(raw.fileno())
    except (EOFError, _TruncatedZstd) as error:
        raise DataError(f"{path}: the {name} file is truncated; fetch or compress it again") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: the {name} file is damaged ({error}); fetch or compress it again") from error
    except FileNotFoundError as error:
        raise DataError(f"{path}: vanished before it was read") from error
    except OSError as error:
        raise StorageError(f"{path}: reading failed: {error.strerror}") from error
    if (opened.st_size, opened.st_mtime_ns) != (now.st_size, now.st_mtime_ns):
        raise DataError(
            f"{path}: changed while it was read ({opened.st_size} to {now.st_size} bytes); "
            "run again when it is complete"
        )


def _reader(path: str, raw: IO[bytes]) -> Callable[[int], bytes]:
    if path.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw).read
    if path.endswith(".zst"):
        return _ZstdReader(path, raw).read
    return raw.read


def _zstandard(path: str) -> Any:
    return optional_deps.require("zstandard", needed_by=f"--input {path}")


class _ZstdReader:
    """Reads frames one after the other, in bounded memory, and notices a missing end (the library's own reader does
    not)."""

    def __init__(self, path: str, raw: IO[bytes]) -> None:
        self._path = path
        self._library = _zstandard(path)
        self._raw = raw
        self._input = b""
        self._frame: Any = None

    def read(self, size: int) -> bytes:
        """At least `size` bytes where there are as many, b"" at the end."""
        pieces: list[bytes] = []
        available = 0
        while available < size and (piece := self._next()) is not None:
            pieces.append(piece)
            available += len(piece)
        return b"".join(pieces)

    def _next(self) -> bytes | None:
        """What comes of the next bit of input, perhaps nothing yet; None at the end."""
        compressed = self._input or self._raw.read(_ZSTD_INPUT_BYTES)
        if not compressed:
            if self._frame is not None:
                raise _TruncatedZstd
            return None
        if self._frame is None:
            self._frame = self._library.ZstdDecompressor().decompressobj()
        try:
            piece: bytes = self._frame.decompress(compressed)
        except self._library.ZstdError as error:
            raise DataError(
                f"{self._path}: the Zstandard file is damaged ({error}); fetch or compress it again"
            ) from error
        self._input = b""
        if self._frame.eof:
            self._input, self._frame = self._frame.unused_data, None
        return piece
