"""What a preprocessing job says while it runs: a bar with the time left on a terminal, else a line now and then."""

from __future__ import annotations

import time
from typing import TextIO

_BAR_WIDTH = 30
_REDRAW_SECONDS = 0.2


class Progress:
    """Documents and bytes so far, and how fast they come.

    log_interval   documents between two lines where the stream is no terminal
    total_bytes    of the input where it is known; without it the bar shows no share and no time left
    """

    def __init__(self, stream: TextIO, log_interval: int, total_bytes: int | None) -> None:
        self._stream = stream
        self._log_interval = log_interval
        self._total_bytes = total_bytes
        self._is_terminal = stream.isatty()
        self._started_at = time.monotonic()
        self._drawn_at = 0.0
        self._next_line = log_interval
        self.documents = 0
        self.bytes = 0

    def add(self, documents: int, num_bytes: int) -> None:
        """Count a chunk, and say so when it is time."""
        self.documents += documents
        self.bytes += num_bytes
        if self._is_terminal:
            if time.monotonic() - self._drawn_at >= _REDRAW_SECONDS:
                self._drawn_at = time.monotonic()
                self._stream.write(f"\r\x1b[K{self._bar()}{self.rates()}")
                self._stream.flush()
        elif self.documents >= self._next_line:
            self._next_line = (self.documents // self._log_interval + 1) * self._log_interval
            self.say(f"processed {self.documents} documents: {self.rates()}")

    def say(self, line: str) -> None:
        """Print a line; a bar makes room for it."""
        print(("\r\x1b[K" if self._is_terminal else "") + line, file=self._stream, flush=True)

    def rates(self) -> str:
        """Documents and megabytes (10^6) of text per second since the start."""
        elapsed_seconds = max(time.monotonic() - self._started_at, 1e-9)
        return f"{self.documents / elapsed_seconds:.1f} docs/s, {self.bytes / elapsed_seconds / 1e6:.2f} MB/s"

    def _bar(self) -> str:
        if not self._total_bytes or not self.bytes:
            return f"{self.bytes / 1e6:.1f} MB  "
        share = min(self.bytes / self._total_bytes, 1.0)
        filled = int(share * _BAR_WIDTH)
        seconds_left = int((time.monotonic() - self._started_at) * (1 - share) / share)
        minutes, seconds = divmod(seconds_left, 60)
        return f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {share:4.0%}  {minutes}:{seconds:02d} left  "
