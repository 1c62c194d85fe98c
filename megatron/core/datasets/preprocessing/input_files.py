"""Read text files as chunks of whole lines, in bounded memory whatever the size of the file or of a line.

Positions: lines count from 1 in each file, byte offsets from 0 (of the decompressed text for .gz and .zst), and
`first_line_overall` counts from 0 over all files.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.core.datasets.preprocessing.compressed import check_format, read_blocks
from megatron.core.errors import ConfigError, DataError

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
    """Ends with a newline unless the file does not. A line over the limit is cut one byte behind it."""


def find_inputs(pattern: str) -> list[str]:
    """The files that `--input` names: one path, or a glob pattern, sorted. Each is checked to be readable text, gzip or
    Zstandard.

    Raises ConfigError where nothing matches, DataError for a file that cannot be read.
    """
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
        count += not block.endswith(b"\n")
    return count


def total_bytes(paths: Sequence[str]) -> int:
    """Bytes of the files as they are on disk."""
    return sum(os.path.getsize(path) for path in paths)


def read_chunks(
    paths: Sequence[str], max_line_bytes: int, chunk_bytes: int = CHUNK_BYTES, *, cut_long_lines: bool = False
) -> Iterator[Chunk]:
    """All lines of all files in order. Memory: about chunk_bytes, or max_line_bytes where a line is that long.

    A line that goes on beyond the limit ends the reading at once, or with `cut_long_lines` becomes a chunk of its own.
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
    """What is wrong with a line over the limit."""
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
        if offset == 0 and data.startswith(_BOM):
            offset, data = len(_BOM), data[len(_BOM) :]
        chunk = Chunk(self.path, self.lines + 1, self.lines_overall, offset, data)
        lines = data.count(b"\n") + (not data.endswith(b"\n"))
        self.lines += lines
        self.lines_overall += lines
        self.offset += self._pending_bytes
        self._pending, self._pending_bytes = [], 0
        return chunk
