"""--eval-interval, --eval-iters: the validation loss during training, validation and test loss at its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.core.errors import ConfigError, DataError
from megatron.training.config.training import ValidationConfig
from megatron.training.loop import evaluate
from megatron.training.run import Evaluation, Hook, Run, StepResult

if TYPE_CHECKING:
    from megatron.training.data.loading import Batch


class EvaluationHook(Hook):
    """Evaluates each validation set on eval_iters global batches, or on all of it with full_validation.

    Successive evaluations see successive validation samples, all sets equally many.
    """

    def __init__(self, config: ValidationConfig) -> None:
        self.config = config
        self._validation: list[Iterator[Batch]] = []

    def on_train_start(self, run: Run) -> None:
        """Names must fit the sets before hours are spent; an evaluation that cannot be is no surprise at the end."""
        if run.is_first_rank and not run.data.parts("validation"):
            print("note: there is no validation data, so nothing is evaluated during training; see --split", flush=True)
        names, sets = self.config.validation_set_names, len(run.data.parts("validation"))
        if names is not None and sets and len(names) != sets:
            raise ConfigError(
                f"--validation-set-names has {len(names)} names, but there are {sets} validation sets; give one each"
            )

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Evaluate at the interval."""
        interval = self.config.eval_interval
        first = self.config.start_eval_at_iter or 0
        if interval is not None and run.progress.iteration % interval == 0 and run.progress.iteration >= first:
            self._validate(run, final=False)

    def on_train_end(self, run: Run) -> None:
        """After the last iteration, unless the run was stopped early: then it is not over."""
        if run.stop_reason is None:
            self._validate(run, final=True)
            if run.data.has("test") and self.config.eval_iters > 0:
                losses = evaluate(run, run.data.open("test", 0), self.config.eval_iters)
                run.hooks.on_evaluate(run, Evaluation("test", losses, final=True))

    def _validate(self, run: Run, *, final: bool) -> None:
        sets = len(run.data.parts("validation"))
        for part in range(sets):
            losses = self._whole(run, part) if self.config.full_validation else self._next(run, part)
            names = self.config.validation_set_names or [str(number) for number in range(sets)]
            name = names[part] if self.config.multiple_validation_sets else None
            run.hooks.on_evaluate(run, Evaluation("validation", losses, final=final, set_name=name))
        if sets and not self.config.full_validation:
            run.progress.consumed_valid_samples += self.config.eval_iters * run.evaluation_batch_size

    def _next(self, run: Run, part: int) -> dict[str, float]:
        """Losses on the next eval_iters global batches of a validation set."""
        if len(self._validation) == part:
            self._validation.append(run.data.open("validation", run.progress.consumed_valid_samples, part))
        return evaluate(run, self._validation[part], self.config.eval_iters)

    def _whole(self, run: Run, part: int) -> dict[str, float]:
        """Losses on every sample of a validation set."""
        samples = len(run.data.parts("validation")[part])
        if not samples:
            raise DataError(f"validation set {part} has no samples; give it more data, or leave it out")
        iterations = -(samples // -run.evaluation_batch_size)
        microbatches = iterations * (run.evaluation_batch_size // run.evaluation_samples_per_microbatch)
        with contextlib.closing(run.data.open_whole("validation", part, microbatches)) as batches:
            return evaluate(run, batches, iterations)
