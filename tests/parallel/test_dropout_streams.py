# SPDX-License-Identifier: Apache-2.0
"""Which tensor-parallel ranks drop the same elements: of whole hidden states all of them, of what is a rank's own (its
heads; with sequence parallelism its tokens) none."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.core.mesh import RankGrid
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.parallel.harness import run_distributed

LAYERS = 2


def masks(tp: int, sequence_parallel: bool, attention_dropout: float) -> list[list[float]]:
    """Every dropout mask of one forward pass, in order: embedding, then attention, and twice hidden, of each layer."""
    rank = torch.distributed.get_rank() if tp > 1 else 0
    groups = ProcessGroupCollection.build(RankGrid(tp, tp=tp), rank)
    model_parallel_cuda_manual_seed(5, pg_collection=groups)
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=16, num_attention_heads=4, hidden_dropout=0.5, attention_backend="local",
        attention_dropout=attention_dropout, sequence_parallel=sequence_parallel, tensor_model_parallel_size=tp,
    )  # fmt: skip
    model = GPTModel(config, get_gpt_layer_local_spec(), 32, 8, pg_collection=groups)
    found = []
    dropout = F.dropout

    def recorded(x: torch.Tensor, p: float = 0.5, training: bool = True) -> torch.Tensor:
        mask = dropout(torch.ones_like(x), p, training)
        if p > 0:
            found.append(mask.flatten().tolist())
        return x * mask

    F.dropout = recorded
    try:
        ids = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(0))
        model(ids, torch.arange(8).expand(2, -1))
    finally:
        F.dropout = dropout
    return found


def is_shared(first: list[list[float]], second: list[list[float]]) -> list[bool]:
    assert len(first) == len(second)
    return [mine == theirs for mine, theirs in zip(first, second, strict=True)]


@pytest.mark.flags("--sequence-parallel", "--tensor-model-parallel-size")
def test_masks_of_two_ranks() -> None:
    first, second = run_distributed(masks, 2, 2, False, 0.5)
    assert is_shared(first, second) == [True, *[False, True, True] * LAYERS]
    first, second = run_distributed(masks, 2, 2, True, 0.5)
    assert is_shared(first, second) == [False] * (1 + 3 * LAYERS)
    for rank in (first, second):
        shortest = min(map(len, rank))
        assert len({tuple(mask[:shortest]) for mask in rank}) == len(rank), "no mask begins like another one"


def test_without_attention_dropout_tensor_parallel_masks_are_those_of_one_process() -> None:
    alone = masks(1, False, 0.0)
    assert len(alone) == 1 + 2 * LAYERS
    for rank in run_distributed(masks, 2, 2, False, 0.0):
        assert is_shared(rank, alone) == [True] * len(alone)
