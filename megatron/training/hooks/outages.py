# SPDX-License-Identifier: Apache-2.0
"""Calls of hooks that only observe: their errors do not end a run, they are told, counted and got over.

A writer whose disk is full or whose service is gone fails in every step, so its first failure is one line, and its
recovery another one with the number of rows that were lost in between. It is tried again at growing intervals, and not
before ten times as long as it has waited for a network.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch.distributed import DistError

from megatron.core.errors import MegatronError, say
from megatron.training.data.loading import explain_lost_loader
from megatron.training.launch.initialize import explain_lost_peer
from megatron.training.run import Hook

_UNNOTICED_SECONDS = 0.1
"""A failure that takes no longer is followed by no pause."""
_IMMEDIATE_TRIALS = 3
"""After so many failures the next trials are 1, 2, 4, ... calls later."""
_MOST_CALLS_BETWEEN = 64
_LAST_MOMENTS = ("on_error", "on_close")
"""The run is over: nothing is put off, and nothing takes the place of the error that ended it."""
_PAUSE = 10.0
"""Pause after a longer one, as a multiple of its time: at most a tenth of the run is spent on failing."""


@dataclass
class _Outage:
    """Failure of one hook, and its cost so far."""

    moments: set[str] = field(default_factory=set)
    """The moments that have failed since the last success of one of them."""
    lost_rows: int = 0
    """In this outage."""
    failures: int = 0
    """In this outage."""
    calls_to_pass: int = 0
    """So many calls are left out before the next trial."""
    retry_at: float = 0.0
    """No trial before, by time.monotonic()."""
    count: int = 0
    """Outages so far."""

    @property
    def is_told(self) -> bool:
        """The first, second, fourth, eighth ... outage: a disk at its limit may fail and recover for days."""
        return self.count & (self.count - 1) == 0

    def is_pausing(self) -> bool:
        """Count a call; True where it is left out."""
        self.calls_to_pass -= 1
        return self.calls_to_pass >= 0 or time.monotonic() < self.retry_at


class Outages:
    """Of all hooks of a run; calls their moments."""

    def __init__(self) -> None:
        self._of_hooks: dict[int, _Outage] = {}

    def call(self, hook: Hook, name: str, moment: Callable[[], None], rows: int = 0) -> None:
        """Call the moment `name` of the hook, by which `rows` rows or points are written; an error is told and counted.

        Raises errors that are not the hook's: the loss of a loader process or of another rank can come up anywhere.
        """
        outage = self._of_hooks.setdefault(id(hook), _Outage())
        if name in outage.moments and name not in _LAST_MOMENTS and outage.is_pausing():
            outage.lost_rows += rows
            return
        began_at = time.monotonic()
        try:
            moment()
        except Exception as error:
            # Also where a collective failed for another reason than a lost rank: the others wait in it.
            is_of_the_run = isinstance(error, RuntimeError) and (
                isinstance(error, DistError) or explain_lost_loader(error) or explain_lost_peer(error)
            )
            if is_of_the_run and name not in _LAST_MOMENTS:
                raise
            self._fail(hook, name, error, rows, time.monotonic() - began_at)
            return
        if name in outage.moments:
            self._recover(hook)

    def end(self, hook: Hook) -> None:
        """Say what a hook that has not recovered has lost."""
        outage = self._of_hooks.get(id(hook))
        if outage is not None and outage.moments and outage.lost_rows:
            _warn(f"{type(hook).__name__} did not recover; {_count_rows(outage.lost_rows)} lost")

    def _fail(self, hook: Hook, name: str, error: Exception, rows: int, elapsed_seconds: float) -> None:
        outage = self._of_hooks[id(hook)]
        if not outage.moments:
            outage.count += 1
            outage.lost_rows = outage.failures = 0
            if outage.is_told:
                _warn(f"{type(hook).__name__} failed, training goes on ({_describe(error)})")
        outage.moments.add(name)
        outage.lost_rows += rows
        outage.failures += 1
        if outage.failures > _IMMEDIATE_TRIALS:
            outage.calls_to_pass = min(_MOST_CALLS_BETWEEN, 2 ** (outage.failures - _IMMEDIATE_TRIALS - 1))
        pause = _PAUSE * elapsed_seconds if elapsed_seconds > _UNNOTICED_SECONDS else 0.0
        outage.retry_at = time.monotonic() + pause

    def _recover(self, hook: Hook) -> None:
        outage = self._of_hooks[id(hook)]
        # Of all its moments: they write to the same place, and the next one that fails begins another outage.
        outage.moments.clear()
        if outage.is_told:
            lost = f"; {_count_rows(outage.lost_rows)} lost" if outage.lost_rows else ""
            say(f"note: {type(hook).__name__} works again{lost}", sys.stderr)


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split())
    # Our errors are sentences, which need no class name.
    return text if isinstance(error, MegatronError) else f"{type(error).__name__}: {text}"


def _count_rows(number: int) -> str:
    return "1 row was" if number == 1 else f"{number} rows were"


def _warn(text: str) -> None:
    say(f"warning: {text}", sys.stderr)
