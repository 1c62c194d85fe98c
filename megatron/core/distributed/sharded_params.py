# SPDX-License-Identifier: Apache-2.0
"""A buffer for parameters of which this process keeps its shard only (ZeRO-2 and ZeRO-3).

    parameter [rows, ...]      rows 0 .. r-1 on the first of n processes, r .. 2r-1 on the second; r = ceil(rows / n)
    parameter.main_grad        our rows of the gradient, summed over the processes: a view of `grad_data`

The optimizer sees a FlatBuffer (model_chunk.py): places in a flat memory and the ranges that this process
updates. Values stay in the memory that torch gathers them from, so there is no second copy; a view of it is made for
each range. Rows that follow each other are a slice of the parameter's flat memory, which is how checkpoints store them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron.core.collectives import all_reduce
from megatron.core.distributed.bucket import Reduction
from megatron.core.distributed.param_and_grad_buffer import ALIGNMENT, NamedParams, lay_out, view_slot
from megatron.core.flat_ranges import Range
from megatron.core.placement import get_placement
from megatron.core.process_groups_config import Group


class ShardedParamBuffer:
    """Gives every sharded parameter its place, and a `grad` and `main_grad` in flat memory.

    named_params: (name in the whole model, DTensor parameter cut along dimension 0 over `reduction.shards`).
    model_dtype: dtype in which the network computes; where the parameters have another, they are the main parameters.
    grad_dtype: dtype in which gradients are accumulated; the parameters' when None.
    """

    def __init__(
        self,
        named_params: NamedParams,
        reduction: Reduction,
        model_dtype: torch.dtype,
        grad_dtype: torch.dtype | None = None,
    ) -> None:
        self.names = [name for name, _ in named_params]
        self.params = [param for _, param in named_params]
        self.reduction = reduction
        self.is_expert = get_placement(self.params[0]).is_expert
        # fully_shard keeps the shards in the format of the main parameters and casts what it gathers.
        self.is_updated_as_it_is = True
        self.model_dtype = model_dtype
        locals_ = [get_local_shard(param) for param in self.params]
        self.layout = lay_out(
            [shard.numel() for shard in locals_],
            [get_placement(param, name).is_vector for name, param in named_params],
            padding=ALIGNMENT,
        )
        self.dtype, self.device = locals_[0].dtype, locals_[0].device
        self.grad_data = torch.zeros(self.layout.numel, dtype=grad_dtype or self.dtype, device=self.device)
        self.starts = [find_first_element(param, reduction.shards) for param in self.params]
        self.adds_itself = self.grad_data.dtype != self.dtype
        """True if gradients are accumulated here and not by torch, which does it in the parameters' dtype."""
        self.attach_grads()
        for param in self.params if self.adds_itself else ():
            param.register_post_accumulate_grad_hook(_add_to_main_grad)

    @property
    def owned(self) -> list[Range]:
        """Our rows of every parameter: one range each, in the order of the flat memory."""
        return sorted((slot.start, slot.start + slot.numel) for slot in self.layout.slots if slot.numel)

    def values(self, start: int, stop: int) -> Tensor:
        """Elements of one parameter, by their place in the flat memory: a view."""
        for param, slot in zip(self.params, self.layout.slots, strict=True):
            if slot.start <= start and stop <= slot.start + slot.numel:
                return get_local_shard(param).view(-1)[start - slot.start : stop - slot.start]
        raise AssertionError(f"elements [{start}, {stop}) are no part of one parameter")

    def attach_grads(self) -> None:
        """Let torch add gradients into our flat memory, or a hook, where the dtypes differ."""
        for param, slot in zip(self.params, self.layout.slots, strict=True):
            assert isinstance(param, DTensor)
            shard = view_slot(self.grad_data, slot, get_local_shard(param).shape)
            param.main_grad = shard  # type: ignore[attr-defined]
            if self.adds_itself:
                continue
            # Unchecked: the check would be a collective for each parameter.
            param.grad = DTensor.from_local(
                shard, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
            )

    def collect_grads(self) -> None:
        """Fetch a gradient that torch has put into other memory instead."""
        for param in () if self.adds_itself else self.params:
            assert isinstance(param.grad, DTensor)
            found = param.grad.to_local()
            # torch may give a parameter a new gradient instead of adding to the one that is attached.
            if found.data_ptr() != param.main_grad.data_ptr():  # type: ignore[attr-defined]
                param.main_grad.copy_(found)  # type: ignore[attr-defined]
                self.attach_grads()

    def gather_whole(self, shards: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(name, all rows of a tensor of which each process has its shard, flat or not); every process calls this."""
        for name, param, start, shard in zip(self.names, self.params, self.starts, shards, strict=True):
            # A sum in which everyone else has zeros gathers shards of unequal lengths, too.
            whole = torch.zeros(param.numel(), dtype=shard.dtype, device=shard.device)
            whole[start : start + shard.numel()] = shard.reshape(-1)
            all_reduce(whole, self.reduction.shards)
            yield name, whole.view(get_placement(param).local_shape)

    def zero_grad(self) -> None:
        """Clear all gradients."""
        self.grad_data.zero_()


def _add_to_main_grad(param: Tensor) -> None:
    """After torch has summed a gradient over the processes: add our rows, and keep no second copy."""
    assert isinstance(param.grad, DTensor)
    param.main_grad.add_(param.grad.to_local())  # type: ignore[attr-defined]
    param.grad = None


def get_local_shard(param: nn.Parameter) -> Tensor:
    """This process's rows, as plain memory that is shared with the parameter."""
    detached = param.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def find_first_element(param: nn.Parameter, shards: Group) -> int:
    """Return where this process's rows begin in the parameter's flat memory."""
    rows = param.shape[0]
    # As fully_shard cuts, like torch.chunk: the last processes may have fewer rows, or none.
    rows_per_process = -(-rows // shards.size())
    return min(rows, shards.rank() * rows_per_process) * (param.numel() // max(rows, 1))
