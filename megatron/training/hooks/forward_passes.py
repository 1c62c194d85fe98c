# SPDX-License-Identifier: Apache-2.0
"""Passes over samples of the data that only report: what a reference or a teacher makes of them."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megatron.core.errors import say
from megatron.training.data.loading import load_samples
from megatron.training.data.samples import PADDING, WholeSampler
from megatron.training.run import Run

if TYPE_CHECKING:
    from megatron.training.data.loading import Batch

_LINE_SECONDS = 10.0
"""Between two lines that say how far a pass is."""


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


class PassProgress:
    """Lines that say how far a pass is, every few seconds."""

    def __init__(self, run: Run, name: str, count: int, unit: str) -> None:
        self._is_told, self._name, self._count, self._unit = run.is_first_rank, name, count, unit
        self._done, self._begun = 0, time.monotonic()
        self._told = self._begun

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._begun

    def add(self, done: int) -> None:
        """Count what is done."""
        self._done, now = self._done + done, time.monotonic()
        if self._is_told and now - self._told > _LINE_SECONDS:
            self._told, rate = now, self._done / (now - self._begun)
            say(
                f"{self._name}: {self._done} of {self._count} {self._unit}, {rate:.1f} {self._unit}/s, "
                f"{(self._count - self._done) / rate:.0f} s left"
            )
