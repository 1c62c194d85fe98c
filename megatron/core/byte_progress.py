# SPDX-License-Identifier: Apache-2.0
"""Progress of a tool that reads or writes many bytes: a bar on a terminal, plain lines in a file.

    with ByteProgress("reading iter_0000100", total_bytes) as progress:
        for block in blocks:
            progress.add(len(block))

`reading iter_0000100 [########------------]  40 %  1.2 GB of 3.0 GB, 410.0 MB/s, 4s left`
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from megatron.core.errors import format_bytes, say

_QUIET_SECONDS = 2.0
"""Seconds below which no bar is shown."""
_REDRAW_SECONDS = 0.2
_LINE_SECONDS = 10.0
_BAR_WIDTH = 20


class ByteProgress:
    """Bytes so far of a known total, with rate and remaining time; silent for the first two seconds.

    stream: standard error when None, so that a tool's result can be piped elsewhere. clock: seconds.
    """

    def __init__(
        self, title: str, total_bytes: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.title, self.total_bytes = title, total_bytes
        self.done_bytes = 0
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._is_terminal = self._stream.isatty()
        self._started_at = clock()
        self._told_at = self._started_at + _QUIET_SECONDS - (_REDRAW_SECONDS if self._is_terminal else _LINE_SECONDS)
        self._is_drawn = False

    def __enter__(self) -> ByteProgress:
        return self

    def __exit__(self, *_: object) -> None:
        # What is printed next takes the bar's place.
        if self._is_drawn:
            self._write("\r\x1b[K")

    def add(self, num_bytes: int) -> None:
        """Count bytes, and say so when it is time."""
        self.done_bytes += num_bytes
        now = self._clock()
        if now - self._told_at < (_REDRAW_SECONDS if self._is_terminal else _LINE_SECONDS):
            return
        self._told_at = now
        if self._is_terminal:
            self._is_drawn = True
            # A line as wide as the terminal would wrap, and the carriage return would no longer reach its start.
            self._write("\r\x1b[K" + self.text()[: shutil.get_terminal_size().columns - 1])
        else:
            say(self.text(), self._stream)

    def text(self) -> str:
        """The line as of now."""
        share = min(self.done_bytes / self.total_bytes, 1.0) if self.total_bytes else 1.0
        rate = self.done_bytes / max(self._clock() - self._started_at, 1e-9)
        bar = ""
        if self._is_terminal:
            filled = int(share * _BAR_WIDTH)
            bar = f"[{'#' * filled}{'-' * (_BAR_WIDTH - filled)}] "
        line = f"{self.title} {bar}{share:4.0%}  {format_bytes(self.done_bytes)} of {format_bytes(self.total_bytes)}"
        if not rate:
            return line
        minutes, seconds = divmod(int(max(self.total_bytes - self.done_bytes, 0) / rate), 60)
        return f"{line}, {format_bytes(rate)}/s, {f'{minutes}m' if minutes else ''}{seconds}s left"

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # a terminal that has gone ends nothing
            self._is_drawn = False
