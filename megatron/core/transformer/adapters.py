# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters (LoRA) of linear layers: y = x W^T + s (x A^T) B^T, where W stays as it was loaded.

A layer whose rows compute several projections has an adapter for each, as peft has: the rows of `linear_in` are their
As one below the other, [projections * rank, in], and a row of `linear_out`, [out, rank], belongs to the projection of
that row of W, in the order in which W has them. So B is cut over tensor-parallel ranks, stored and converted as W is.

    layer       x                     A                        x A^T                          B
    column      all channels          whole on each rank       copied or, with SP, gathered   cut as W
    row         this rank's channels  cut as W                 summed over the ranks          whole on each rank
    replicated  all channels          whole                    as it is                       whole

Source: Hu et al., "LoRA", 2021.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.placement import get_placement
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.parameters import declare_parameter, find_global_name, parameter_dtype
from megatron.core.tensor_parallel.random import model_parallel_stream
from megatron.core.transformer.config_fields.adapters import PROJECTIONS
from megatron.core.transformer.transformer_config import TransformerConfig

Linear = ColumnParallelLinear | RowParallelLinear | ReplicatedLinear

# Names of parts of a packed weight -> the projection that they belong to. A gate of the queries is one with them.
_PART_PROJECTIONS = {
    ("linear_qkv", "query"): "q_proj",
    ("linear_qkv", "gate"): "q_proj",
    ("linear_qkv", "key"): "k_proj",
    ("linear_qkv", "value"): "v_proj",
    ("linear_fc1", "gate"): "gate_proj",
    ("linear_fc1", "up"): "up_proj",
}


class _Weight(nn.Module):
    """A matrix under the name that other programs know: linear_in.weight, linear_out.weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class Adapter(nn.Module):
    """The adapters of one linear layer."""

    def __init__(
        self, layer: Linear, config: TransformerConfig, rows: list[tuple[str, int]], chosen: list[str]
    ) -> None:
        """rows: projection and number of rows of this rank's W, in order. chosen: projections that have an adapter."""
        super().__init__()
        assert config.lora_rank is not None and layer.weight is not None
        self.rank, self.scale, self.dropout = config.lora_rank, config.lora_scale, config.lora_dropout
        self.rows, self.chosen = rows, chosen
        self.is_column, self.is_row = isinstance(layer, ColumnParallelLinear), isinstance(layer, RowParallelLinear)
        self.group = None if isinstance(layer, ReplicatedLinear) else layer.tp_group
        self.splits_tokens = config.sequence_parallel and self.group is not None and self.group.size() > 1
        placement = get_placement(layer.weight, "")
        out_size, in_size = placement.full_shape
        # Of a matrix that every rank has whole, and multiplies with its tokens only.
        partial = placement.partial_grad_axes or (("tp",) if self.splits_tokens else ())
        bound = 1 / math.sqrt(in_size)

        def draw(tensor: Tensor, generator: torch.Generator) -> None:
            tensor.uniform_(-bound, bound, generator=generator)

        dtype = parameter_dtype(config)
        self.linear_in = _Weight(
            declare_parameter(
                (len(chosen) * self.rank, in_size),
                kind="adapter",
                init=draw,
                dtype=dtype,
                splits=placement.splits if self.is_row else (),
                partial_grad_axes=() if self.is_row else partial,
                parallel_dim=1 if self.is_row else None,
            )
        )
        self.linear_out = _Weight(
            declare_parameter(
                (out_size, self.rank),
                kind="adapter",
                dtype=dtype,
                splits=placement.splits if self.is_column else (),
                partial_grad_axes=() if self.is_column else partial,
                parallel_dim=0 if self.is_column else None,
            )
        )
        self._owners: Tensor | None = None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """y + s (x A^T) B^T; x as the layer gets it, y [..., out on this rank] as it leaves."""
        low = F.linear(self._drop(x), self.linear_in.weight)
        if self.is_column:
            enter = gather_from_sequence_parallel_region if self.splits_tokens else copy_to_tensor_model_parallel_region
            low = enter(low, group=self.group)
        elif self.is_row:
            leave = (
                reduce_scatter_to_sequence_parallel_region
                if self.splits_tokens
                else reduce_from_tensor_model_parallel_region
            )
            low = leave(low, group=self.group)
        return y + F.linear(low, self._spread(self.linear_out.weight)) * self.scale

    def _drop(self, x: Tensor) -> Tensor:
        if not (self.training and self.dropout):
            return x
        # Ranks with other channels of the same tokens drop other elements; where ranks have different tokens, each
        # draws from its stream.
        with model_parallel_stream(self.group.size() if self.is_row and self.group and not self.splits_tokens else 1):
            return F.dropout(x, self.dropout)

    @property
    def projections(self) -> list[str]:
        """Parts that the rows of the layer's weight compute, in order of first appearance."""
        return list(dict.fromkeys(name for name, _ in self.rows))

    def _spread(self, weight: Tensor) -> Tensor:
        """B with zeros where a row meets other projections' As: [out, projections * rank]."""
        if len(self.chosen) == 1 and all(name == self.chosen[0] for name, _ in self.rows):
            return weight
        if self._owners is None or self._owners.device != weight.device:
            owners = [
                [name == projection for projection in self.chosen] for name, count in self.rows for _ in range(count)
            ]
            self._owners = torch.tensor(owners, device=weight.device)
        return (weight.unsqueeze(1) * self._owners.unsqueeze(2)).flatten(1)

    def compute_change(self, a: Tensor, b: Tensor) -> Tensor:
        """s B A, what they add to W: [out, in] in float32 or wider. a, b: as linear_in and linear_out hold them."""
        wide = torch.promote_types(a.dtype, torch.float32)
        return self._spread(b).to(wide) @ a.to(wide) * self.scale

    def extra_repr(self) -> str:
        """Projections and rank, for print(model)."""
        return f"{', '.join(self.chosen)}, rank={self.rank}"


def add_adapters(model: nn.Module, config: TransformerConfig) -> None:
    """Give the linear layers that the config names their adapters, if any, and freeze all other parameters. Theirs are
    filled with the model's. A pipeline stage may have none of the layers; the optimizer refuses a model without any.
    """
    if config.lora_rank is None:
        return
    model.requires_grad_(False)
    for path, layer in list(model.named_modules()):
        name = path.rpartition(".")[2]
        if not isinstance(layer, Linear):
            continue
        place = find_global_name(model, path)
        rows = list(_list_rows(name, layer))
        chosen = config.list_adapted(place, tuple(dict.fromkeys(projection for projection, _ in rows)))
        if chosen:
            layer.adapter = Adapter(layer, config, rows, chosen)


def _list_rows(name: str, layer: Linear) -> Iterator[tuple[str, int]]:
    """Yield (projection, number of rows) of a layer's weight on this rank, in order; nothing for a layer that has no
    projection of attention, an MLP or a mixer."""
    usual = next((projection for projection, layers in PROJECTIONS.items() if name in layers), None)
    if usual is None or layer.weight is None:
        return
    for part, _, length in get_placement(layer.weight, "").local_parts():
        # An MLP without a gate has one projection, the one up.
        plain = "up_proj" if name == "linear_fc1" else usual
        yield _PART_PROJECTIONS.get((name, part), plain), length


def get_merged_weight(layer: Any) -> Tensor:
    """Return a layer's weight [out, in] with its adapters in it, for whatever multiplies without the layer."""
    weight, adapter = layer.weight, getattr(layer, "adapter", None)
    if adapter is None:
        return weight
    return weight + adapter.compute_change(adapter.linear_in.weight, adapter.linear_out.weight).to(weight.dtype)
