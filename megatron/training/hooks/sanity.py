"""--check-for-nan-in-loss-and-grad (on unless switched off): stop at the first loss that is not a number."""

from __future__ import annotations

from megatron.core.errors import NonFiniteError
from megatron.training.hooks.meter import MeterHook
from megatron.training.run import Hook, Run, StepResult


class SanityHook(Hook):
    """Looks at each step's losses, after they are logged and before anything is saved."""

    def __init__(self, meter: MeterHook) -> None:
        self.meter = meter

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Raises NonFiniteError on every rank at the same iteration: losses are already means over all ranks."""
        step = self.meter.step
        if step.has_nan and not step.skipped:
            values = ", ".join(f"{name} {loss}" for name, loss in step.losses.items())
            raise NonFiniteError(
                f"iteration {step.iteration}: {values}; the run has diverged: lower --lr, lengthen the warm-up, or "
                f"look at samples {step.consumed_samples - step.global_batch_size} to {step.consumed_samples - 1}; "
                "--no-check-for-nan-in-loss-and-grad counts such iterations instead of stopping"
            )
