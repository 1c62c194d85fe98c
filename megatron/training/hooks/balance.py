"""--hybrid-context-parallel: how evenly the plans divide the work, beside the layout without plans."""

from __future__ import annotations

from megatron.training.data.planned_batches import StepPlan
from megatron.training.hooks.meter import MeterHook
from megatron.training.run import Hook, Run, StepResult


class BalanceHook(Hook):
    """Reports the last step's plan every --log-interval iterations."""

    def __init__(self, log_interval: int, meter: MeterHook) -> None:
        self.log_interval = log_interval
        self.meter = meter
        self._plan: StepPlan | None = None

    def on_step_start(self, run: Run) -> None:
        """Keep the plan of the step, which is forgotten afterwards."""
        self._plan = None if run.plans is None else run.plans.at(run.progress.consumed_train_samples)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Hand the numbers on at the interval, where they are written."""
        if self._plan is None or not run.is_first_rank or run.progress.iteration % self.log_interval:
            return
        balance, static = self._plan.context.balance, self._plan.static_balance
        self.meter.step.further["work-balance"] = balance
        self.meter.step.further["work-balance static"] = static
        shared = ", ".join(f"{count} on {size}" for size, count in self._plan.context.samples_by_size.items())
        self.meter.step.texts.append(
            f"conversations on ranks: {shared} | work balance: {balance:.3f} (static {static:.3f})"
        )
