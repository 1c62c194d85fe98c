# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters (LoRA) of linear layers: y = x W^T + s (x A^T) B^T, where W stays as it was loaded.

A layer whose rows compute several projections has an adapter for each, as peft has: the rows of `linear_in` are their
As one below the other, [projections * rank, in], and a row of `linear_out`, [out, rank], belongs to the projection of
that row of W, in the order in which W has them. So B is cut over tensor-parallel ranks, stored and converted as W is.

    layer       x                     A                        x A^T                          B
    column      all channels          whole on each rank       copied or, with SP, gathered   cut as W
    row         this rank's channels  cut as W                 summed over the ranks          whole on each rank
    replicated  all channels          whole                    as it is                       whole

With --lora-type dora the rows of the sum also get other lengths: g (W + s B A) with g = (|W| + d) / |W + s B A|, where
| | is the length of a row, for the gradient a constant, and d [out], `magnitude_change`, is trained and begins at zero.
Lengths themselves would have to be measured when W is loaded; and their changes lose nothing in 16 bits.

Sources: Hu et al., "LoRA", 2021; Liu et al., "DoRA", 2024, sections 4.1 and 4.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.collectives import all_reduce
from megatron.core.placement import get_placement
from megatron.core.process_groups_config import Group
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
OnRows = Callable[[Tensor, Tensor], Tensor]

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
        placement = get_placement(layer.weight, "")
        *stack, out_size, in_size = placement.full_shape
        # The outputs' in the weight.
        dim = len(stack)
        self.is_column, self.is_row = placement.parallel_dim == dim, placement.parallel_dim == dim + 1
        self.group: Group | None = getattr(layer, "tp_group", None) if self.is_column or self.is_row else None
        is_divided = self.group is not None and self.group.size() > 1
        self.splits_tokens = config.sequence_parallel and is_divided and not stack
        # Of a matrix that every rank has whole, and multiplies with its tokens only; of experts, with its part of the
        # channels.
        partial = placement.partial_grad_axes or (("tp",) if self.splits_tokens else ())
        partial = ("expt_tp",) if stack and is_divided else partial
        by_expert = tuple(split for split in placement.splits if split.dim < dim)
        inside = tuple(split for split in placement.splits if split.dim >= dim)
        bound = 1 / math.sqrt(in_size)

        def draw(tensor: Tensor, generator: torch.Generator) -> None:
            tensor.uniform_(-bound, bound, generator=generator)

        # Beside the weight, which may have no memory yet.
        common: dict[str, Any] = {
            "kind": "adapter", "dtype": parameter_dtype(config), "device": layer.weight.device
        }  # fmt: skip
        of_outputs = {
            **common,
            "splits": by_expert + (inside if self.is_column else ()),
            "partial_grad_axes": () if self.is_column else partial,
            "parallel_dim": dim if self.is_column else None,
        }
        self.linear_in = _Weight(
            declare_parameter(
                (*stack, len(chosen) * self.rank, in_size),
                **common,
                init=draw,
                splits=by_expert + (inside if self.is_row else ()),
                partial_grad_axes=() if self.is_row else partial,
                parallel_dim=dim + 1 if self.is_row else None,
            )
        )
        self.linear_out = _Weight(declare_parameter((*stack, out_size, self.rank), **of_outputs))
        self.magnitude_change: nn.Parameter | None = None
        if config.lora_type == "dora":
            self.magnitude_change = declare_parameter((*stack, out_size), **of_outputs)
        self._owners: Tensor | None = None

    def forward(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """y + s (x A^T) B^T; x as the layer gets it, y [..., out on this rank] as it leaves, with `bias` added."""
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
        change = F.linear(low, self._spread(self.linear_out.weight)) * self.scale
        if self.magnitude_change is None:
            return y + change
        factor = self._compute_factor(weight, self.linear_in.weight, self.linear_out.weight, self.magnitude_change)
        plain = y if bias is None else y - bias
        # In this form nothing is rounded as long as nothing is learned.
        return y + ((factor - 1) * plain + factor * change).to(y.dtype)

    def _compute_factor(self, weight: Tensor, a: Tensor, b: Tensor, magnitude_change: Tensor) -> Tensor:
        """g: [..., out on this rank] in float32 or wider."""
        with torch.no_grad():
            change = self.compute_change(a, b)
        return self.stretch(magnitude_change, self.measure_rows(weight), self.measure_rows(weight + change))

    def stretch(self, magnitude_change: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """Return g of rows with these lengths: [..., out], 1 for rows of projections without an adapter."""
        # A row of zeros has no direction.
        factor = (before + magnitude_change) / torch.where(after > 0, after, 1)
        if (owners := self._find_owners(factor.device)) is not None:
            factor = torch.where(owners.any(dim=1), factor, 1)
        return factor

    @torch.no_grad()
    def measure_rows(self, weight: Tensor) -> Tensor:
        """Return the lengths of the rows of the whole weight, [..., out on this rank] in float32 or wider."""
        squares = weight.to(torch.promote_types(weight.dtype, torch.float32)).square().sum(dim=-1)
        if self.is_row and self.group is not None:
            all_reduce(squares, self.group)
        return squares.sqrt()

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
        """B with zeros where a row meets other projections' As: [..., out, projections * rank]."""
        owners = self._find_owners(weight.device)
        return weight if owners is None else (weight.unsqueeze(-2) * owners.unsqueeze(-1)).flatten(-2)

    def _find_owners(self, device: torch.device) -> Tensor | None:
        """Return which projection each row belongs to, [out, projections]; None where there is only one."""
        if len(self.chosen) == 1 and all(name == self.chosen[0] for name, _ in self.rows):
            return None
        if self._owners is None or self._owners.device != device:
            owners = [
                [name == projection for projection in self.chosen] for name, count in self.rows for _ in range(count)
            ]
            self._owners = torch.tensor(owners, device=device)
        return self._owners

    def compute_change(self, a: Tensor, b: Tensor) -> Tensor:
        """s B A, what they add to W: [..., out, in] in float32 or wider. a, b: what linear_in and linear_out hold."""
        wide = torch.promote_types(a.dtype, torch.float32)
        return self._spread(b).to(wide) @ a.to(wide) * self.scale

    def merge(self, weight: Tensor, a: Tensor, b: Tensor, magnitude_change: Tensor | None) -> Tensor:
        """Return the weight [..., out, in] with the adapters in it, in its format: rounded once.

        a, b, magnitude_change: as the parameters hold them.
        """
        change = self.compute_change(a, b)
        merged = weight.to(change.dtype) + change
        if magnitude_change is not None:
            factor = self.stretch(magnitude_change, self.measure_rows(weight), self.measure_rows(merged))
            merged = merged * factor.unsqueeze(-1)
        # A small change would be lost in a sum of 16 bits.
        return merged.to(weight.dtype)

    def extra_repr(self) -> str:
        """Projections and rank, for print(model)."""
        return f"{', '.join(self.chosen)}, rank={self.rank}"


class ExpertAdapter(Adapter):
    """The adapters of a linear layer of all local experts: A [experts, projections * rank, in], B [experts, out, rank],
    on rows sorted by expert. With several processes in an expert nothing is exchanged: their outputs are parts of a sum
    already, and so are the gradients of what each of them has whole."""

    def forward(  # type: ignore[override]
        self, x: Tensor, y: Tensor, weight: Tensor, multiply: OnRows, repeat: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """y + s (x A_e^T) B_e^T; x [n, in], y [n, out], weight [experts, out, in].

        multiply: rows [n, k] by a matrix [experts, m, k] for each expert -> [n, m]. repeat: numbers of experts
        [experts, m], for all of their rows -> [n, m].
        """
        # FSDP joins the rows of all experts.
        a, b = (part.weight.view(len(weight), -1, part.weight.shape[-1]) for part in (self.linear_in, self.linear_out))
        change = multiply(multiply(self._drop(x), a), self._spread(b)) * self.scale
        if self.magnitude_change is None:
            return y + change
        factor = repeat(self._compute_factor(weight, a, b, self.magnitude_change.view(len(weight), -1)))
        return y + ((factor - 1) * y + factor * change).to(y.dtype)


def add_adapters(model: nn.Module, config: TransformerConfig) -> None:
    """Give the linear layers that the config names their adapters, if any, and freeze all other parameters. Theirs are
    filled with the model's. A pipeline stage may have none of the layers; the optimizer refuses a model without any.
    """
    if config.lora_rank is None:
        return
    model.requires_grad_(False)
    for path, layer in list(model.named_modules()):
        name = path.rpartition(".")[2]
        if not isinstance(layer, Linear) and not hasattr(layer, "rows_per_expert"):
            continue
        place = find_global_name(model, path)
        rows = list(_list_rows(name, layer))
        chosen = config.list_adapted(place, tuple(dict.fromkeys(projection for projection, _ in rows)))
        if chosen:
            layer.adapter = (Adapter if isinstance(layer, Linear) else ExpertAdapter)(layer, config, rows, chosen)


def _list_rows(name: str, layer: Linear) -> Iterator[tuple[str, int]]:
    """Yield (projection, number of rows) of a layer's weight on this rank, in order; nothing for a layer that has no
    projection of attention, an MLP or a mixer."""
    usual = next((projection for projection, layers in PROJECTIONS.items() if name in layers), None)
    if usual is None or layer.weight is None:
        return
    placement = get_placement(layer.weight, "")
    # Experts that no process divides have parts that their placement need not tell of.
    found = getattr(layer, "output_parts", None) or placement.local_parts(len(placement.full_shape) - 2)
    for part, _, length in found:
        # An MLP without a gate has one projection, the one up.
        plain = "up_proj" if name == "linear_fc1" else usual
        yield _PART_PROJECTIONS.get((name, part), plain), length


def get_merged_weight(layer: Any) -> Tensor:
    """Return a layer's weight [out, in] with its adapters in it, for whatever multiplies without the layer."""
    weight, adapter = layer.weight, getattr(layer, "adapter", None)
    if adapter is None:
        return weight
    merged: Tensor = adapter.merge(
        weight, adapter.linear_in.weight, adapter.linear_out.weight, adapter.magnitude_change
    )
    return merged
