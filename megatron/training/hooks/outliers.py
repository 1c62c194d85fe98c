"""--check-for-spiky-loss, --check-for-large-grads: warn of values far beyond what the run has shown.

The first SAMPLES iterations of a process, warm-up included, give the largest usual value; afterwards anything that is
FACTOR times as large is worth a look at the data or at the machine. Nothing is stopped and nothing is skipped.
"""

from __future__ import annotations

import math
import sys

from megatron.training.hooks.meter import MeterHook
from megatron.training.run import Hook, Run, StepResult

SAMPLES = 100
FACTOR = 10.0


class OutlierHook(Hook):
    """Looks at each step's losses, its gradient norm, or both; the first rank prints."""

    def __init__(self, meter: MeterHook, *, losses: bool, gradients: bool) -> None:
        self.meter, self.losses, self.gradients = meter, losses, gradients
        self.largest: dict[str, float] = {}
        self.seen: dict[str, int] = {}

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Learn from the first steps, judge the others. Values that are no numbers are another check's business."""
        step = self.meter.step
        values = dict(step.losses) if self.losses else {}
        if self.gradients and step.grad_norm is not None:
            values["the gradient norm"] = step.grad_norm
        for name, value in values.items():
            if math.isfinite(value) and self._is_outlier(name, value) and run.is_first_rank:
                print(
                    f"warning: iteration {step.iteration}: {name} is {value:.6g}, more than {FACTOR:g} times the "
                    f"{self.largest[name]:.6g} that the first {SAMPLES} iterations reached; look at samples "
                    f"{step.consumed_samples - step.global_batch_size} to {step.consumed_samples - 1}",
                    file=sys.stderr,
                    flush=True,
                )

    def _is_outlier(self, name: str, value: float) -> bool:
        seen = self.seen.get(name, 0)
        if seen < SAMPLES:
            self.seen[name] = seen + 1
            self.largest[name] = max(self.largest.get(name, value), value)
            return False
        return value > FACTOR * self.largest[name]
