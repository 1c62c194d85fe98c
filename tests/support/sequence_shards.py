# SPDX-License-Identifier: Apache-2.0
"""Sequences that context-parallel ranks divide, put together."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.context_parallel.sharding import to_sequence_order


def join_sequence(shards: list[Tensor], dim: int = 0) -> Tensor:
    """The inverse of `shard_sequence`, from the shards of all ranks in rank order."""
    return to_sequence_order(torch.cat(shards, dim), len(shards), dim)
