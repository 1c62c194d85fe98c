# SPDX-License-Identifier: Apache-2.0
"""A bar on the last line of a terminal, below whatever else is printed."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from megatron.training.hooks.progress_lines import format_duration
from megatron.training.metrics import MetricsRow

# Rewriting the line costs a system call, which a step of a tiny model would feel.
_REDRAW_SECONDS = 0.1
_RATE_MEMORY = 0.9
"""Weight of the past in the running mean of the step time."""


class ProgressBar:
    """A bar with rate and remaining time on the last line of a terminal; log files never see it.

    `iteration 120/300 [########------------] 2.1 it/s, 1m26s left, lm loss 4.21`, rewritten in place.
    """

    def __init__(
        self, iteration: int, target_iterations: int, predict: Callable[[], float | None] = lambda: None
    ) -> None:
        """predict: the seconds that are left; None as long as only the bar's rate can tell."""
        self.iteration, self.target = iteration, target_iterations
        self.predict = predict
        self.seconds_per_step: float | None = None
        self._loss_text = ""
        self._drawn_at = 0.0
        self._is_drawn = False
        self._terminal: TextIO = sys.stdout

    def make_room(self) -> None:
        """From now on whatever this process prints takes the bar's place, and the bar moves below it."""
        sys.stdout = _AboveBar(sys.stdout, self)  # type: ignore[assignment]
        # A warning in a file does not touch the terminal.
        if sys.stderr.isatty():
            sys.stderr = _AboveBar(sys.stderr, self)  # type: ignore[assignment]

    def leave(self) -> None:
        """Erase the bar for good, and give the streams back."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if isinstance(stream, _AboveBar):
                setattr(sys, name, stream.stream)
        # Last: the terminal may be gone.
        self.clear()

    def advance(self, iteration: int, elapsed_seconds: float) -> None:
        """Take in a step; redraw unless that was done a moment ago."""
        self.iteration = iteration
        before = elapsed_seconds if self.seconds_per_step is None else self.seconds_per_step
        self.seconds_per_step = _RATE_MEMORY * before + (1 - _RATE_MEMORY) * elapsed_seconds
        if time.monotonic() - self._drawn_at > _REDRAW_SECONDS or self.iteration == self.target:
            self.redraw()

    def show_row(self, row: MetricsRow) -> None:
        """Show this step's values from now on: its losses."""
        self.show(row.losses)

    def show(self, losses: Mapping[str, float]) -> None:
        """Show these losses from now on."""
        self._loss_text = "".join(f", {name} {loss:.3f}" for name, loss in losses.items())
        if self.iteration == self.target:
            self.redraw()

    def text(self, columns: int) -> str:
        """Return the line, at most `columns - 1` characters wide."""
        share = self.iteration / self.target if self.target else 1.0
        filled = round(20 * share)
        line = f"iteration {self.iteration}/{self.target} [{'#' * filled}{'-' * (20 - filled)}]"
        if self.seconds_per_step:
            left = self.predict()
            left = (self.target - self.iteration) * self.seconds_per_step if left is None else left
            line += f" {1 / self.seconds_per_step:.2f} it/s, {format_duration(left)} left{self._loss_text}"
        # A line as wide as the terminal would wrap, and the carriage return would no longer reach its start.
        return line[: columns - 1]

    def redraw(self) -> None:
        """Write the line over the one on the terminal."""
        self._drawn_at = time.monotonic()
        self._is_drawn = True
        self._write("\r\x1b[K" + self.text(shutil.get_terminal_size().columns))

    def clear(self) -> None:
        """Erase the line, so that text can be printed in its place."""
        if self._is_drawn:
            self._is_drawn = False
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        self._terminal.write(text)
        self._terminal.flush()


class _AboveBar:
    """A stream to the terminal: what is written takes the bar's place, and the bar comes back below whole lines."""

    def __init__(self, stream: TextIO, bar: ProgressBar) -> None:
        self.stream, self.bar = stream, bar

    def write(self, text: str) -> int:
        """Write the text where the bar was."""
        self.bar.clear()
        written = self.stream.write(text)
        # After part of a line the bar would hide it.
        if text.endswith("\n"):
            self.stream.flush()
            self.bar.redraw()
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
