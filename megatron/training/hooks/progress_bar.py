"""A bar with rate and remaining time on the last line of a terminal; log files never see it."""

from __future__ import annotations

import shutil
import sys
import time

from megatron.training.hooks.meter import StepMetrics

_REDRAW_SECONDS = 0.1
_RATE_MEMORY = 0.9
"""Weight of the past in the running mean of the step time."""


class ProgressBar:
    """`iteration 120/300 [########------------] 2.1 it/s, 1:26 left, lm loss 4.21`, rewritten in place."""

    def __init__(self, iteration: int, target_iterations: int) -> None:
        self.iteration, self.target = iteration, target_iterations
        self.seconds_per_step: float | None = None
        self._loss_text = ""
        self._drawn_at = 0.0

    def update(self, step: StepMetrics) -> None:
        """Take in a step; redraw unless that was done a moment ago."""
        self.iteration = step.iteration
        last = step.elapsed_seconds
        before = last if self.seconds_per_step is None else self.seconds_per_step
        self.seconds_per_step = _RATE_MEMORY * before + (1 - _RATE_MEMORY) * last
        self._loss_text = "".join(f", {name} {loss:.3f}" for name, loss in step.losses.items())
        if time.monotonic() - self._drawn_at > _REDRAW_SECONDS or self.iteration == self.target:
            self.redraw()

    def text(self, columns: int) -> str:
        """The line, at most `columns` wide."""
        share = self.iteration / self.target if self.target else 1.0
        filled = round(20 * share)
        line = f"iteration {self.iteration}/{self.target} [{'#' * filled}{'-' * (20 - filled)}]"
        if self.seconds_per_step:
            left = round((self.target - self.iteration) * self.seconds_per_step)
            line += f" {1 / self.seconds_per_step:.2f} it/s, {clock(left)} left{self._loss_text}"
        return line[: columns - 1]

    def redraw(self) -> None:
        """Write the line in place."""
        self._drawn_at = time.monotonic()
        sys.stdout.write("\r\x1b[K" + self.text(shutil.get_terminal_size().columns))
        sys.stdout.flush()

    def clear(self) -> None:
        """Make room for a line of text."""
        sys.stdout.write("\r\x1b[K")
        sys.stdout.flush()


def clock(seconds: int) -> str:
    """86 -> "1:26", 3700 -> "1:01:40"."""
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
