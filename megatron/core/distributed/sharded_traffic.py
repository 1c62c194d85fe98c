"""Counts what torch's fully_shard sends, where traffic is counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.collectives import Handle, all_gather_into_tensor, reduce_scatter_tensor
from megatron.core.distributed.bucket import Reduction
from megatron.core.process_groups_config import MeteredGroup


def count_traffic(part: Any, reduction: Reduction) -> None:
    """Let an FSDPModule communicate over groups that count: those that it divides and copies parameters over."""
    shards, copies = reduction.shards, reduction.copies
    if isinstance(shards, MeteredGroup):
        part.set_custom_all_gather(_CountedGather(shards))
        part.set_custom_reduce_scatter(_CountedSum(shards))
    if isinstance(copies, MeteredGroup):
        part.set_all_reduce_hook(_CountedCopies(copies))


class _Counted:
    """What torch asks for memory, and then to communicate."""

    def __init__(self, group: MeteredGroup) -> None:
        self.group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory to send from or to receive into."""
        return torch.empty(*size, dtype=dtype, device=device)


class _CountedGather(_Counted):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Handle | None:
        return all_gather_into_tensor(output_tensor, input_tensor, self.group, async_op)


class _CountedSum(_Counted):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Handle | None:
        assert op == dist.ReduceOp.SUM, f"{op}: sums are forced"
        return reduce_scatter_tensor(output_tensor, input_tensor, self.group, "sum", async_op)


class _CountedCopies:
    """Called with what torch has summed over the copies."""

    def __init__(self, group: MeteredGroup) -> None:
        self.group = group

    def __call__(self, summed: Tensor) -> None:
        self.group.traffic.add(self.group.axis, "all_reduce", summed.nbytes, self.group.size())
