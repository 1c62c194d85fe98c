"""--wandb-project: the same curves for Weights & Biases. WANDB_MODE=offline keeps them in --wandb-save-dir."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core import optional_deps
from megatron.core.errors import ConfigError
from megatron.training.config.logging import LoggerConfig
from megatron.training.hooks.curves import evaluation_points, step_points
from megatron.training.hooks.meter import MeterHook
from megatron.training.run import Evaluation, Hook, Run, StepResult


class WandbHook(Hook):
    """Logs on the first rank, every --tensorboard-log-interval iterations; the run's settings are its config."""

    def __init__(self, config: LoggerConfig, meter: MeterHook) -> None:
        self.config, self.meter = config, meter
        self.writer: Any = None

    def on_train_start(self, run: Run) -> None:
        """Begin a run there. Raises ConfigError where the package is missing or does not take the settings."""
        if not run.is_first_rank:
            return
        needed_by = f"--wandb-project {self.config.wandb_project}"
        wandb = optional_deps.require("wandb", needed_by=needed_by)
        save = run.config.checkpoint.save
        directory = Path(self.config.wandb_save_dir or (Path(save) / "wandb" if save else "."))
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.writer = wandb.init(
                project=self.config.wandb_project,
                name=self.config.wandb_exp_name,
                entity=self.config.wandb_entity,
                dir=str(directory),
                config=run.config.to_dict(),
            )
        except Exception as error:  # the package's own kinds of failure: no account, no network, no such entity
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"{needed_by}: Weights & Biases cannot begin a run ({type(error).__name__}: {reason}); "
                "log in, or set WANDB_MODE=offline in the environment"
            ) from error

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Points of this iteration."""
        if self.writer is None:
            return
        points = dict(self.meter.step.further)
        if run.progress.iteration % self.config.tensorboard_log_interval == 0:
            points |= step_points(self.meter.step, self.config, run.groups.world.size())
        if points:
            self.writer.log(points, step=run.progress.iteration)

    def on_evaluate(self, run: Run, evaluation: Evaluation) -> None:
        """Points of the evaluation."""
        if self.writer is not None:
            self.writer.log(evaluation_points(evaluation, self.config), step=run.progress.iteration)

    def on_close(self, run: Run) -> None:
        """Send, or write, what is still in memory."""
        if self.writer is not None:
            self.writer.finish()
            self.writer = None
