# SPDX-License-Identifier: Apache-2.0
"""Gradients of parts that several tensor-parallel ranks hold whole are summed over those ranks, and only over those."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron.core.distributed.finalize_model_grads import sum_replicated_grads
from megatron.core.mesh import RankGrid
from megatron.core.placement import Part, Placement, Split, make_grouped_parts
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.parallel.harness import distributed


@distributed(world_size=4)
def test_each_part_over_its_holders() -> None:
    """Two groups (4 query rows, a key row) on four ranks: rank r holds two query rows and the key of group r // 2."""
    rank = dist.get_rank()
    groups = ProcessGroupCollection.build(RankGrid(4, tp=4), rank)
    parts = make_grouped_parts(2, [Part(4, name="query"), Part(1, replicated=True, name="key")], 4)
    qkv = Placement("qkv", (10, 3), (Split(0, "tp", 4, rank, parts),))
    row = Placement("row", (3, 8), (Split(1, "tp", 4, rank),))
    grads = [torch.full(placement.local_shape, float(rank + 1)) for placement in (qkv, row)]
    sum_replicated_grads(zip((qkv, row), grads, strict=True), groups)
    summed = 3.0 if rank < 2 else 7.0
    assert grads[0].tolist() == [[rank + 1.0] * 3] * 2 + [[summed] * 3]
    assert grads[1].tolist() == [[rank + 1.0] * 2] * 3
