"""--timing-log-level: how long the parts of an iteration take, on all ranks, after each progress line."""

from __future__ import annotations

from typing import cast

from megatron.core.collectives import all_gather_object
from megatron.core.timers import TimingOption
from megatron.training.config.logging import LoggerConfig
from megatron.training.hooks.meter import MeterHook
from megatron.training.run import Hook, Run, StepResult


class TimingHook(Hook):
    """Reports `run.timers`, as means over the iterations since the last report."""

    def __init__(self, config: LoggerConfig, meter: MeterHook) -> None:
        self.config, self.meter = config, meter
        self._iterations = 0

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Print, and hand the curves on, at the interval. Every rank takes part."""
        self._iterations += 1
        if run.progress.iteration % self.config.log_interval:
            return
        of_all = all_gather_object(run.timers.names(), run.groups.world)
        names = list(dict.fromkeys(name for own in of_all for name in own))
        if self.config.log_timers_to_tensorboard:
            slowest = run.timers.min_max(names, run.groups.world, reset=False)
            curves = {f"{name}-time": high / self._iterations for name, (_, high) in slowest.items()}
            self.meter.step.further.update(curves)
        option = cast(TimingOption, self.config.timing_log_option)
        text = run.timers.report(names, run.groups.world, per=self._iterations, option=option)
        self._iterations = 0
        if run.is_first_rank:
            print(text, flush=True)
