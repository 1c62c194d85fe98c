# SPDX-License-Identifier: Apache-2.0
"""--hybrid-context-parallel: the conversations of a step, each on as many ranks as it needs.

    samples of a step  ->  lengths of their conversations  ->  ContextPlan  ->  this rank's microbatches

The samples are the same as without the flag, and a step takes as many. All ranks read the same lengths and make
the same plan; then each reads the conversations of its microbatches, and nothing is sent. A rank that has none
computes one token without loss, so that it takes part in whatever all ranks do in every step. Where ranks exchange
something in every microbatch (tokens for experts, weights that FSDP divides), all have as many as the one with the
most. They then meet in order: blocks come large ones first, so that the ranks of a block have all had the same blocks
before it, and its microbatches have the same number on each of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import pad
from torch.utils.data import Dataset

from megatron.core.context_parallel.planning import ContextPlan, SampleCost, compute_static_balance, plan_step
from megatron.core.datasets.megatron_dataset import PackedDocuments
from megatron.core.errors import ConfigError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.planner.throughput import count_products
from megatron.training.config.container import RunConfig
from megatron.training.data.loading import Batch, LoaderSettings, build_used_up_error, load_samples

if TYPE_CHECKING:
    from megatron.core.num_microbatches_calculator import NumMicrobatchesCalculator

_NOTHING = -1
"""In place of a sample's number: one token without loss."""


class PlannedDocument(NamedTuple):
    """Place of a conversation in the data, and the number of ranks that share its microbatch."""

    sample: int
    document: int
    num_ranks: int


@dataclass(frozen=True)
class PlanLimits:
    """Sizes that a plan depends on besides the lengths."""

    rank: int
    """This process among the ranks of data and context parallelism."""
    num_ranks: int
    cp_size: int
    """--context-parallel-size: of the layout without plans."""
    max_tokens_per_rank: int
    seq_length: int
    cost: SampleCost
    sequence_parallel_ranks: int = 1
    """Ranks that divide a context-parallel rank's tokens among them."""
    in_step: bool = False
    """All ranks have equally many microbatches, because they exchange something in each."""

    @classmethod
    def build(cls, config: RunConfig, groups: ProcessGroupCollection, padded_vocab_size: int) -> PlanLimits:
        """Return where this process stands in the context-parallel ranks of a run, and what a conversation costs
        there."""
        # The longest conversation and the tokens that a rank may hold decide over how many ranks it is divided.
        most, seq_length = config.model.max_seqlen_per_dp_cp_rank, config.data.seq_length
        assert most is not None and seq_length is not None, "checked by read_run_config"
        cost = SampleCost(*count_products(config.model, padded_vocab_size=padded_vocab_size))
        # A layer with experts divides tokens over the tensor-parallel ranks also where nobody else does.
        divides_tokens = config.model.sequence_parallel or config.model.num_moe_experts is not None
        sequence_parallel_ranks = groups.tp.size() if divides_tokens else 1
        return cls(
            groups.dp_cp.rank(), groups.dp_cp.size(), groups.cp.size(), most, seq_length, cost, sequence_parallel_ranks,
            in_step=config.model.shares_experts_beyond_tp or config.ddp.use_torch_fsdp2,
        )  # fmt: skip


@dataclass(frozen=True)
class StepPlan:
    """The plan of one step: which conversations form each microbatch, on how many ranks."""

    num_samples: int
    places: tuple[tuple[int, int], ...]
    """(sample, number of the conversation in it) of the planned conversations."""
    context: ContextPlan
    layout: PlanLimits
    sequences: tuple[tuple[tuple[int, ...], ...], ...]
    """For every data-parallel rank its microbatches without a plan: lengths of conversations and padding."""

    @cached_property
    def microbatches(self) -> list[list[PlannedDocument]]:
        """This rank's microbatches in order, each a list of places; at least one, or as many as any rank has."""
        own = [
            [PlannedDocument(*self.places[number], microbatch.num_ranks) for number in microbatch.samples]
            for microbatch in self.context.list_microbatches(self.layout.rank)
        ]
        # Every rank runs at least one microbatch: the collectives of the step wait for all of them.
        least = 1
        if self.layout.in_step:
            least = max(len(self.context.list_microbatches(rank)) for rank in range(self.layout.num_ranks))
        nothing = [[PlannedDocument(_NOTHING, 0, 1)] for _ in range(least - len(own))]
        return own + nothing

    @property
    def compute_static_balance(self) -> float:
        """`ContextPlan.balance` of the same step without a plan."""
        return compute_static_balance(self.sequences, self.layout.cp_size, self.layout.cost)


class StepPlans:
    """The plans of a run's steps, by the samples consumed before each."""

    def __init__(
        self, dataset: Any, settings: LoaderSettings, batch_size: NumMicrobatchesCalculator, layout: PlanLimits
    ) -> None:
        """dataset: PackedDocuments. Raises ConfigError for another one."""
        parts = getattr(dataset, "datasets", [dataset])
        # Found before training: in the middle of a run only the ranks that meet such a sample would stop.
        strange = next((part for part in [*parts, dataset] if not isinstance(part, PackedDocuments)), None)
        if strange is not None:
            raise ConfigError(
                f"--hybrid-context-parallel needs datasets that tell the lengths of their documents; "
                f"{type(strange).__name__} lacks document_lengths, document or locate (see docs/parallelism.md)"
            )
        self.dataset, self.settings, self.batch_size, self.layout = dataset, settings, batch_size, layout
        # Several askers (the step, the loader, a hook) need the same plan at different times, and the loader is ahead.
        self._plans: dict[int, StepPlan] = {}
        self._coming: Iterator[StepPlan] = iter(())
        self._next = -1

    def at(self, consumed_samples: int) -> StepPlan | None:
        """The plan of the step before which so many samples were consumed; None where the data have no such step."""
        if consumed_samples not in self._plans:
            # A jump: the beginning of a run, or one that was resumed. Otherwise the samplers go on where they are.
            if consumed_samples != self._next:
                self._coming = self._steps(consumed_samples)
            plan = next(self._coming, None)
            if plan is None:
                self._next = -1
                return None
            self._plans[consumed_samples] = plan
            self._next = consumed_samples + plan.num_samples
        return self._plans[consumed_samples]

    def num_microbatches(self, consumed_samples: int) -> int:
        """Return how many microbatches this rank has in that step; earlier steps are forgotten. Where the data are used
        up it is one, so that the reader of that microbatch learns it."""
        # Memory stays bounded although the loader asks ahead of the step.
        for earlier in [consumed for consumed in self._plans if consumed < consumed_samples]:
            del self._plans[earlier]
        plan = self.at(consumed_samples)
        return 1 if plan is None else len(plan.microbatches)

    def batches(self, consumed_samples: int) -> Generator[Batch, None, None]:
        """This rank's microbatches on the device, from that step on; see TrainingData.open."""
        documents, places = SingleDocuments(self.dataset), self.microbatches(consumed_samples)
        stack = OneSequence(self.layout.sequence_parallel_ranks)
        yield from load_samples(documents, "train", places, self.settings, stack)
        raise build_used_up_error("train", len(self.dataset), consumed_samples)

    def microbatches(self, consumed_samples: int) -> Iterator[list[PlannedDocument]]:
        """Yield this rank's microbatches, of one step after the other, to the end of the data."""
        while (plan := self.at(consumed_samples)) is not None:
            yield from plan.microbatches
            consumed_samples += plan.num_samples

    def _steps(self, consumed_samples: int) -> Generator[StepPlan, None, None]:
        # Every rank plays the samplers of all ranks: the plan needs all lengths, and reading them is cheaper than
        # sending.
        ranks = [dataclasses.replace(self.settings, dp_rank=rank) for rank in range(self.settings.dp_size)]
        samplers = [iter(rank.build_sampler(len(self.dataset), consumed_samples, repeats=False)) for rank in ranks]
        while True:
            count = self.batch_size.num_microbatches(consumed_samples)
            samples = [list(itertools.islice(sampler, count)) for sampler in samplers]
            # A last step that is not full is left out, as in a run without plans.
            if len(samples[0]) < count:
                return
            plan = self._plan(samples)
            yield plan
            consumed_samples += plan.num_samples

    def _plan(self, samples: Sequence[Sequence[Sequence[int]]]) -> StepPlan:
        """samples[r][m]: what microbatch m of data-parallel rank r has without a plan."""
        places: list[tuple[int, int]] = []
        lengths: list[int] = []
        sequences: list[tuple[tuple[int, ...], ...]] = []
        for microbatches in samples:
            rows = []
            for microbatch in microbatches:
                row: list[int] = []
                for sample in microbatch:
                    own = self.dataset.document_lengths(sample)
                    places += [(sample, document) for document in range(len(own))]
                    lengths += own
                    # The padding of a packed sample counts as one more document: without a plan it is computed, too.
                    row += [*own, self.layout.seq_length - sum(own)]
                rows.append(tuple(row))
            sequences.append(tuple(rows))
        layout = self.layout
        context = plan_step(lengths, layout.num_ranks, layout.max_tokens_per_rank, layout.cost)
        num_samples = sum(len(microbatch) for microbatches in samples for microbatch in microbatches)
        return StepPlan(num_samples, tuple(places), context, layout, tuple(sequences))


def build_step_plans(
    config: RunConfig,
    groups: ProcessGroupCollection,
    dataset: Any,
    settings: LoaderSettings,
    batch_size: NumMicrobatchesCalculator,
) -> StepPlans | None:
    """The plans of a run; None without --hybrid-context-parallel or without training data."""
    if not config.model.hybrid_context_parallel or dataset is None:
        return None
    assert settings.vocabulary_limit is not None
    return StepPlans(dataset, settings, batch_size, PlanLimits.build(config, groups, settings.vocabulary_limit))


class SingleDocuments(Dataset[Any]):
    """The conversations of packed samples, by their Place."""

    def __init__(self, dataset: PackedDocuments) -> None:
        self.dataset = dataset

    def __getitem__(self, place: PlannedDocument) -> dict[str, Any]:
        if place.sample == _NOTHING:
            zero = torch.zeros(1, dtype=torch.int64)
            # A valid sample in every respect; its loss mask of 0 keeps it out of the loss.
            document = {"tokens": zero, "labels": zero, "position_ids": zero, "loss_mask": torch.zeros(1)}
        else:
            document = self.dataset.document(place.sample, place.document)
        return document | {"local_cp_size": place.num_ranks}

    def locate(self, place: Any) -> str:
        """Return where the conversation comes from, for messages."""
        return f"conversation {place.document} of those from {self.dataset.locate(place.sample)} on"


@dataclass(frozen=True)
class OneSequence:
    """Makes a microbatch of conversations: one packed sequence that its ranks can cut.

    sequence_parallel_ranks: those that share a context-parallel rank's tokens.
    """

    sequence_parallel_ranks: int = 1

    def __call__(self, documents: Sequence[Any]) -> Batch:
        """tokens, labels, position_ids int64 [1, t], loss_mask float32 [1, t]; cu_seqlens int32 [1, documents + 1],
        max_seqlen int32 [1]; local_cp_size int64 []."""
        lengths = torch.tensor([0, *(len(document["tokens"]) for document in documents)])
        num_ranks = documents[0]["local_cp_size"]
        # A rank holds two pieces of a sequence that several share.
        unit = num_ranks * math.lcm(2 if num_ranks > 1 else 1, self.sequence_parallel_ranks)
        padding = -int(lengths.sum()) % unit
        # Padding follows the last document, whose loss mask it does not touch: it is filled with 0.
        batch = {
            name: pad(torch.cat([document[name] for document in documents]), (0, padding)).unsqueeze(0)
            for name in ("tokens", "labels", "position_ids", "loss_mask")
        }
        return batch | {
            "cu_seqlens": lengths.cumsum(0).int().unsqueeze(0),
            "max_seqlen": lengths.max().int().unsqueeze(0),
            "local_cp_size": torch.tensor(num_ranks),
        }
