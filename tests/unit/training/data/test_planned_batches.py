# SPDX-License-Identifier: Apache-2.0
"""--hybrid-context-parallel on one rank at a time: what its microbatches hold and where they come from; bad input."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from megatron.core.context_parallel.planning import SampleCost
from megatron.core.errors import ConfigError, DataError
from megatron.core.num_microbatches_calculator import NumMicrobatchesCalculator, build_num_microbatches_calculator
from megatron.core.packed_seq_params import pack_batch
from megatron.core.process_groups_config import SingleRankGroup
from megatron.training.data.loading import LoaderSettings
from megatron.training.data.planned_batches import PlanLimits, StepPlans
from tests.support.run_flags import SMALLEST_RUN, run_config

SEQUENCE = 16
LENGTHS = [[16], [9, 5], [3, 3, 3, 3], [8, 8], [1], [12, 2], [5, 5, 5]]
"""Of the documents of sample i, i modulo 7."""


class Packed(Dataset[Any]):
    """Token i of document d in sample n is 100 n + 10 d + i modulo 10."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def document_lengths(self, index: int) -> list[int]:
        return LENGTHS[index % len(LENGTHS)]

    def document(self, index: int, number: int) -> dict[str, Any]:
        positions = torch.arange(self.document_lengths(index)[number])
        tokens = 100 * index + 10 * number + positions % 10
        mask = torch.ones(len(positions))
        return {"tokens": tokens, "labels": tokens, "loss_mask": mask, "position_ids": positions}

    def locate(self, index: int) -> str:
        return f"row {index}"


def batch_size_of(global_batch_size: int, num_ranks: int, rampup: Any = None) -> NumMicrobatchesCalculator:
    return build_num_microbatches_calculator(
        global_batch_size=global_batch_size, micro_batch_size=1, data_parallel_size=num_ranks, rampup_batch_size=rampup
    )


def plans_of(
    rank: int, num_ranks: int, samples: int = 24, *, tp: int = 1, rampup: Any = None, **settings: Any
) -> StepPlans:
    """Those of a rank: without context parallelism otherwise, with at most 4 tokens on a rank of 4."""
    cost, most = SampleCost(1.0, 1.0), SEQUENCE // num_ranks
    layout = PlanLimits(rank, num_ranks, 1, most, SEQUENCE, cost, sequence_parallel_ranks=tp)
    loader = LoaderSettings(1, dp_rank=rank, dp_size=num_ranks, device=torch.device("cpu"), **settings)
    return StepPlans(Packed(samples), loader, batch_size_of(8, num_ranks, rampup), layout)


def tokens_of_steps(num_ranks: int, steps: int, consumed: int = 0, **settings: Any) -> list[list[int]]:
    """For each step the tokens that count, once for the ranks that share them."""
    every: list[list[int]] = [[] for _ in range(steps)]
    for rank in range(num_ranks):
        plans, done = plans_of(rank, num_ranks, **settings), consumed
        batches = plans.batches(consumed)
        for tokens in every:
            for batch in itertools.islice(batches, plans.num_microbatches(done)):
                if rank % int(batch["local_cp_size"]) == 0:
                    tokens += batch["tokens"][batch["loss_mask"] > 0].tolist()
            plan = plans.at(done)
            assert plan is not None
            done += plan.num_samples
    return [sorted(tokens) for tokens in every]


def tokens_of_samples(samples: range) -> list[int]:
    data = Packed(len(samples))
    documents = [(n, d) for n in samples for d in range(len(data.document_lengths(n)))]
    return sorted(token for place in documents for token in data.document(*place)["tokens"].tolist())


@pytest.mark.flags("--hybrid-context-parallel")
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_step_has_the_samples_of_the_run_without_plans(num_ranks: int) -> None:
    expected = [tokens_of_samples(range(8)), tokens_of_samples(range(8, 16))]
    assert tokens_of_steps(num_ranks, 2) == expected
    assert tokens_of_steps(num_ranks, 1, consumed=8) == expected[1:], "a run goes on where it stopped"
    assert tokens_of_steps(num_ranks, 1, num_workers=1) == expected[:1]


def test_a_growing_batch_is_planned_as_it_grows() -> None:
    expected = [tokens_of_samples(range(first, first + 4)) for first in (0, 4)] + [tokens_of_samples(range(8, 16))]
    assert tokens_of_steps(2, 3, rampup=[4, 4, 8]) == expected


def test_cyclic_data_are_those_of_all_ranks() -> None:
    settings = LoaderSettings(1, 0, 2, torch.device("cpu"), "cyclic")
    first, second = (
        itertools.islice(LoaderSettings(1, rank, 2, settings.device, "cyclic").build_sampler(24, 0, repeats=False), 4)
        for rank in range(2)
    )
    plan = plans_of(0, 2, dataloader_type="cyclic").at(0)
    assert plan is not None
    assert {sample for sample, _ in plan.places} == {sample for (sample,) in itertools.chain(first, second)}


def test_what_a_microbatch_holds() -> None:
    """Each one fits its ranks, which can cut it; a rank without work has one token without loss."""
    for rank, tp in itertools.product(range(4), (1, 2)):
        plans = plans_of(rank, 4, tp=tp)
        for batch in itertools.islice(plans.batches(0), plans.num_microbatches(0)):
            ranks, length = int(batch["local_cp_size"]), batch["tokens"].shape[1]
            counted = int(batch["loss_mask"].sum())
            assert 1 <= counted <= 4 * ranks
            assert length % (ranks * tp) == 0 and (ranks == 1 or length % (2 * ranks) == 0)
            assert length - counted < max(2, tp) * ranks
            assert {x.shape for x in batch.values() if x.dim() == 2 and x.dtype != torch.int32} == {(1, length)}
            bounds = batch["cu_seqlens"][0].tolist()
            assert bounds[0] == 0 and bounds[-1] == counted
            restarts = [i for i, position in enumerate(batch["position_ids"][0, :counted]) if position == 0]
            assert restarts == bounds[:-1]
            _, packed = pack_batch(batch, [SingleRankGroup(), Sized(2), Sized(4)])  # type: ignore[list-item]
            assert packed is not None and packed.cp_group is not None and packed.cp_group.size() == ranks
    idle = plans_of(3, 4, samples=4)
    idle.batch_size = batch_size_of(4, 4)
    idle.dataset.document_lengths = lambda index: [2] if index == 0 else []
    (batch,) = itertools.islice(idle.batches(0), idle.num_microbatches(0))
    assert batch["tokens"].shape == (1, 1) and not batch["loss_mask"].any()


class Sized:
    """Enough of a process group to be found."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def test_plans_ahead_of_the_step_are_kept_and_those_behind_are_not() -> None:
    plans = plans_of(0, 2)
    ahead = list(plans.microbatches(0))
    assert len(ahead) == sum(plans.num_microbatches(consumed) for consumed in (0, 8, 16))
    assert list(plans._plans) == [16]


def test_data_that_are_used_up() -> None:
    plans = plans_of(0, 2, samples=8)
    batches = plans.batches(0)
    assert len(list(itertools.islice(batches, plans.num_microbatches(0)))) == plans.num_microbatches(0)
    assert plans.num_microbatches(8) == 1
    with pytest.raises(DataError, match="the train data is used up: 8 samples"):
        next(batches)


def test_a_dataset_without_documents_is_refused() -> None:
    plans = plans_of(0, 1)
    with pytest.raises(ConfigError, match="needs datasets that tell the lengths of their documents; list lacks"):
        StepPlans([1], plans.settings, plans.batch_size, plans.layout)


def test_a_script_that_does_not_know_who_shares_a_batch_is_refused() -> None:
    batch = next(plans_of(0, 4).batches(0))
    with pytest.raises(ConfigError, match="hand model.groups.hybrid_cp to pack_batch"):
        pack_batch(batch)


# ---- flags

SFT = f"{SMALLEST_RUN.replace('--mock-data', '--data-path x --sft')} --calculate-per-token-loss --micro-batch-size 1"
PLANNED = "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank"


@pytest.mark.parametrize(
    ("flags", "world", "sentence"),
    [
        ("--hybrid-context-parallel", 4, "needs --max-seqlen-per-dp-cp-rank, the most tokens"),
        (f"{PLANNED} 0", 4, "--max-seqlen-per-dp-cp-rank 0"),
        (f"{PLANNED} 8", 4, "--seq-length 64 is longer than --max-seqlen-per-dp-cp-rank 8 x 4 data- and context-"
         "parallel processes = 32; use at least --max-seqlen-per-dp-cp-rank 16"),
        (f"{PLANNED} 64 --global-batch-size 6", 6, "a power of two of data- and context-parallel processes, not 6; use "
         "4 or 8"),
        (f"{PLANNED} 64 --pipeline-model-parallel-size 2 --num-layers 2", 2, "--pipeline-model-parallel-size 2, whose "
         "stages exchange microbatches of one length"),
        (f"{PLANNED} 64 --num-experts 4 --moe-aux-loss-coeff 0.1", 1, "--moe-aux-loss-coeff 0.1 judges whole microb"),
        (f"{PLANNED} 64 --num-experts 4 --moe-router-load-balancing-type sinkhorn", 1, "balances whole microbatches"),
        (f"{PLANNED} 64 --num-experts 4 --moe-expert-capacity-factor 1", 1, "--moe-expert-capacity-factor 1.0 bounds"),
        (f"{PLANNED} 64 --num-experts 4 --expert-model-parallel-size 2", 2, "use --moe-token-dispatcher-type alltoall"),
        (f"{PLANNED} 64 --dataloader-type external", 1, "cannot plan what --dataloader-type external yields"),
        (f"{PLANNED} 16 --cp-comm-type a2a", 4, "divides sequences over up to 4 ranks, which --num-attention-heads 2 "
         "/ --tensor-model-parallel-size 1 = 2 heads are not a multiple of; use 4 heads"),
        (f"{PLANNED} 16 --cp-comm-type a2a+p2p", 4, "cannot be combined with --cp-comm-type a2a\\+p2p"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused(flags: str, world: int, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run_config(flags, SFT, world)


def test_data_of_other_kinds_are_refused() -> None:
    for base, sentence in (
        (SMALLEST_RUN, "divides conversations of different lengths, which need --sft"),
        (SFT.replace("--calculate-per-token-loss", ""), "needs --calculate-per-token-loss"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            run_config(f"{PLANNED} 64", base)
    config = run_config(f"{PLANNED} 16 --cp-comm-type all_gather", SFT, 4)
    assert config.model.hybrid_context_parallel


def test_the_limit_alone_is_noted() -> None:
    notes = run_config("--max-seqlen-per-dp-cp-rank 64").notes
    assert any("--max-seqlen-per-dp-cp-rank 64 has no effect without --hybrid-context-parallel" in n for n in notes)
