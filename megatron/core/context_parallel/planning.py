# SPDX-License-Identifier: Apache-2.0
"""Over how many ranks each sample of a step is divided, and which ones: arithmetic only, no processes and no tensors.

A sample of t tokens is shared by the fewest ranks, a power of two, that have t / ranks <= the most tokens of a rank.
With at most 8 tokens on each of 4 ranks, and samples of 30, 12, 8, 5, 4, 4 and 3 tokens:

    rank 0    30a  12a  4        each rank goes from left to right; a, b, ...: parts of one sample
    rank 1    30b  12b  3
    rank 2    30c  8
    rank 3    30d  5    4

Blocks are aligned (blocks of two: 0-1 and 2-3), and the samples of many ranks come first. So the ranks that share a
sample have the same past, and no rank waits for another in the middle of its work. A sample goes to the block with the
least work so far, expensive ones first (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969: at most 4/3 of the
best possible time where all samples are undivided). Undivided samples of a rank are packed into microbatches of at most
the tokens of a rank.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from megatron.core.config_base import name_multiples
from megatron.core.errors import ConfigError


def cutting_problem(sequence: str, length: int, size: int) -> str | None:
    """Return why a sequence, named so in the sentence, cannot be shared among `size` ranks; None where it can."""
    if size == 1 or length % (2 * size) == 0:
        return None
    return (
        f"{sequence} is not divisible by 2 x --context-parallel-size {size} (each rank holds two pieces, one from "
        f"either end); use {name_multiples(length, 2 * size)} tokens"
    )


@dataclass(frozen=True)
class SampleCost:
    """Estimated work, in any unit: each token costs the linear layers' work, and the work of each token that it
    sees."""

    per_token: float
    per_pair: float

    def estimate_tokens(self, first: int, end: int) -> float:
        """Estimate the work of tokens [first, end) of a sample; token i sees i + 1 tokens."""
        # The sum of i + 1 over the tokens.
        pairs = (end * (end + 1) - first * (first + 1)) / 2
        return self.per_token * (end - first) + self.per_pair * pairs

    def estimate(self, length: int) -> float:
        """Estimate the work of a whole sample of `length` tokens."""
        return self.estimate_tokens(0, length)


class Microbatch(NamedTuple):
    """Samples that are packed into one sequence, which a block of ranks computes together."""

    samples: tuple[int, ...]
    """Numbers of the samples, which are packed into one sequence."""
    num_ranks: int
    """Ranks that share it."""


@dataclass(frozen=True)
class ContextPlan:
    """Assignment of one step's samples to ranks."""

    lengths: tuple[int, ...]
    """Tokens of each sample."""
    num_ranks: int
    max_tokens_per_rank: int
    cost: SampleCost
    blocks: dict[tuple[int, int], tuple[int, ...]] = field(hash=False)
    """(number of ranks, first rank) of a block -> its samples in order; large blocks first."""

    def list_microbatches(self, rank: int) -> tuple[Microbatch, ...]:
        """Return what a rank computes, in order; nothing where there are too few samples. All ranks of a block have its
        microbatches in the same order."""
        found: list[Microbatch] = []
        for (size, first), samples in self.blocks.items():
            if first <= rank < first + size:
                packs = self._packed(samples, size * self.max_tokens_per_rank)
                found += [Microbatch(pack, size) for pack in packs]
        return tuple(found)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Estimated work of each rank, in the unit of the cost."""
        work = [0.0] * self.num_ranks
        for (size, first), samples in self.blocks.items():
            # Zigzag pieces give all ranks of a block the same part of a sample.
            share = sum(self.cost.estimate(self.lengths[sample]) for sample in samples) / size
            for rank in range(first, first + size):
                work[rank] += share
        return tuple(work)

    @property
    def balance(self) -> float:
        """Mean work of a rank divided by the most work of a rank: the fraction of the step in which ranks compute. 1 is
        perfect."""
        most = max(self.work)
        return sum(self.work) / self.num_ranks / most if most else 1.0

    @cached_property
    def samples_by_size(self) -> dict[int, int]:
        """Number of ranks -> samples that are divided over so many."""
        counts: dict[int, int] = defaultdict(int)
        for (size, _), samples in self.blocks.items():
            counts[size] += len(samples)
        return dict(sorted(counts.items()))

    def _packed(self, samples: Sequence[int], most_tokens: int) -> list[tuple[int, ...]]:
        """Each sample goes into the first pack that has room for it."""
        packs: list[list[int]] = []
        room: list[int] = []
        # First fit, in the plan's order: all ranks of a block come to the same packs without talking.
        for sample in samples:
            length = self.lengths[sample]
            for index, tokens in enumerate(room):
                if length <= tokens:
                    packs[index].append(sample)
                    room[index] -= length
                    break
            else:
                packs.append([sample])
                room.append(most_tokens - length)
        return [tuple(pack) for pack in packs]


def count_ranks_of_sample(length: int, max_tokens_per_rank: int) -> int:
    """Return the smallest power of two that divides `length` tokens into shares of at most `max_tokens_per_rank`."""
    # The ceiling of length / most, rounded up to a power of two.
    return 1 << (-(length // -max_tokens_per_rank) - 1).bit_length()


def plan_step(lengths: Sequence[int], num_ranks: int, max_tokens_per_rank: int, cost: SampleCost) -> ContextPlan:
    """Divide a step's samples over the ranks of data and context parallelism.

    lengths: tokens of each sample, at least one. num_ranks: a power of two. The same arguments give the same plan, on
    every rank. Raises ConfigError for a sample that all ranks together cannot take.
    """
    if num_ranks < 1 or num_ranks & (num_ranks - 1):
        raise ConfigError(
            f"--hybrid-context-parallel needs a power of two of data- and context-parallel ranks, not {num_ranks}; "
            "change the number of processes"
        )
    by_size: dict[int, list[int]] = defaultdict(list)
    for sample, length in enumerate(lengths):
        size = count_ranks_of_sample(length, max_tokens_per_rank)
        if size > num_ranks:
            raise ConfigError(
                f"a sample of {length} tokens is longer than --max-seqlen-per-dp-cp-rank {max_tokens_per_rank} x "
                f"{num_ranks} ranks = {max_tokens_per_rank * num_ranks}; raise it, or lower --seq-length"
            )
        by_size[size].append(sample)
    work = [0.0] * num_ranks
    blocks: dict[tuple[int, int], tuple[int, ...]] = {}
    # Large blocks first: afterwards only smaller ones follow, whose ranks are inside one block and share its past.
    for size in sorted(by_size, reverse=True):
        # Ties by number of the sample: every rank must come to the same plan without talking.
        expensive_first = sorted(by_size[size], key=lambda sample: (-lengths[sample], sample))
        # The ranks of a block of this size have all done the same until now.
        least = [(work[first], first) for first in range(0, num_ranks, size)]
        heapq.heapify(least)
        taken: dict[int, list[int]] = defaultdict(list)
        for sample in expensive_first:
            done, first = heapq.heappop(least)
            taken[first].append(sample)
            heapq.heappush(least, (done + cost.estimate(lengths[sample]) / size, first))
        for done, first in least:
            work[first : first + size] = [done] * size
        blocks |= {(size, first): tuple(taken[first]) for first in sorted(taken)}
    return ContextPlan(tuple(lengths), num_ranks, max_tokens_per_rank, cost, blocks)


# ---- the same step where every sequence is divided alike


def compute_static_balance(sequences: Sequence[Sequence[Sequence[int]]], cp_size: int, cost: SampleCost) -> float:
    """`ContextPlan.balance` of the layout in which each sequence is cut into zigzag pieces for `cp_size` ranks.

    sequences[r][m]: the lengths of what is packed into microbatch m of data-parallel rank r, padding included, which is
    counted as work. The ranks that share a sequence wait for each other in every microbatch, the others at the end of
    the step.
    """
    total, slowest = 0.0, 0.0
    for microbatches in sequences:
        seconds = 0.0
        for lengths in microbatches:
            shares = [sum(parts) for parts in _zigzag_costs(lengths, cp_size, cost)]
            total += sum(shares)
            # The slowest of the ranks that share a sequence sets the pace of its microbatch.
            seconds += max(shares)
        slowest = max(slowest, seconds)
    return total / (len(sequences) * cp_size * slowest) if slowest else 1.0


def _zigzag_costs(lengths: Sequence[int], cp_size: int, cost: SampleCost) -> Iterator[list[float]]:
    """For each rank the costs of what it holds of the samples of a sequence."""
    piece = sum(lengths) / (2 * cp_size)
    for rank in range(cp_size):
        costs, start = [], 0
        for length in lengths:
            for index in (rank, 2 * cp_size - 1 - rank):
                first = max(start, round(index * piece)) - start
                end = min(start + length, round((index + 1) * piece)) - start
                if first < end:
                    costs.append(cost.estimate_tokens(first, end))
            start += length
        yield costs
