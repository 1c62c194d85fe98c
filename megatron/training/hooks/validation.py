# SPDX-License-Identifier: Apache-2.0
"""--nan-policy and --rerun-mode: what becomes of a step whose numbers are wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.dist_checkpointing.agreement import on_first_rank
from megatron.core.dist_checkpointing.directory import latest_iteration
from megatron.core.errors import NonFiniteError, say
from megatron.training.checkpoint.restore import load_checkpoint
from megatron.training.config.container import RunConfig
from megatron.training.rerun.replay import StepStart
from megatron.training.rerun.validation import (
    GRADIENTS,
    LOSSES,
    RepeatStatistics,
    StepRejectedError,
    StepValidator,
)
from megatron.training.run import Hook, HookContext, Place, Run, Step

if TYPE_CHECKING:
    from megatron.training.data.loading import Batch


class ValidationHook(Hook):
    """Has every step validated between its gradients and its update, and passes over those that are rejected."""

    def __init__(self, config: RunConfig, place: Place) -> None:
        settings, self._save = config.reliability, config.checkpoint.save
        self._policy, self._checks = settings.nan_policy, settings.rerun_mode != "report_stats"
        checks = {LOSSES: config.training.check_for_spiky_loss, GRADIENTS: config.training.check_for_large_grads}
        spikes = [kind for kind, is_checked in checks.items() if is_checked]
        self._validator = StepValidator(settings, self._save, place, config.model.seed, spikes)
        self._statistics = None if self._checks else RepeatStatistics()
        self._start: StepStart | None = None
        self._rejected: dict[int, str] = {}
        """Iterations that are passed over, and why."""

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> ValidationHook | None:
        """Return the hook where steps are validated; None where it is enough to stop."""
        settings = config.reliability
        wants = settings.nan_policy != "stop" or settings.rerun_mode != "disabled"
        return cls(config, context.place) if wants or settings.result_rejected_tracker_filename else None

    def on_train_start(self, run: Run) -> None:
        """Read what earlier attempts have left."""
        log = self._validator.log
        log.open(run.groups.world.rank())
        for iteration in on_first_rank(run.groups.world, log.list_iterations_to_skip):
            self._rejected[iteration] = f"{log.path} has rejected its results"
        self._validator.begin(run)

    def wrap_step(self, step: Step) -> Step:
        """The step, or in its place the next samples."""

        def step_or_pass_over(run: Run, batches: Iterator[Batch]) -> None:
            iteration = run.progress.iteration + 1
            if iteration in self._rejected:
                for _ in range(run.num_microbatches):
                    next(batches)
                self._pass_over(run, iteration)
                return
            self._start = StepStart.take(run)
            try:
                step(run, batches)
            except StepRejectedError as rejection:
                self._rejected[iteration] = str(rejection)
                run.metrics.drop_step()
                self._start.put_back(run)
                if self._policy == "skip":
                    self._pass_over(run, iteration)
                else:
                    self._roll_back(run, iteration)

        return step_or_pass_over

    def on_gradients(self, run: Run) -> None:
        """Look at the results. Raises StepRejectedError, which `wrap_step` understands, or what ends the run."""
        assert self._start is not None, "set before each step"
        if self._statistics is None:
            self._validator.validate(run, self._start)
        else:
            self._statistics.validate(run, self._start)

    def state_dict(self) -> dict[str, Any]:
        """Return what is usual of losses and gradients."""
        return self._validator.yardstick.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with what the checkpoint holds."""
        self._validator.yardstick.load_state_dict(state)

    def _pass_over(self, run: Run, iteration: int) -> None:
        run.pass_over(self._rejected[iteration])
        if run.is_first_rank:
            say(f"warning: {self._rejected[iteration]}; iteration {iteration} is passed over", sys.stderr)

    def _roll_back(self, run: Run, iteration: int) -> None:
        assert self._save is not None, "checked with the flags"
        root = Path(self._save)
        if on_first_rank(run.groups.world, lambda: latest_iteration(root)) is None:
            raise NonFiniteError(
                f"{self._rejected[iteration]}; --save {root} holds no checkpoint to go back to",
                iteration,
                is_explained=True,
            )
        run.read_metrics()
        run.optimizer.is_changing = True
        load_checkpoint(run)
        run.optimizer.is_changing = False
        run.is_rewound = True
        if run.is_first_rank:
            done = run.progress.iteration
            say(f"warning: {self._rejected[iteration]}; going back to iteration {done}", sys.stderr)
