"""--manual-gc: collect Python garbage at chosen iterations, at which all ranks pause together."""

from __future__ import annotations

import gc

from megatron.training.config.training import TrainingConfig
from megatron.training.run import Evaluation, Hook, Run, StepResult


class GarbageCollectionHook(Hook):
    """Switches automatic collection off and collects every --manual-gc-interval iterations."""

    def __init__(self, config: TrainingConfig) -> None:
        self.interval = config.manual_gc_interval
        self.around_evaluation = config.manual_gc_eval

    def on_train_start(self, run: Run) -> None:
        """From here on nothing is collected automatically."""
        gc.disable()
        gc.collect()

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Collect at the interval."""
        if self.interval and run.progress.iteration % self.interval == 0:
            gc.collect()

    def on_evaluate(self, run: Run, evaluation: Evaluation) -> None:
        """Evaluation leaves garbage of its own."""
        if self.around_evaluation:
            gc.collect()

    def on_close(self, run: Run) -> None:
        """Back to automatic collection."""
        gc.enable()
