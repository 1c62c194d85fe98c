# SPDX-License-Identifier: Apache-2.0
"""Parameters counted from their placements: right for every model, since each parameter says what it is.

A plan builds its chunks on the meta device, which takes neither memory nor random numbers, as any rank of a grid that
does not exist:

    config.model.init_model_with_meta_device = True
    chunk = build_gpt_model(config, rows, pg_collection=ProcessGroupCollection.pretend(grid, rank))
    count_on_rank([chunk]).total

The formula of memory.py counts the reference system's way (without biases and positions) and stays for its figures.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from megatron.core.placement import Kind, Placement, get_placement
from megatron.core.stacked_parameters import list_parameters


@dataclass(frozen=True)
class PlacedCounts:
    """Elements by kind; every row of padding counts."""

    dense: Mapping[Kind, int]
    of_experts: Mapping[Kind, int]

    @property
    def total(self) -> int:
        """Elements of all kinds, inside experts and outside."""
        return sum(self.dense.values()) + sum(self.of_experts.values())

    def count_active(self, chosen: int, experts: int) -> int:
        """Return what works on one token, of which the router gives each to `chosen` of so many experts (rounded
        down)."""
        return sum(self.dense.values()) + sum(self.of_experts.values()) * chosen // experts

    def __getitem__(self, kind: Kind) -> int:
        """Elements of this kind outside of experts."""
        return self.dense.get(kind, 0)


def count_whole(placements: Iterable[Placement]) -> PlacedCounts:
    """Elements of the whole model of which these are the placements, on whatever ranks: each name once, no copies."""
    # Shards and replicas of one parameter carry the same name.
    by_name = {placement.name: placement for placement in placements if not placement.is_copy}
    return _count((placement, math.prod(placement.full_shape)) for placement in by_name.values())


def count_on_rank(chunks: Iterable[nn.Module]) -> PlacedCounts:
    """Elements that the process with these chunks holds, copies of tied embeddings among them; where parameters are
    divided over replicas (fully sharded), of all replicas together."""
    # By local shapes, because copies and replicated parts take memory on every rank that holds them.
    placements = (get_placement(param, name) for chunk in chunks for name, param in list_parameters(chunk))
    return _count((placement, math.prod(placement.local_shape)) for placement in placements)


def _count(entries: Iterable[tuple[Placement, int]]) -> PlacedCounts:
    dense: Counter[Kind] = Counter()
    of_experts: Counter[Kind] = Counter()
    for placement, elements in entries:
        assert placement.kind is not None, "a placement always has a kind"
        (of_experts if placement.is_expert else dense)[placement.kind] += elements
    return PlacedCounts(dict(dense), dict(of_experts))
