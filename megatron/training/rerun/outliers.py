# SPDX-License-Identifier: Apache-2.0
"""Values far beyond what a run has shown: losses and gradient norms of --check-for-spiky-loss and
--check-for-large-grads."""

from __future__ import annotations

import math
from typing import Any

# Both numbers are upstream's.
SAMPLES = 100
FACTOR = 10.0


class LargestValues:
    """The largest value of a run's first iterations, warm-up included, by name; checkpoints keep it."""

    def __init__(self) -> None:
        self.largest: dict[str, float] = {}
        self.seen: dict[str, int] = {}

    def learn(self, name: str, value: float) -> bool:
        """Take the value into account while the yardstick is not complete; True where it was. Values that are no
        numbers are another check's business."""
        seen = self.seen.get(name, 0)
        if seen >= SAMPLES or not math.isfinite(value):
            return False
        self.seen[name] = seen + 1
        self.largest[name] = max(self.largest.get(name, value), value)
        return True

    def is_outlier(self, name: str, value: float) -> bool:
        """Judge a value; nothing is judged before the yardstick is complete."""
        return self.seen.get(name, 0) >= SAMPLES and math.isfinite(value) and value >= FACTOR * self.largest[name]

    def describe(self, name: str) -> str:
        """Return what an outlier is beyond, in words."""
        return f"at least {FACTOR:g} times the {self.largest[name]:.6g} that the first {SAMPLES} iterations reached"

    def state_dict(self) -> dict[str, Any]:
        """Return the largest values seen and how many there were, by name."""
        return {"largest": self.largest, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the values that the checkpoint holds."""
        self.largest, self.seen = dict(state["largest"]), dict(state["seen"])
