# SPDX-License-Identifier: Apache-2.0
"""One training step: the algorithm on one screen. Everything periodic is a hook (hooks/), the loop is loop.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from megatron.core.collectives import all_reduce, broadcast, broadcast_object
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.training.run import Run, StepResult

if TYPE_CHECKING:
    from megatron.training.data.loading import Batch


def train_step(run: Run, batches: Iterator[Batch]) -> StepResult:
    """Forward, backward and one optimizer update on one global batch.

    batches: this rank's microbatches. Results stay tensors on the device until a hook reads them.
    """
    samples = run.batch_size.running_global_batch_size(run.progress.consumed_train_samples)

    # 1. to 3. Clear, forward and backward, finish gradients.
    compute_gradients(run, batches)

    # 4. Update: clip to the global norm, then AdamW.
    run.hooks.on_gradients(run)
    loss_scale = run.optimizer.loss_scale
    with run.timers("optimizer", 1, barrier=True):
        update = run.optimizer.step()

    # 5. Count. A skipped update (non-finite gradient) uses up its data but not its learning rate.
    run.progress.advance(samples, skipped=update.skipped)
    if not update.skipped:
        run.scheduler.step(samples)
    run.optimizer.is_changing = False

    return StepResult(
        losses=reduce_losses(run, run.microbatch_losses),
        grad_norm=update.grad_norm,
        skipped=update.skipped,
        learning_rate=get_learning_rate(run),
        samples=samples,
        loss_scale=loss_scale,
    )


def compute_gradients(run: Run, batches: Iterator[Batch]) -> None:
    """Forward and backward of one global batch: leaves its gradients in the flat buffers, and its losses in
    `run.microbatch_losses`. The step's first three parts, which may be done again (rerun/)."""
    # 1. Clear. Gradients live in flat buffers, not in `param.grad`.
    for chunk in run.model:
        chunk.zero_grad_buffer()

    # 2. Forward and backward. The schedule is the order, the executor runs it.
    with run.timers("forward-backward", 1, barrier=True):
        outputs = run.executor.run(run.schedule(run.num_microbatches), run.recipe.forward_step, batches)
    run.microbatch_losses = outputs.loss_dicts

    # 3. Finish gradients: mean over the data-parallel ranks, sum of those that are partial.
    num_tokens = outputs.num_tokens if run.config.model.calculate_per_token_loss else None
    finalize_model_grads(run.model, num_tokens, pg_collection=run.groups, timers=run.timers)


def reduce_losses(
    run: Run, loss_dicts: Sequence[dict[str, torch.Tensor]], *, evaluates: bool = False
) -> dict[str, torch.Tensor]:
    """Sum of losses over sum of tokens, over all microbatches and data-parallel ranks; on every stage the last one's.

    loss_dicts: for each microbatch, name -> [2] = (sum over its tokens, number of its tokens); empty before the last
    stage. evaluates: they are an evaluation's, which may have others than the steps of training.
    """
    means = {}
    for name in loss_dicts[0] if loss_dicts else ():
        total = torch.stack([losses[name].detach() for losses in loss_dicts]).sum(dim=0)
        all_reduce(total, run.groups.dp_cp)
        means[name] = total[0] / total[1].clamp(min=1)
    return broadcast_from_last_stage(run, means, evaluates)


def broadcast_from_last_stage(run: Run, means: dict[str, torch.Tensor], evaluates: bool) -> dict[str, torch.Tensor]:
    """The last pipeline stage's scalars on all stages, so that the rank that logs has them."""
    stages = run.groups.pp
    if stages.size() == 1:
        return means
    last = run.groups.last_stage
    if evaluates not in run.loss_names:  # told once, as an object; the values then follow as one tensor without waiting
        run.loss_names[evaluates] = tuple(broadcast_object(list(means), stages, last))
    names = run.loss_names[evaluates]
    if run.groups.is_last_stage:
        assert tuple(means) == names, f"losses {tuple(means)} were {names} before"
        values = torch.stack([mean.float() for mean in means.values()])
    else:
        values = torch.empty(len(names), device=run.device)
    broadcast(values, stages, last)
    return dict(zip(names, values.unbind(), strict=True))


def get_learning_rate(run: Run) -> float:
    """Return the learning rate without multipliers, as the progress line shows it."""
    return float(run.scheduler.get_lr({"lr_mult": 1.0}))
