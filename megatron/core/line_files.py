# SPDX-License-Identifier: Apache-2.0
"""Text files that grow by whole lines: readers leave out what a full disk or a kill has cut off, and writers remove it
before anything follows it."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron.core.errors import StorageError

# Longer than any line that is written here; a torn line is looked for in the end of a file only.
_LONGEST_LINE_BYTES = 1 << 20


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append lines, all of them or none.

    Raises StorageError when the disk does not take them; the file then ends where it ended before. The file is opened
    again for each call, so that appending survives a file system that was lost for a while.
    """
    data = "".join(f"{line}\n" for line in lines).encode()
    try:
        # Without a buffer: one that could not be written would come out later, after what was written since.
        with path.open("a+b", buffering=0) as file:
            end = _cut_torn_line(file)
            try:
                _write_all(file, data)
            except OSError:
                # A truncation that fails as well leaves a torn line, which the next call cuts off.
                with contextlib.suppress(OSError):
                    file.truncate(end)
                raise
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error.strerror}); free some space") from error


def _write_all(file: io.FileIO, data: bytes) -> None:
    # A disk that is nearly full takes a part of a write, without an error.
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _cut_torn_line(file: io.FileIO) -> int:
    """Remove what comes after the last end of a line; returns the length of the file in bytes."""
    end = file.seek(0, os.SEEK_END)
    start = max(0, end - _LONGEST_LINE_BYTES)
    if end == 0 or os.pread(file.fileno(), 1, end - 1) == b"\n":
        return end
    whole = start + os.pread(file.fileno(), end - start, start).rfind(b"\n") + 1
    file.truncate(whole)
    return whole


def read_rows(path: Path) -> tuple[list[dict[str, Any]], str | None]:
    """The JSON objects that the lines hold, and a note where the last line is unfinished and left out.

    Its writer may have been killed, or be writing right now. Raises OSError, and ValueError naming the line that holds
    no JSON object.
    """
    *whole, last = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(whole, 1):
        row = _parse_row(line)
        if row is None:
            raise ValueError(f"line {number} is no JSON object")
        rows.append(row)
    # An object that was cut anywhere lacks its closing bracket: what can be read is complete except for the end of
    # line.
    row = _parse_row(last)
    if row is not None:
        rows.append(row)
    elif last:
        return rows, f"{path} ends in an unfinished line, which is left out"
    return rows, None


def _parse_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
