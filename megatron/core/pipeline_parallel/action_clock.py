# SPDX-License-Identifier: Apache-2.0
"""Times at which the actions of one step really began and ended on this process.

A measured action begins when its input is there: waiting for a neighbour is idle time, as in timelines.py.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from megatron.core.device import Mark, mark, measure_seconds_between, synchronize
from megatron.core.pipeline_parallel.schedules import Action

# Two readings further apart than this were interrupted; actions last milliseconds.
_CLOSE_ENOUGH_SECONDS = 5e-5
_ATTEMPTS = 100


class TimedAction(NamedTuple):
    """An action with its start and end in seconds since the epoch, by this machine's clock."""

    action: Action
    start: float
    end: float


class ActionClock:
    """Told by the executor about each action; the device is waited for only when the times are read."""

    def __init__(self) -> None:
        synchronize()
        # The device's clock and the machine's, read together; again where the process was interrupted in between.
        for _ in range(_ATTEMPTS):
            self._zero_seconds = time.time()
            self._zero = mark()
            if time.time() - self._zero_seconds < _CLOSE_ENOUGH_SECONDS:
                break
        self._marks: list[tuple[Action, Mark, Mark]] = []
        self._actions: tuple[Action, ...] = ()
        self._begun = self._zero

    def begin(self, *actions: Action) -> None:
        """Note that the executor begins an action, or several side by side; it may still have to wait for their
        input."""
        self._actions, self._begun = actions, mark()

    def inputs_arrived(self) -> None:
        """Note that an input of what is under way has arrived: its measured time starts here."""
        self._begun = mark()

    def end(self) -> None:
        """Note that what is under way is done."""
        assert self._actions, "an action ended that had not begun"
        ended = mark()
        self._marks += [(action, self._begun, ended) for action in self._actions]
        self._actions = ()

    def read(self) -> list[TimedAction]:
        """Wait for the device, and return all actions so far in the order in which they ran."""
        synchronize()
        return [TimedAction(action, self._seconds(begun), self._seconds(ended)) for action, begun, ended in self._marks]

    def _seconds(self, moment: Mark) -> float:
        # Marks are of the device's clock, which has no date; the pair read at the start ties it to the machine's.
        return self._zero_seconds + measure_seconds_between(self._zero, moment)
