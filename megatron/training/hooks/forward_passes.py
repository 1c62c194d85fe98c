# SPDX-License-Identifier: Apache-2.0
"""Passes over samples of the data that only report: what a reference or a teacher makes of them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megatron.training.data.loading import load_samples
from megatron.training.data.samples import PADDING, WholeSampler
from megatron.training.run import Run

if TYPE_CHECKING:
    from megatron.training.data.loading import Batch


@torch.no_grad()
def pass_over(
    run: Run, step: Callable[..., Any], dataset: Any, split: str, indices: Sequence[int]
) -> Iterator[Sequence[dict[str, Any]]]:
    """Run a forward step over some samples, a global batch of an evaluation at a time, on this replica's share of them.
    Yields what its microbatches report, nothing before the last stage. A last batch is filled up with samples
    whose tokens do not count."""
    # Each site reads all samples, so that none need be exchanged.
    settings = dataclasses.replace(
        run.data.settings.choose_split(split), dp_rank=run.groups.dp.rank(), dp_size=run.groups.dp.size()
    )
    microbatches = run.evaluation_batch_size // run.evaluation_samples_per_microbatch
    per_batch = settings.micro_batch_size * settings.dp_size * microbatches
    rounds = -(len(indices) // -per_batch)
    sampler = WholeSampler(
        len(indices), rounds * microbatches, settings.micro_batch_size, settings.dp_rank, settings.dp_size
    )
    chosen = [[PADDING if place == PADDING else indices[place] for place in places] for places in sampler]
    actions = run.evaluation_schedule(microbatches)
    batches: Iterator[Batch] = load_samples(dataset, split, chosen, settings)
    for chunk in run.model:
        chunk.eval()
    with contextlib.closing(batches):  # type: ignore[type-var]
        for _ in range(rounds):
            outputs = run.executor.run(
                actions, step, batches, forward_only=True, activation_shape=run.evaluation_shape
            )  # fmt: skip
            yield outputs.loss_dicts
    for chunk in run.model:
        chunk.train()
