# SPDX-License-Identifier: Apache-2.0
"""Checks of each step's numbers: losses and gradients that are no numbers, and those far beyond the usual.

Both look at rows of metrics, after these are written and before anything is saved or evaluated.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megatron.core.errors import NonFiniteError, say
from megatron.training.config.container import RunConfig
from megatron.training.metrics import MetricsRow
from megatron.training.rerun.outliers import LargestValues
from megatron.training.rerun.replay import StepStart, find_first_bad
from megatron.training.run import Hook, HookContext, Run, Step

if TYPE_CHECKING:
    from megatron.training.data.loading import Batch


class NonFiniteHook(Hook):
    """--check-for-nan-in-loss-and-grad (on unless switched off): stops at the first loss or gradient that is not a
    number.

    Between two progress lines the optimizer only remembers that a gradient was not finite, and leaves the weights as
    they are from then on, so that the host need not wait for the device in every step; the run ends when values are
    read. No such weights are saved or evaluated, because both read values first.
    """

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> NonFiniteHook | None:
        """Return the hook for --check-for-nan-in-loss-and-grad; None where it is not asked for."""
        return cls() if config.ddp.check_for_nan_in_grad else None

    def __init__(self) -> None:
        self._starts: dict[int, StepStart] = {}
        """Of the steps whose values have not been read."""

    def wrap_step(self, step: Step) -> Step:
        """The step; where it ends the run, the sentence says which value was the first that is no number."""

        def explain(run: Run, batches: Iterator[Batch]) -> None:
            iteration = run.progress.iteration + 1
            self._starts[iteration] = StepStart.take(run)
            try:
                step(run, batches)
            except NonFiniteError as error:
                raise error if error.is_explained else self._explain(run, error, iteration) from error

        return explain

    def on_step_start(self, run: Run) -> None:
        """A step whose values are read anyway is checked at once."""
        # iteration + 1: the count goes up in the step that begins here.
        run.optimizer.defers_check = not run.metrics.is_due(run.progress.iteration + 1)

    def on_metrics(self, run: Run, rows: Sequence[MetricsRow]) -> None:
        """Raises NonFiniteError on every rank for the same iteration: the values already cover all ranks."""
        for row in rows:
            last = int(row["consumed_samples"]) - 1
            samples = f"samples {last + 1 - int(row['global_batch_size'])} to {last}"
            # With --fp16 a skipped update is the loss scaler at work, not an error.
            if row["skipped"]:
                self._starts.pop(row.iteration, None)
                continue
            if row.has_nan:
                values = ", ".join(f"{name} {loss}" for name, loss in row.losses.items())
                error = NonFiniteError(
                    f"iteration {row.iteration}: {values}; the run has diverged: lower --lr, lengthen the warm-up, or "
                    f"look at {samples}; "
                    "--no-check-for-nan-in-loss-and-grad counts such iterations instead of stopping",
                    row.iteration,
                )
                raise self._explain(run, error, row.iteration)
            # A missing value reads as NaN, too, hence the second condition.
            if not math.isfinite(row["grad_norm"]) and row.values["grad_norm"] is not None:
                error = NonFiniteError(
                    f"iteration {row.iteration}: the gradient norm is {row['grad_norm']}; nothing was updated since: "
                    f"lower --lr, look at {samples}, or pass --no-check-for-nan-in-loss-and-grad to skip such updates",
                    row.iteration,
                )
                raise self._explain(run, error, row.iteration)
            self._starts.pop(row.iteration, None)

    def _explain(self, run: Run, error: NonFiniteError, iteration: int) -> NonFiniteError:
        """The same error, which says what was first; where the step can be computed again."""
        start = self._starts.get(iteration)
        if start is None:
            return error
        # Nothing was updated since that step: the weights are unchanged.
        start.put_back(run)
        first = find_first_bad(run)
        then = "computed again, all its values are finite" if first is None else f"first of all {first}"
        return NonFiniteError(f"{error}; {then}", iteration, is_explained=True)


class OutlierHook(Hook):
    """--check-for-spiky-loss, --check-for-large-grads: warns of values far beyond what the run has shown.

    Nothing is stopped and nothing is skipped. The first rank prints. With --rerun-mode validate_results the step's
    validator judges them, before the update (rerun/validation.py).
    """

    def __init__(self, *, losses: bool, gradients: bool) -> None:
        self.losses, self.gradients = losses, gradients
        self.yardstick = LargestValues()

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> OutlierHook | None:
        """Return the hook for --check-for-spiky-loss and --check-for-large-grads; None where it is not asked for."""
        spiky, large = config.training.check_for_spiky_loss, config.training.check_for_large_grads
        is_validated = config.reliability.rerun_mode == "validate_results"
        return cls(losses=spiky, gradients=large) if (spiky or large) and not is_validated else None

    def on_metrics(self, run: Run, rows: Sequence[MetricsRow]) -> None:
        """Learn from the first steps, judge the others."""
        for row in rows:
            values = dict(row.losses) if self.losses else {}
            if self.gradients:
                values["the gradient norm"] = row["grad_norm"]
            for name, value in values.items():
                if self.yardstick.learn(name, value) or not self.yardstick.is_outlier(name, value):
                    continue
                if run.is_first_rank:
                    last = int(row["consumed_samples"]) - 1
                    say(
                        f"warning: iteration {row.iteration}: {name} is {value:.6g}, {self.yardstick.describe(name)}; "
                        f"look at samples {last + 1 - int(row['global_batch_size'])} to {last}",
                        sys.stderr,
                    )

    def state_dict(self) -> dict[str, Any]:
        """Return the yardstick."""
        return self.yardstick.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the one that the checkpoint holds."""
        self.yardstick.load_state_dict(state)
