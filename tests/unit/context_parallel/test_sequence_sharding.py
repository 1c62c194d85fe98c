# SPDX-License-Identifier: Apache-2.0
"""The zigzag split of sequences over context-parallel ranks: shards, orders, balance, batches."""

from __future__ import annotations

import pytest
import torch

from megatron.core.context_parallel.sharding import (
    get_batch_on_this_cp_rank,
    list_positions_of_rank,
    shard_sequence,
    to_rank_order,
    to_sequence_order,
)
from megatron.core.errors import ConfigError
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from tests.support.pretend_groups import pretend
from tests.support.sequence_shards import join_sequence


def test_the_split_by_example() -> None:
    shards = [shard_sequence(torch.arange(16), rank, 4).tolist() for rank in range(4)]
    assert shards == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_joining_undoes_the_split(size: int, dim: int) -> None:
    whole = torch.arange(2 * size * 2 * size * 2 * size * 3).view(2 * size, 2 * size, 6 * size)
    shards = [shard_sequence(whole, rank, size, dim) for rank in range(size)]
    assert torch.equal(join_sequence(shards, dim), whole)
    gathered = torch.cat(shards, dim)
    assert torch.equal(to_sequence_order(gathered, size, dim), whole)
    assert torch.equal(to_rank_order(whole, size, dim), gathered)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_causal_work_is_balanced(size: int) -> None:
    """Every rank's queries see equally many keys."""
    work = {int((list_positions_of_rank(24 * size, rank, size) + 1).sum()) for rank in range(size)}
    assert len(work) == 1


def test_a_batch_is_cut_along_its_queries() -> None:
    length, size = 8, 2
    row = torch.arange(length).expand(3, -1)
    mask = torch.ones(length, length, dtype=torch.bool).triu(1).expand(3, 1, -1, -1)
    batch = {"tokens": row + 100, "position_ids": row, "attention_mask": mask, "cu_seqlens": torch.zeros(3, 9)}
    cut = get_batch_on_this_cp_rank(batch, pretend(1, cp=size).cp)
    assert cut["position_ids"][0].tolist() == [2, 3, 4, 5]
    assert cut["tokens"].shape == (3, 4)
    assert cut["tokens"][2].tolist() == [102, 103, 104, 105]
    assert torch.equal(cut["attention_mask"], mask[:, :, 2:6])
    assert cut["cu_seqlens"] is batch["cu_seqlens"]
    assert get_batch_on_this_cp_rank(batch, pretend(0, cp=1).cp) == batch


def test_angles_are_those_of_the_positions() -> None:
    embedding = RotaryEmbedding(8, 1.0)
    whole = embedding.build_rotation(12)
    for rank in range(3):
        own = embedding.build_rotation(12, cp_group=pretend(rank, cp=3).cp)
        positions = list_positions_of_rank(12, rank, 3)
        assert torch.equal(own.cos, whole.cos[positions])
        assert torch.equal(own.sin, whole.sin[positions])


def test_a_length_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"10 tokens .* 2 x --context-parallel-size 2 .*use 8 or 12 tokens"):
        shard_sequence(torch.arange(10), 0, 2)
