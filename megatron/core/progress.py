# SPDX-License-Identifier: Apache-2.0
"""Progress of work whose parts are counted, as plain lines."""

from __future__ import annotations

import time

from megatron.core.errors import say

_QUIET_SECONDS = 2.0
"""Before the first line, and between two."""


class CountedProgress:
    """Lines such as `importance: 20 of 512 texts, 3.1 texts/s, 159 s left`, every two seconds."""

    def __init__(self, name: str, count: int, unit: str, *, speaks: bool = True) -> None:
        """name: what is done. unit: its parts, in the plural. speaks: False on processes that print nothing."""
        self._name, self._count, self._unit, self._speaks = name, count, unit, speaks
        self._done, self._begun = 0, time.monotonic()
        self._said = self._begun

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._begun

    def add(self, done: int = 1) -> None:
        """Count parts that are done."""
        self._done, now = self._done + done, time.monotonic()
        if self._speaks and now - self._said >= _QUIET_SECONDS:
            self._said, rate = now, self._done / (now - self._begun)
            left = max(0, self._count - self._done) / max(rate, 1e-9)
            say(
                f"{self._name}: {self._done} of {self._count} {self._unit}, {rate:.1f} {self._unit}/s, "
                f"{left:.0f} s left"
            )
