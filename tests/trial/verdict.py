# SPDX-License-Identifier: Apache-2.0
"""What became of a case, and how many of each there were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Verdict:
    """ran: to its end, as it should. refused: with a sentence, as bad input should be. fault: anything else."""

    kind: Literal["ran", "refused", "fault"]
    text: str
    command: str
    """Repeats the case by hand."""
