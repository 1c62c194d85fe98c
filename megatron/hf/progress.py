# SPDX-License-Identifier: Apache-2.0
"""Progress of a conversion, on standard error, for what takes longer than two seconds."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from megatron.core.errors import say

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.core.process_groups_config import Group

_QUIET_SECONDS = 2.0


class ConversionProgress:
    """Counts parameter values against the full model's, and prints the progress every two seconds."""

    def __init__(self, doing: str, total_values: int, group: Group | None = None) -> None:
        """doing: the first word of the line, such as `converting`. group: processes that do an equal share each, of
        which the first one speaks."""
        self._doing = doing
        self._total = total_values // (1 if group is None else group.size())
        self._speaks = group is None or group.rank() == 0
        self._done = self._bytes = 0
        self._started_at = self._said_at = time.monotonic()

    def advance(self, tensor: Tensor) -> None:
        """One more parameter is done."""
        self._done += tensor.numel()
        self._bytes += tensor.numel() * tensor.element_size()
        now = time.monotonic()
        if now - self._said_at >= _QUIET_SECONDS:
            self._said_at = now
            self._say(now - self._started_at)

    def end(self) -> None:
        """All is done: a last line where there was one before."""
        if self._said_at > self._started_at:
            self._say(time.monotonic() - self._started_at)

    def _say(self, elapsed_seconds: float) -> None:
        if not self._speaks:
            return
        rate = self._bytes / elapsed_seconds
        left = elapsed_seconds * max(0, self._total - self._done) / max(self._done, 1)
        say(
            f"{self._doing}: {100 * min(1.0, self._done / max(self._total, 1)):.0f} %, {self._bytes / 1e9:.1f} GB, "
            f"{rate / 1e6:.0f} MB/s, ETA {left:.0f} s",
            sys.stderr,
        )
