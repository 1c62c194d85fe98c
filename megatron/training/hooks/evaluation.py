# SPDX-License-Identifier: Apache-2.0
"""--eval-interval, --eval-iters: the validation loss during training, validation and test loss at its end."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron.core.collectives import broadcast_object
from megatron.core.errors import ConfigError, DataError, say
from megatron.core.inference.generate import generate
from megatron.core.inference.sampling import Sampling
from megatron.training.config.container import Fields, RunConfig
from megatron.training.config.training import WHOLE_MODEL, ValidationConfig
from megatron.training.hooks.task_scores import TasksInTraining
from megatron.training.loop import evaluate
from megatron.training.run import Evaluation, Hook, HookContext, Run, StepResult

if TYPE_CHECKING:
    from megatron.training.data.loading import Batch


def is_evaluated(settings: ValidationConfig, iteration: int) -> bool:
    """Return whether an evaluation follows this iteration."""
    interval, first = settings.eval_interval, settings.start_eval_at_iter or 0
    return interval is not None and iteration % interval == 0 and iteration >= first


class EvaluationHook(Hook):
    """Evaluates each validation set on eval_iters global batches, or on all of it with full_validation.

    Successive evaluations see successive validation samples, all sets equally many: after the last iteration, where it
    is one of --eval-interval, two evaluations follow each other on different samples. Evaluations on
    all samples would be the same one; it is done once, and its values are given twice.
    """

    def __init__(self, config: ValidationConfig) -> None:
        self.config = config
        # Kept open between evaluations, so that each continues where the last one stopped.
        self._validation: list[Iterator[Batch]] = []
        self._whole_losses: dict[tuple[int, int], dict[str, float]] = {}
        """Of full_validation: (iteration, set) -> losses, of the last evaluation."""
        self._sample: SampleOfText | None = None
        self._tasks: TasksInTraining | None = None

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> EvaluationHook | None:
        """Return the hook for --eval-interval, --eval-iters, --full-validation and --skip-train, or None."""
        validation = config.validation
        evaluates = validation.eval_interval is not None or validation.skip_train
        return cls(validation) if evaluates and (validation.eval_iters > 0 or validation.full_validation) else None

    def on_train_start(self, run: Run) -> None:
        """Names must fit the sets before hours are spent; an evaluation that cannot be is no surprise at the end."""
        if run.is_first_rank and not run.data.parts("validation"):
            say("note: there is no validation data, so nothing is evaluated during training; see --split")
        names, sets = self.config.validation_set_names, len(run.data.parts("validation"))
        if names is not None and sets and len(names) != sets:
            raise ConfigError(
                f"--validation-set-names has {len(names)} names, but there are {sets} validation sets; give one each"
            )

        if self.config.eval_sample_prompt is not None and WHOLE_MODEL.met(Fields(run.config, set())):
            self._sample = SampleOfText(run, self.config.eval_sample_prompt, self.config.eval_sample_tokens)
        if self.config.eval_tasks is not None and len(run.model) == 1 and run.groups.cp.size() == 1:
            self._tasks = TasksInTraining(self.config)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Evaluate every --eval-interval iterations, from --start-eval-at-iter on."""
        if is_evaluated(self.config, run.progress.iteration):
            self._validate(run, final=False)

    def on_train_end(self, run: Run) -> None:
        """After the last iteration, unless the run was stopped early: then it is not over."""
        # A stopped run is continued later, and evaluated then.
        if run.stop_reason is None:
            self._validate(run, final=True)
            if run.data.has("test") and self.config.eval_iters > 0:
                losses = evaluate(run, run.data.open("test", 0), self.config.eval_iters)
                samples = describe_samples(run, "test", 0, 0, self.config.eval_iters)
                run.hooks.on_evaluate(run, Evaluation("test", losses, final=True, samples=samples))

    def _validate(self, run: Run, *, final: bool) -> None:
        run.read_metrics()  # what the steps before have to say comes first, also that they have failed
        sets = len(run.data.parts("validation"))
        for part in range(sets):
            if self.config.full_validation:
                losses, samples = self._whole(run, part), f"all {len(run.data.parts('validation')[part])} samples"
            else:
                losses = self._next(run, part)
                seen = run.progress.consumed_valid_samples
                samples = describe_samples(run, "validation", part, seen, self.config.eval_iters)
            names = self.config.validation_set_names or [str(number) for number in range(sets)]
            name = names[part] if self.config.multiple_validation_sets else None
            is_last = part == sets - 1
            generated = self._sample.generate(run) if self._sample is not None and is_last else ""
            scores = self._tasks.measure(run) if self._tasks is not None and is_last else {}
            evaluation = Evaluation(
                "validation", losses, final=final, set_name=name, samples=samples, generated=generated, scores=scores
            )
            run.hooks.on_evaluate(run, evaluation)
        # Counted once for all sets: they advance together, and a resumed run opens each at the same place.
        if sets and not self.config.full_validation:
            run.progress.consumed_valid_samples += self.config.eval_iters * run.evaluation_batch_size

    def _next(self, run: Run, part: int) -> dict[str, float]:
        """Losses on the next eval_iters global batches of a validation set."""
        if len(self._validation) == part:
            self._validation.append(run.data.open("validation", run.progress.consumed_valid_samples, part))
        return evaluate(run, self._validation[part], self.config.eval_iters)

    def _whole(self, run: Run, part: int) -> dict[str, float]:
        """Losses on every sample of a validation set; of this iteration's weights they are computed once."""
        place = (run.progress.iteration, part)
        if place in self._whole_losses:
            return self._whole_losses.pop(place)
        samples = len(run.data.parts("validation")[part])
        if not samples:
            raise DataError(f"validation set {part} has no samples; give it more data, or leave it out")
        # Rounded up; the last batch is filled with samples that have no loss.
        iterations = -(samples // -run.evaluation_batch_size)
        microbatches = iterations * (run.evaluation_batch_size // run.evaluation_samples_per_microbatch)
        with contextlib.closing(run.data.open_whole("validation", part, microbatches)) as batches:
            losses = evaluate(run, batches, iterations)
        self._whole_losses = {seen: kept for seen, kept in self._whole_losses.items() if seen[0] == place[0]}
        self._whole_losses[place] = losses
        return losses


class SampleOfText:
    """--eval-sample-prompt: what the model makes of a prompt, once for each iteration that is evaluated.

    Every rank generates the same: where parameters or experts are divided, each of them is needed. The draws have
    separate generators, always with the same seed: only the model changes.
    """

    TEMPERATURE = 0.7

    def __init__(self, run: Run, prompt: str, max_new_tokens: int) -> None:
        """Raises ConfigError for a prompt without tokens, or longer than the model takes."""
        self.prompt = prompt
        self.max_new_tokens = max_new_tokens
        self.ids = run.recipe.tokenizer.tokenize(prompt)
        self._iteration: int | None = None
        self._failed = False
        longest = run.recipe.max_sequence_length
        if not self.ids:
            raise ConfigError(f"--eval-sample-prompt {prompt!r} has no tokens; give some text to continue")
        if longest is not None and len(self.ids) >= longest:
            raise ConfigError(
                f"--eval-sample-prompt has {len(self.ids)} tokens and the model {longest} positions "
                "(--max-position-embeddings), of which one must stay free; shorten the prompt"
            )

    def generate(self, run: Run) -> str:
        """The prompt and its continuation; nothing where this iteration's is known already. Every rank takes part.

        A model that cannot generate, such as a script's model without a cache, is no error: a warning says so once.
        """
        if self._failed or self._iteration == run.progress.iteration:
            return ""
        self._iteration = run.progress.iteration
        (chunk,) = run.model
        chunk.eval()
        try:
            return self._continue(run, chunk)
        except Exception as error:
            self._failed = True
            if run.is_first_rank:
                what = f"{type(error).__name__}: {' '.join(str(error).split())}"
                say(f"warning: --eval-sample-prompt: no text is generated, training goes on ({what})", sys.stderr)
            return ""
        finally:
            chunk.train()

    def _continue(self, run: Run, chunk: nn.Module) -> str:
        tokenizer = run.recipe.tokenizer
        # Every length would be one more shape to compile for, or to run through code for any shape.
        eagerly = torch.compiler.set_stance("force_eager") if run.config.model.compile else contextlib.nullcontext()
        with eagerly:
            (completion,) = generate(
                chunk,
                [self.ids],
                max_new_tokens=self.max_new_tokens,
                sampling=Sampling(temperature=self.TEMPERATURE, seed=run.config.model.seed),
                vocab_size=run.recipe.vocab_size,
                max_sequence_length=run.recipe.max_sequence_length,
            )
        tokens = completion.tokens
        # Cut here and not while generating: all ranks go through the model equally often, whatever they draw.
        if tokenizer.eod in tokens:
            tokens = tokens[: tokens.index(tokenizer.eod)]
        return tokenizer.detokenize([*self.ids, *tokens])


def describe_samples(run: Run, split: str, part: int, consumed: int, iterations: int) -> str:
    """Return which samples of a split an evaluation sees, in words, after the `consumed` ones that earlier ones have
    seen: `2 batches of 8: samples 16 to 31 of 1000`, counted from 0."""
    size = run.evaluation_batch_size
    text = f"{iterations} batch{'es' if iterations > 1 else ''} of {size}"
    dataset = run.data.parts(split)[part]
    # The order of a script's loader, or of one that shuffles, has no numbers to name.
    if run.data.settings.dataloader_type != "single":
        return f"{text} samples"
    total, unit = len(dataset), run.evaluation_samples_per_microbatch
    # As the sampler counts: what does not fill a microbatch of all ranks is passed over when it begins again.
    used = max(unit, total // unit * unit)
    first = consumed % used
    last = first + iterations * size - 1
    if last < used:
        return f"{text}: samples {first} to {last} of {total}"
    return f"{text}: from sample {first} of {total} on, beginning again at the end"


class NonLossDataHook(Hook):
    """pretrain(process_non_loss_data_func=...): a script's function that looks at the model after each evaluation.

    Collects data and hands it, on the first rank, to process(data, iteration, writer).

    collect: (model chunks) -> data, called on every rank; without it the data are what the loss function returns for
    each microbatch of one more global batch when it is called with non_loss_data=True. Nothing happens
    without --tensorboard-dir.
    """

    def __init__(self, process: Callable[[Any, int, Any], Any], collect: Callable[[Any], Any] | None) -> None:
        self.process, self.collect = process, collect

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> NonLossDataHook | None:
        """Return the hook for pretrain(process_non_loss_data_func=...) and --tensorboard-dir, or None."""
        recipe = context.recipe
        if recipe.process_non_loss_data is None or config.logger.tensorboard_dir is None:
            return None
        return cls(recipe.process_non_loss_data, recipe.collect_non_loss_data)

    def on_evaluate(self, run: Run, evaluation: Evaluation) -> None:
        """Collect the data and process them on the first rank. Every rank takes part."""
        data = self.collect(run.model) if self.collect is not None else self._forward(run, evaluation)
        # The loss is on the last stage, the writer on the first rank.
        data = broadcast_object(data, run.groups.pp, run.groups.last_stage)
        if run.is_first_rank:
            # A script's function does as it likes, but what it writes to is an observer: its disk ends no run.
            try:
                self.process(data, run.progress.iteration, run.tensorboard_writer)
            except OSError as error:
                say(f"warning: process_non_loss_data_func failed, training goes on ({error})", sys.stderr)

    @torch.no_grad()
    def _forward(self, run: Run, evaluation: Evaluation) -> list[Any]:
        """One global batch, the next that an evaluation would see."""
        consumed = run.progress.consumed_valid_samples if evaluation.split == "validation" else 0
        actions = run.evaluation_schedule(run.evaluation_batch_size // run.evaluation_samples_per_microbatch)
        for chunk in run.model:
            chunk.eval()
        # A separate iterator: EvaluationHook's must not lose a batch to it.
        with contextlib.closing(run.data.open(evaluation.split, consumed)) as batches:  # type: ignore[type-var]
            outputs = run.executor.run(
                actions,
                run.recipe.forward_step,
                batches,
                forward_only=True,
                collect_non_loss_data=True,
                activation_shape=run.evaluation_shape,
            )
        for chunk in run.model:
            chunk.train()
        return outputs.loss_dicts
