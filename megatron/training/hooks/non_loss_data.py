"""pretrain(process_non_loss_data_func=...): a script's own look at the model after each evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from megatron.core.collectives import broadcast_object
from megatron.training.hooks.tensorboard import TensorBoardHook
from megatron.training.run import Evaluation, Hook, Run


class NonLossDataHook(Hook):
    """Collects data and hands it, on the first rank, to process(data, iteration, writer).

    collect: (model chunks) -> data, called on every rank; without it the data are what the loss function returns for
    each microbatch of one more global batch when it is called with non_loss_data=True. As upstream, nothing happens
    without --tensorboard-dir.
    """

    def __init__(
        self,
        process: Callable[[Any, int, Any], Any],
        collect: Callable[[Any], Any] | None,
        tensorboard: TensorBoardHook | None,
    ) -> None:
        self.process, self.collect, self.tensorboard = process, collect, tensorboard

    def on_evaluate(self, run: Run, evaluation: Evaluation) -> None:
        """Collect and process. Every rank takes part."""
        if self.tensorboard is None:
            return
        data = self.collect(run.model) if self.collect is not None else self._forward(run, evaluation)
        data = broadcast_object(data, run.groups.pp, run.groups.last_stage)
        if run.is_first_rank:
            self.process(data, run.progress.iteration, self.tensorboard.writer)

    @torch.no_grad()
    def _forward(self, run: Run, evaluation: Evaluation) -> list[Any]:
        """One global batch, the next that an evaluation would see."""
        consumed = run.progress.consumed_valid_samples if evaluation.split == "validation" else 0
        actions = run.evaluation_schedule(run.evaluation_batch_size // run.evaluation_samples_per_microbatch)
        for chunk in run.model:
            chunk.eval()
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
