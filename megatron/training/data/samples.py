# SPDX-License-Identifier: Apache-2.0
"""Choice of the samples that a run reads: how many in each step, how many in all, and in which order.

Both samplers are functions of the number of samples consumed, so a run continues exactly where it stopped whatever it
trained on before:

    single    0 1 2 3 …           the dataset's order (which is shuffled already), once
    cyclic    a new random order in every epoch, drawn from a generator seeded with the epoch's number
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron.core.num_microbatches_calculator import NumMicrobatchesCalculator, build_num_microbatches_calculator
from megatron.training.config.container import RunConfig

PADDING = -1
"""In place of a sample's number: a sample whose tokens do not count, where a last batch is not full."""


# ---- how many


def build_batch_size_calculator(config: RunConfig) -> NumMicrobatchesCalculator:
    """Return how many microbatches each step has. Raises ConfigError for sizes that the ranks cannot share."""
    training = config.training
    scheduled = training.step_batch_size_schedule is not None
    return build_num_microbatches_calculator(
        global_batch_size=None if scheduled else training.global_batch_size,
        micro_batch_size=training.micro_batch_size or 1,
        data_parallel_size=config.data_parallel_size,
        rampup_batch_size=training.rampup_batch_size,
        step_batch_size_schedule=training.step_batch_size_schedule,
        seq_length=config.data.seq_length,
        decrease_batch_size_if_needed=training.decrease_batch_size_if_needed,
    )


def count_iterations(config: RunConfig, batch_size: NumMicrobatchesCalculator) -> int:
    """--train-iters, or the steps that fit into --train-samples with the batch sizes of the run."""
    if config.training.train_iters is not None:
        return config.training.train_iters
    return batch_size.count_iterations(config.training.train_samples or 0)


def count_samples_of_iterations(batch_size: NumMicrobatchesCalculator, consumed: int, iterations: int) -> int:
    """Samples that so many iterations take from the sample `consumed` on, while the batch may grow."""
    first = consumed
    while iterations > 0:
        size = batch_size.running_global_batch_size(consumed)
        grows_at = next((step.first_sample for step in batch_size.steps if step.first_sample > consumed), None)
        # Of this size all that begin before the batch grows.
        alike = iterations if grows_at is None else min(iterations, -((consumed - grows_at) // size))
        consumed += alike * size
        iterations -= alike
    return consumed - first


def count_needed_samples(config: RunConfig) -> tuple[int, int | None, int]:
    """Training, validation and test samples of the whole run; None: all there are."""
    batch_size = build_batch_size_calculator(config)
    # An upper bound: a growing batch needs fewer samples, and indices for too many cost little.
    largest = max(step.global_batch_size for step in batch_size.steps)
    return count_samples(config, count_iterations(config, batch_size), largest)


def count_samples(config: RunConfig, target_iterations: int, largest_batch_size: int) -> tuple[int, int | None, int]:
    """Samples that training, validation and test need over the whole run; None: all there are.

    largest_batch_size: of the run's global batch sizes; evaluation's, too, unless it has another.
    """
    validation = config.validation
    evaluation = validation.eval_iters * (validation.eval_global_batch_size or largest_batch_size)
    if validation.skip_train:
        return 0, None if validation.full_validation else evaluation, evaluation
    train = config.training.train_samples or target_iterations * largest_batch_size
    if validation.eval_interval is None:
        return train, 0, 0
    # + 1: the evaluation after the last iteration.
    evaluations = target_iterations // validation.eval_interval + 1
    return train, None if validation.full_validation else evaluations * evaluation, evaluation


# ---- in which order


@dataclass(frozen=True)
class SingleSampler:
    """Microbatches of indices in the dataset's order; a last global microbatch that is not full is left out.

    repeats: begin again at the end, as evaluation does when its intervals were changed in the middle of a run.
    """

    total_samples: int
    consumed_samples: int
    micro_batch_size: int
    dp_rank: int
    dp_size: int
    repeats: bool = False

    def __iter__(self) -> Iterator[list[int]]:
        step = self.micro_batch_size * self.dp_size
        offset = self.dp_rank * self.micro_batch_size
        first = self.consumed_samples
        if self.repeats:
            # A whole number of rounds, so that a rank reads the same samples in every pass.
            first %= self.total_samples // step * step
        while True:
            for start in range(first, self.total_samples - step + 1, step):
                yield list(range(start + offset, start + offset + self.micro_batch_size))
            if not self.repeats:
                return
            first = 0


@dataclass(frozen=True)
class CyclicSampler:
    """Microbatches of indices in a fresh random order each epoch, for ever.

    Each data-parallel rank permutes a separate bucket; samples that do not fill a global microbatch are left out.
    """

    total_samples: int
    consumed_samples: int
    micro_batch_size: int
    dp_rank: int
    dp_size: int

    def __iter__(self) -> Iterator[list[int]]:
        step = self.micro_batch_size * self.dp_size
        microbatches = self.total_samples // step
        first_epoch, consumed_of_epoch = divmod(self.consumed_samples, microbatches * step)
        done = consumed_of_epoch // step
        bucket = microbatches * self.micro_batch_size
        for epoch in itertools.count(first_epoch):
            generator = torch.Generator()
            # Seeded only with the epoch: the order does not depend on where a run was interrupted.
            generator.manual_seed(epoch)
            # All ranks draw the same permutation and apply it to separate buckets.
            order = torch.randperm(bucket, generator=generator) + self.dp_rank * bucket
            yield from order.view(microbatches, self.micro_batch_size)[done:].tolist()
            done = 0


@dataclass(frozen=True)
class WholeSampler:
    """Every sample exactly once, in order; the last of `num_microbatches` are filled up with PADDING."""

    total_samples: int
    num_microbatches: int
    micro_batch_size: int
    dp_rank: int
    dp_size: int

    def __iter__(self) -> Iterator[list[int]]:
        step = self.micro_batch_size * self.dp_size
        first = self.dp_rank * self.micro_batch_size
        for start in range(first, first + self.num_microbatches * step, step):
            numbers = range(start, start + self.micro_batch_size)
            yield [number if number < self.total_samples else PADDING for number in numbers]
