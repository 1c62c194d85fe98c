# SPDX-License-Identifier: Apache-2.0
"""What became of the cases of a campaign: one line for each that failed, progress with rate and time left, a tally."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import NamedTuple, TextIO


class Verdict(NamedTuple):
    """What became of one case."""

    case: str
    """What was done."""
    problem: str = ""
    """What did not hold; nothing where all did."""


class Tally(NamedTuple):
    """How a campaign ended."""

    played: int
    failed: int
    elapsed_seconds: float

    def __str__(self) -> str:
        rate = self.played / max(self.elapsed_seconds, 1e-9)
        return f"{self.played - self.failed} of {self.played} hold ({self.elapsed_seconds:.0f} s, {rate:.1f} a second)"


def count(
    verdicts: Iterable[Verdict], planned: int | None, *, every_seconds: float = 0.0, output: TextIO | None = None
) -> Tally:
    """Play a campaign to its end and print how it gets on, at most every so many seconds; what failed at once.

    planned: how many cases there will be; None where that shows only at the end.
    """
    output = output or sys.stdout
    started_at = told_at = time.monotonic()
    played = failed = 0
    for verdict in verdicts:
        played += 1
        failed += bool(verdict.problem)
        now = time.monotonic()
        if verdict.problem or played == planned or now - told_at >= every_seconds:
            told_at = now
            state = f"FAILED: {verdict.problem}" if verdict.problem else "holds"
            progress = _describe(played, planned, now - started_at)
            print(f"{progress}: {verdict.case}: {state}", file=output, flush=True)
    return Tally(played, failed, time.monotonic() - started_at)


def _describe(played: int, planned: int | None, elapsed_seconds: float) -> str:
    rate = f"{played / max(elapsed_seconds, 1e-9):.1f} a second"
    if planned is None:
        return f"{played}, {rate}"
    return f"{played}/{planned}, {rate}, {elapsed_seconds / played * (planned - played):.0f} s left"
