# SPDX-License-Identifier: Apache-2.0
"""Products with their collective inside, by PyTorch's symmetric memory: memory of all GPUs of a machine that each of
them reads and writes over NVLink, without NCCL's kernels, which take processors from the product.

    gather and multiply     Y = gather(X) W     the product of one rank's tokens runs while the next rank's are copied
    multiply and scatter    scatter(X W)        each rank's part is made in memory that this rank reads, and sums up

The same as the chunks of communication_plans.py, with one chunk for each rank. PyTorch runs them on two streams, and
they overlap only where the GPU has several hardware queues. Source: "Introducing Async Tensor Parallelism in PyTorch"
(PyTorch forum, 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.torch_version import TorchVersion

from megatron.core.collectives import all_gather_into_tensor, all_reduce
from megatron.core.device import are_linked, current_device, find_own_gpus, has_several_queues
from megatron.core.process_groups_config import Group, PretendGroup, SingleRankGroup, group_ranks, torch_group

_FIRST_RELEASE = "2.11"
"""Earlier ones want each group to be enabled first, by a function that this one deprecates."""
_TRIED, _TOLERANCE = 128, 2.0**-5
"""Tokens and channels of the operands that are tried, and what bfloat16 may differ by, of the greatest value."""


@dataclass(frozen=True)
class FusedCollectives:
    """Of one group, whose GPUs are all linked."""

    group_name: str

    def gather_and_multiply(self, own: Tensor, matrix: Tensor) -> Tensor:
        """The product of all ranks' tokens: own [s/tp, b, in], matrix [in, out] -> [s, b, out]."""
        _, (output,) = _operations().fused_all_gather_matmul(own, [matrix], 0, self.group_name, return_A=False)
        return _own(output)

    def gather_and_multiply_both(self, own: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """All ranks' tokens, and their product: own [s/tp, b, in], matrix [in, out] -> [s, b, in], [s, b, out]."""
        full, (output,) = _operations().fused_all_gather_matmul(own, [matrix], 0, self.group_name, return_A=True)
        return full, _own(output)

    def multiply_and_scatter(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Our tokens of the ranks' sum of products: x [s, b, in], matrix [in, out] -> [s/tp, b, out]."""
        return _own(_operations().fused_matmul_reduce_scatter(x, matrix, "sum", 0, self.group_name))


def choose_fused_collectives(group: Group) -> FusedCollectives | None:
    """Return the fused collectives of a group whose members have one GPU each on this machine, linked by NVLink, with
    several hardware queues, where they give what their two steps give; None elsewhere. Waits for the group's other
    members: all get the same answer, because ranks that communicate in other ways would wait for each other for ever.
    Asked where layers are made, never in a step."""
    if isinstance(group, SingleRankGroup | PretendGroup):
        return None
    members = torch_group(group)  # not metered: what is counted is what steps send
    if not _agree(can_fuse_collectives(group), members):
        return None
    fused = FusedCollectives(members.group_name)
    return fused if _agree(_works(fused, members), members) else None


def _agree(answer: bool, members: ProcessGroup) -> bool:
    token = torch.full((), int(answer), device=current_device())
    all_reduce(token, members, "min")
    return bool(token.item())


def _works(fused: FusedCollectives, members: ProcessGroup) -> bool:
    """Try each operation on small operands, and compare."""
    rank, size = members.rank(), members.size()
    own, matrix = (
        torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(
            current_device(), torch.bfloat16
        )
        for shape, seed in (((_TRIED, 1, _TRIED), rank), ((_TRIED, _TRIED), size))
    )
    full = own.new_empty(size * _TRIED, 1, _TRIED)
    all_gather_into_tensor(full, own, members)
    product = full @ matrix
    expected = [product, full, product, size * product.float()[rank * _TRIED : (rank + 1) * _TRIED]]
    try:
        found = [fused.gather_and_multiply(own, matrix), *fused.gather_and_multiply_both(own, matrix)]
        found.append(fused.multiply_and_scatter(full, matrix))
    # No memory that all can map, a driver or a build without it.
    except (AttributeError, RuntimeError):
        return False
    return all(
        a.shape == b.shape and bool(((a.float() - b.float()).abs().max() <= _TOLERANCE * b.float().abs().max()).item())
        for a, b in zip(found, expected, strict=True)
    )


def is_new_enough() -> bool:
    """Return whether this PyTorch has them."""
    return TorchVersion(torch.__version__) >= _FIRST_RELEASE


def can_fuse_collectives(group: Group) -> bool:
    """Return whether it is possible as far as this process sees: its environment, its PyTorch, the links that its
    driver tells of."""
    if not has_several_queues() or not is_new_enough():
        return False
    ranks = group_ranks(group)
    gpus = find_own_gpus(ranks, ranks[group.rank()])
    return gpus is not None and are_linked(gpus)


def _own(result: Tensor) -> Tensor:
    # Not a view: readers of an output may overwrite it, which autograd forbids for views.
    tensor: Tensor = torch.ops.aten._unsafe_view(result, result.shape)
    return tensor


def _operations() -> Any:
    # It registers them. Here, because most runs have no use for it.
    import torch.distributed._symmetric_memory

    return torch.ops.symm_mem
