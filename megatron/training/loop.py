# SPDX-License-Identifier: Apache-2.0
"""The training loop, ten lines around the step, and the evaluation loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from megatron.core.device import NamedRange
from megatron.core.errors import say
from megatron.core.timers import FETCHING
from megatron.training.data.loading import time_batches
from megatron.training.run import Run
from megatron.training.step import reduce_losses, train_step

if TYPE_CHECKING:
    from megatron.training.data.loading import Batch


def train(run: Run) -> None:
    """Step until the configured iterations or until a hook asks to stop; everything periodic is a hook. A run that was
    finished before it began does nothing, and says so."""
    if run.is_repeated:
        if run.is_first_rank:
            done, target = run.progress.iteration, run.progress.target_iterations
            say(f"nothing is left to do: iteration {done} of {target} is done; raise --train-iters to go on")
        return
    # One iterator for the whole run: its loader processes read ahead of the step that is computed.
    batches = open_batches(run)
    try:
        run.hooks.on_train_start(run)
        step = run.hooks.wrap_step(iterate)
        while not run.progress.finished and run.stop_reason is None:
            step(run, batches)
            if run.is_rewound:
                batches = open_batches(run)
        run.hooks.on_train_end(run)
    # An interrupt (KeyboardInterrupt, SystemExit) is no error of the run, and hooks are not told of it.
    except Exception as error:
        run.hooks.on_error(run, error)
        raise


def iterate(run: Run, batches: Iterator[Batch]) -> None:
    """Run one iteration: the step, between on_step_start and on_step_end of the hooks."""
    run.step_start = None
    run.hooks.on_step_start(run)
    result = train_step(run, batches)
    run.hooks.on_step_end(run, result)


def open_batches(run: Run) -> Iterator[Batch]:
    """The run's microbatches from where it is."""
    run.is_rewound = False
    batches = run.data.open("train", run.progress.consumed_train_samples)
    return time_batches(time_batches(batches, NamedRange(FETCHING)), run.timers("batch-generator", 2))


@torch.no_grad()
def evaluate(run: Run, batches: Iterator[Batch], iterations: int) -> dict[str, float]:
    """Mean losses over `iterations` global batches of full size, without dropout and without gradients."""
    num_microbatches = run.evaluation_batch_size // run.evaluation_samples_per_microbatch
    actions = run.evaluation_schedule(num_microbatches)
    # Losses are kept apart as (sum, number of tokens) until the end: microbatches with fewer tokens count less.
    loss_dicts = []
    for chunk in run.model:
        chunk.eval()
    for _ in range(iterations):
        loss_dicts += run.executor.run(
            actions, run.recipe.forward_step, batches, forward_only=True, activation_shape=run.evaluation_shape
        ).loss_dicts
    for chunk in run.model:
        chunk.train()
    losses = {name: float(loss) for name, loss in reduce_losses(run, loss_dicts, evaluates=True).items()}
    if run.outer is None:
        return losses
    about = f"evaluation after {run.progress.iteration}"
    return dict(zip(losses, run.outer.average(about, list(losses.values())), strict=True))
