"""--tensorboard-dir: curves for TensorBoard, under upstream's names."""

from __future__ import annotations

import math
from typing import Any

from megatron.core import optional_deps
from megatron.training.config.logging import LoggerConfig
from megatron.training.hooks.meter import MeterHook, StepMetrics
from megatron.training.run import Evaluation, Hook, Run, StepResult


class TensorBoardHook(Hook):
    """Writes event files on the first rank, every --tensorboard-log-interval iterations."""

    def __init__(self, config: LoggerConfig, meter: MeterHook) -> None:
        self.config, self.meter = config, meter
        self.writer: Any = None

    def on_train_start(self, run: Run) -> None:
        """Open the event file. Curves after the resumed iteration, of iterations done again, are hidden."""
        if run.is_first_rank:
            tensorboard = optional_deps.require("torch.utils.tensorboard", needed_by="--tensorboard-dir")
            self.writer = tensorboard.SummaryWriter(
                log_dir=self.config.tensorboard_dir,
                max_queue=self.config.tensorboard_queue_size,
                purge_step=run.progress.iteration + 1,
            )

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Points of this iteration."""
        if self.writer is not None and run.progress.iteration % self.config.tensorboard_log_interval == 0:
            for name, value in self._curves(self.meter.step).items():
                self.writer.add_scalar(name, value, self.meter.step.iteration)

    def on_evaluate(self, run: Run, evaluation: Evaluation) -> None:
        """Loss and perplexity of the evaluation."""
        if self.writer is not None:
            for name, loss in evaluation.losses.items():
                self.writer.add_scalar(f"{name} {evaluation.name}", loss, run.progress.iteration)
                self.writer.add_scalar(f"{name} {evaluation.name} ppl", math.exp(min(20, loss)), run.progress.iteration)

    def on_close(self, run: Run) -> None:
        """Write what is still in memory."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None

    def _curves(self, step: StepMetrics) -> dict[str, float]:
        curves = {"learning-rate": step.learning_rate, "batch-size": step.global_batch_size, **step.losses}
        curves["iteration-time"] = step.elapsed_seconds
        curves["mem-allocated-bytes"] = step.memory_bytes
        if self.config.log_loss_scale_to_tensorboard:
            curves["loss-scale"] = step.loss_scale
        if step.grad_norm is not None:
            curves["grad-norm"] = step.grad_norm
        if step.params_norm is not None:
            curves["params-norm"] = step.params_norm
        if self.config.log_throughput:
            curves |= {"throughput": step.tflops, "tokens-per-second": step.tokens_per_second, "mfu": step.mfu}
        return curves
