"""--tensorboard-dir: curves for TensorBoard."""

from __future__ import annotations

from typing import Any

from megatron.core import optional_deps
from megatron.core.errors import ConfigError
from megatron.training.config.logging import LoggerConfig
from megatron.training.hooks.curves import evaluation_points, step_points
from megatron.training.hooks.meter import MeterHook
from megatron.training.run import Evaluation, Hook, Run, StepResult


class TensorBoardHook(Hook):
    """Writes event files on the first rank, every --tensorboard-log-interval iterations.

    What other hooks have measured for this iteration (`further`) is written whenever they do.
    """

    def __init__(self, config: LoggerConfig, meter: MeterHook) -> None:
        self.config, self.meter = config, meter
        self.writer: Any = None

    def on_train_start(self, run: Run) -> None:
        """Open the event file. Curves after the resumed iteration, of iterations done again, are hidden."""
        if run.is_first_rank:
            tensorboard = optional_deps.require("torch.utils.tensorboard", needed_by="--tensorboard-dir")
            try:
                self.writer = tensorboard.SummaryWriter(
                    log_dir=self.config.tensorboard_dir,
                    max_queue=self.config.tensorboard_queue_size,
                    purge_step=run.progress.iteration + 1,
                )
            except OSError as error:
                raise ConfigError(
                    f"--tensorboard-dir {self.config.tensorboard_dir} cannot be written ({error.strerror}); "
                    "give a writable directory"
                ) from error

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Points of this iteration."""
        if self.writer is None:
            return
        points = dict(self.meter.step.further)
        if run.progress.iteration % self.config.tensorboard_log_interval == 0:
            points |= step_points(self.meter.step, self.config, run.groups.world.size())
        self._write(points, run.progress.iteration)

    def on_evaluate(self, run: Run, evaluation: Evaluation) -> None:
        """Points of the evaluation."""
        if self.writer is not None:
            self._write(evaluation_points(evaluation, self.config), run.progress.iteration)

    def on_close(self, run: Run) -> None:
        """Write what is still in memory."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None

    def _write(self, points: dict[str, float], iteration: int) -> None:
        for name, value in points.items():
            self.writer.add_scalar(name, value, iteration)
