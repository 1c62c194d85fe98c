"""--distributed-timeout-seconds-after-init: loading and compiling, which take long, are over after one iteration."""

from __future__ import annotations

from datetime import timedelta

from megatron.training.run import Hook, Run, StepResult


class CollectiveTimeoutHook(Hook):
    """Gives all groups of this process another time limit after the first iteration."""

    def __init__(self, seconds: int) -> None:
        self.limit = timedelta(seconds=seconds)
        self._is_set = False

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Once."""
        if not self._is_set:
            run.groups.set_timeout(self.limit)
            self._is_set = True
