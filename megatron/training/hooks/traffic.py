"""--log-comm-volume: what each step sends, by axis and kind."""

from __future__ import annotations

from collections import Counter

from megatron.core.collectives import all_gather_object
from megatron.core.traffic import Traffic
from megatron.training.hooks.meter import MeterHook
from megatron.training.run import Hook, Run, StepResult


class TrafficHook(Hook):
    """Reports the last step's bytes, as a mean over the ranks, every --log-interval iterations."""

    def __init__(self, log_interval: int, traffic: Traffic, meter: MeterHook) -> None:
        self.log_interval = log_interval
        self.traffic = traffic
        self.meter = meter
        self.step: dict[tuple[str, str], int] = {}
        """Of this rank: (axis, kind) -> bytes."""

    def on_step_start(self, run: Run) -> None:
        """Forget what evaluation, saving and reports have sent."""
        self.traffic.take()

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Gather at the interval. Every rank takes part."""
        self.step = self.traffic.take()
        if run.progress.iteration % self.log_interval:
            return
        total: Counter[tuple[str, str]] = Counter()
        for own in all_gather_object(self.step, run.groups.world):
            total.update(own)
        ranks = run.groups.world.size()
        by_axis: Counter[str] = Counter()
        for (axis, kind), sent_bytes in total.items():
            self.meter.step.further[f"comm-bytes {axis} {kind}"] = sent_bytes / ranks
            by_axis[axis] += sent_bytes
        parts = (f"{axis} {sent_bytes / ranks / 1e6:.6g}" for axis, sent_bytes in sorted(by_axis.items()))
        self.meter.step.texts.append(f"communication (MB sent per rank): {', '.join(parts) or 'none'}")
