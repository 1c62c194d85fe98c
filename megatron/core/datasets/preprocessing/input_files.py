# SPDX-License-Identifier: Apache-2.0
"""Read text files as chunks of whole lines, in bounded memory whatever the size of the file or of a line.

Positions: lines count from 1 in each file, byte offsets from 0 (of the decompressed text for .gz and .zst), and
`first_line_overall` counts from 0 over all files.

Files are plain, .gz, or .zst with the zstandard package.
"""

from __future__ import annotations

import glob
import gzip
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from megatron.core import optional_deps
from megatron.core.errors import ConfigError, DataError, StorageError

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
    """Return whether the bytes of the text are not those on disk."""
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
    # pzstd and others put such a frame before the data.
    if head[1:4] == _SKIPPABLE_FRAME and head[0] >> 4 == 5:
        head = _ZSTD_MAGIC
    name = next((name for magic, name in _OTHER_FORMATS.items() if head.startswith(magic)), None)
    if name or path.endswith(_OTHER_ENDINGS):
        raise DataError(
            f"--input {path}: {name or os.path.splitext(path)[1]} is not read; "
            "convert it to .jsonl, .jsonl.gz or .jsonl.zst"
        )
    # Name and content must agree: compressed bytes read as text would be a file of one unusable line.
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
    # A corpus that is still being written would make a dataset that stops in the middle.
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
    """Reads frames one after the other, in bounded memory, and notices a missing end (the library's reader does
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
        """Return what comes of the next bit of input, perhaps nothing yet; None at the end."""
        compressed = self._input or self._raw.read(_ZSTD_INPUT_BYTES)
        if not compressed:
            if self._frame is not None:
                raise _TruncatedZstd
            return None
        # A file may be several frames, one after the other; each needs another decompressor.
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


# ---- chunks of lines


CHUNK_BYTES = 1 << 19
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Chunk:
    """Whole lines of one file."""

    path: str
    first_line: int
    first_line_overall: int
    byte_offset: int
    data: bytes
    """Ends with a newline unless the file does not. A line over the limit is cut one byte after it."""


def find_inputs(pattern: str) -> list[str]:
    """The files that `--input` names: one path, or a glob pattern, sorted. Each is checked to be readable text, gzip or
    Zstandard.

    Raises ConfigError where nothing matches, DataError for a file that cannot be read.
    """
    # A file whose name holds a bracket or a star is that file, not a pattern.
    paths = [pattern] if os.path.lexists(pattern) else sorted(glob.glob(pattern))
    if not paths:
        raise ConfigError(
            f"--input {pattern}: no such file; give a .jsonl, .jsonl.gz or .jsonl.zst file, or a pattern "
            "such as 'part*.jsonl'"
        )
    for path in paths:
        check_format(path)
    return paths


def count_lines(paths: Sequence[str]) -> int:
    """Lines of all files, blank ones and a last one without a newline included. Reads, and raises, as read_chunks."""
    count = 0
    for path in paths:
        block = b"\n"
        for block in read_blocks(path, CHUNK_BYTES):
            count += block.count(b"\n")
        # A last line without a newline is a line, too.
        count += not block.endswith(b"\n")
    return count


def total_bytes(paths: Sequence[str]) -> int:
    """Bytes of the files as they are on disk."""
    return sum(os.path.getsize(path) for path in paths)


def read_chunks(
    paths: Sequence[str], max_line_bytes: int, chunk_bytes: int = CHUNK_BYTES, *, cut_long_lines: bool = False
) -> Iterator[Chunk]:
    """All lines of all files in order. Memory: about chunk_bytes, or max_line_bytes where a line is that long.

    A line that goes on beyond the limit ends the reading at once, or with `cut_long_lines` becomes a separate chunk.
    Raises DataError for such a line, a damaged .gz file and a file that changes while it is read, StorageError where
    reading fails.
    """
    lines_before = 0
    for path in paths:
        cutter = _LineCutter(path, lines_before, max_line_bytes, cut_long_lines)
        for block in read_blocks(path, chunk_bytes):
            yield from cutter.cut(block)
        yield from cutter.finish()
        lines_before = cutter.lines_overall


def too_long(max_line_bytes: int) -> str:
    """Return what is wrong with a line over the limit."""
    return f"longer than --max-line-bytes {max_line_bytes}; split the document or raise the limit"


class _LineCutter:
    """Cuts blocks of bytes after their last newline and keeps the rest for the next block."""

    def __init__(self, path: str, lines_before: int, max_line_bytes: int, cut_long_lines: bool) -> None:
        self.path = path
        self.lines = 0
        self.lines_overall = lines_before
        self.offset = 0
        self._max_line_bytes = max_line_bytes
        self._cut_long_lines = cut_long_lines
        self._pending: list[bytes] = []
        self._pending_bytes = 0  # of the unfinished line, also those that were dropped

    def cut(self, block: bytes) -> Iterator[Chunk]:
        if self._is_too_long():
            end = block.find(b"\n") + 1
            self._pending_bytes += end or len(block)
            if not end:
                return
            yield self._emit()
            block = block[end:]
        end = block.rfind(b"\n") + 1
        if end:
            self._keep(block[:end])
            yield self._emit()
        if end < len(block):
            self._keep(block[end:])
            if self._is_too_long() and not self._cut_long_lines:
                raise DataError(
                    f"{self.path}:{self.lines + 1}: {too_long(self._max_line_bytes)}, "
                    "or leave out such lines with --on-bad-line skip"
                )

    def finish(self) -> Iterator[Chunk]:
        """The last line, if it has no newline."""
        if self._pending_bytes:
            yield self._emit()

    def _is_too_long(self) -> bool:
        return self._pending_bytes > self._max_line_bytes

    def _keep(self, data: bytes) -> None:
        self._pending.append(data)
        self._pending_bytes += len(data)

    def _emit(self) -> Chunk:
        data = b"".join(self._pending)
        if len(data) < self._pending_bytes:  # the rest of a line over the limit was dropped
            data = data[: self._max_line_bytes + 1]
        offset = self.offset
        # Editors on Windows begin UTF-8 files with it; JSON does not allow it.
        if offset == 0 and data.startswith(_BOM):
            offset, data = len(_BOM), data[len(_BOM) :]
        chunk = Chunk(self.path, self.lines + 1, self.lines_overall, offset, data)
        lines = data.count(b"\n") + (not data.endswith(b"\n"))
        self.lines += lines
        self.lines_overall += lines
        self.offset += self._pending_bytes
        self._pending, self._pending_bytes = [], 0
        return chunk
