"""Flat memory for parameters and gradients of one number format.

    param_data   [numel]  parameter.data is a view of it
    grad_data    [numel]  parameter.main_grad is a view of it, at the same place

Zeroing, reducing, clipping and updating then are a few large operations instead of several for each parameter. Gaps
left by the alignment hold zeros in both and stay zero under every update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from megatron.core.collectives import broadcast
from megatron.core.distributed.bucket import Bucket, Reduction
from megatron.core.distributed.buffer_layout import ALIGNMENT, BufferLayout, Slot, lay_out
from megatron.core.flat_ranges import Range, merged
from megatron.core.placement import placement_of
from megatron.core.process_groups_config import Group

NamedParams = Sequence[tuple[str, nn.Parameter]]


class ParamAndGradBuffer:
    """Moves the parameters into flat memory and gives each its `main_grad`.

    named_params: (name in the whole model, parameter), all of one dtype and device, each once; values are kept.
    grad_dtype: number format in which gradients are accumulated and reduced. reduction: how gradients are combined.
    layout: where each parameter lies; every bucket divisible by the shards of the reduction.
    """

    def __init__(
        self,
        named_params: NamedParams,
        grad_dtype: torch.dtype,
        reduction: Reduction,
        layout: BufferLayout | None = None,
    ) -> None:
        first = named_params[0][1]
        self.names = [name for name, _ in named_params]
        self.params = [param for _, param in named_params]
        self.reduction = reduction
        self.is_expert = placement_of(first, self.names[0]).is_expert
        """Weights of experts lie in buffers of their own."""
        self.layout = layout or lay_out(
            [param.numel() for param in self.params],
            [placement_of(param, name).is_vector for name, param in named_params],
            padding=ALIGNMENT * reduction.shards.size(),
        )
        self.dtype, self.device = first.dtype, first.device
        self.starts = [0] * len(self.params)
        """First element of each parameter that lies here, counted in its own flat memory."""
        self.param_data = torch.zeros(self.layout.numel, dtype=first.dtype, device=first.device)
        self.grad_data = torch.zeros(self.layout.numel, dtype=grad_dtype, device=first.device)
        for param, slot in zip(self.params, self.layout.slots, strict=True):
            view = self.view(self.param_data, slot, param.shape)
            view.copy_(param.detach())
            param.data = view
            param.main_grad = self.view(self.grad_data, slot, param.shape)  # type: ignore[attr-defined]
        self.buckets = [
            Bucket(self.grad_data[start:stop], self.param_data[start:stop], reduction)
            for start, stop, _ in self.layout.buckets
        ]

    @property
    def owned(self) -> list[Range]:
        """What this process updates: its slice of every bucket, where the optimizer's state is divided, else all."""
        shards = self.reduction.shards
        slices = []
        for start, stop, _ in self.layout.buckets:
            share = (stop - start) // shards.size()
            slices.append((start + shards.rank() * share, start + (shards.rank() + 1) * share))
        return merged(slices) if shards.size() == 1 else slices

    @property
    def holds_main_params(self) -> bool:
        """Whether these are float32 parameters of which the network uses rounded copies."""
        return False

    @property
    def updates_itself(self) -> bool:
        """Whether the optimizer updates these values also where they are not float32, without main parameters."""
        return False

    def values(self, start: int, stop: int) -> Tensor:
        """Elements of the parameters, inside one of the ranges that are `owned`: a view."""
        return self.param_data[start:stop]

    def bucket_params(self) -> Iterator[tuple[Bucket, list[nn.Parameter]]]:
        """Every bucket with the parameters that lie in it."""
        for bucket, (_, _, indices) in zip(self.buckets, self.layout.buckets, strict=True):
            yield bucket, [self.params[index] for index in indices]

    @staticmethod
    def view(flat: Tensor, slot: Slot, shape: Sequence[int]) -> Tensor:
        """The part of a flat tensor at this place, in the parameter's shape."""
        return flat[slot.start : slot.start + slot.numel].view(tuple(shape))

    def named_views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, part of a flat tensor that is laid out like this buffer, in the parameter's shape)."""
        for name, param, slot in zip(self.names, self.params, self.layout.slots, strict=True):
            yield name, self.view(flat, slot, param.shape)

    def zero_grad(self) -> None:
        """Clear all gradients."""
        self.grad_data.zero_()

    def broadcast_params(self, group: Group) -> None:
        """Replace the parameters by those of the group's first process."""
        broadcast(self.param_data, group)
