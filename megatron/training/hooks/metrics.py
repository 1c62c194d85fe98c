"""--metrics-dir: every iteration and every evaluation as a line of metrics.jsonl."""

from __future__ import annotations

from typing import Any

from megatron.training.hooks.meter import MeterHook
from megatron.training.hooks.metrics_file import MetricsFile
from megatron.training.run import Evaluation, Hook, Run, StepResult


class MetricsHook(Hook):
    """Writes rows on the first rank, whatever --log-interval is."""

    def __init__(self, directory: str, meter: MeterHook) -> None:
        self.file = MetricsFile(directory)
        self.meter = meter

    def on_train_start(self, run: Run) -> None:
        """Drop the rows of iterations that will be done again."""
        if run.is_first_rank:
            self.file.open(run.progress.iteration)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """One row per iteration."""
        if run.is_first_rank:
            self.file.write(self.meter.step.row())

    def on_evaluate(self, run: Run, evaluation: Evaluation) -> None:
        """One row per evaluation."""
        if run.is_first_rank:
            row: dict[str, Any] = {
                "iteration": run.progress.iteration,
                "split": evaluation.split,
                "eval": evaluation.losses,
            }
            row |= {} if evaluation.set_name is None else {"set": evaluation.set_name}
            row |= {"final": True} if evaluation.final else {}
            self.file.write(row)

    def on_close(self, run: Run) -> None:
        """Close the file."""
        self.file.close()
