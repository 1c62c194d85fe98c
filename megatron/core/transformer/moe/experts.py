# SPDX-License-Identifier: Apache-2.0
"""The experts of a layer that this process has: MLPs of one shape, their weights stacked.

    y_e = act(x W1_e^T + b1_e) W2_e^T + b2_e       for the rows of each expert e, times the row's weight

With --moe-apply-probs-on-input it is x that the row's weight multiplies (Llama 4).

Weights [experts, out, in] are cut over the expert-parallel group by expert, and inside an expert over the
expert-tensor-parallel group as column and row layers cut theirs. The caller sums what the latter's processes give.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megatron.core.activations import Activation, bias_gated_activation, weighted_squared_relu
from megatron.core.placement import Part, Split
from megatron.core.process_groups_config import Group, ProcessGroupCollection
from megatron.core.stacked_parameters import bind_parts, tie_parts, use_parts
from megatron.core.tensor_parallel.kept_activations import RecomputedTogether, keep_as
from megatron.core.tensor_parallel.offloaded_activations import hold, offload
from megatron.core.tensor_parallel.parameters import (
    Initialiser,
    declare_parameter,
    draw_values,
    parameter_dtype,
    zeros,
)
from megatron.core.tensor_parallel.products import multiply
from megatron.core.transformer.compiled_regions import Compile
from megatron.core.transformer.initialisers import input_initialiser, output_initialiser
from megatron.core.transformer.mlp import (
    Activate,
    build_activation,
    choose_activate,
    list_gate_and_up,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.grouped_products import choose_expert_product
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.weight_names import WeightNames, divide_layer

# Put here by a table of upstream's names; declared for type checkers.
SequentialMLP: Any
TEGroupedMLP: Any


def for_each_expert(init: Initialiser) -> Initialiser:
    """The same distribution for each matrix of a stack [experts, out, in], as if it were separate: Xavier's depends on
    the shape of a matrix."""

    def fill(stack: Tensor, generator: torch.Generator) -> None:
        for number, matrix in enumerate(stack):
            draw_values(init, matrix, generator, generator.initial_seed() + number)

    return fill


class ExpertLinear(nn.Module):
    """y_e = x W_e^T for the rows of each local expert; `bias` is [experts, out] or None, and is left to the caller.

    splits: how the process holds the weight [experts, out, in]; tp_group: the processes that share an expert.
    output_parts: (name, start, length) of the parts of this process's outputs; the whole when None.
    """

    def __init__(
        self,
        num_experts: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Initialiser,
        splits: tuple[Split, ...],
        tp_group: Group,
        parallel_dim: int | None = None,
        output_parts: list[tuple[str, int, int]] | None = None,
    ) -> None:
        super().__init__()
        self.tp_group, self.output_parts = tp_group, output_parts
        dtype = parameter_dtype(config)
        shape = (num_experts, output_size, input_size)
        self.weight = declare_parameter(
            shape, init=for_each_expert(init_method), dtype=dtype, splits=splits, parallel_dim=parallel_dim
        )
        self.rows_per_expert = self.weight.shape[1]
        self.bias = None
        if config.add_bias_linear:
            # A bias [experts, out] has no input dimension: a split of it (dimension 2) leaves the bias whole.
            of_rows = [split for split in splits if split.dim < 2]
            self.bias = declare_parameter(
                shape[:2], kind="vector", init=zeros, dtype=dtype, splits=of_rows,
                parallel_dim=1 if parallel_dim == 1 else None,
            )  # fmt: skip
        widths = (self.weight.shape[2], self.weight.shape[1])
        self._choose = functools.partial(choose_expert_product, config, widths, dtype)
        self.product = self._choose(self.weight.device)
        self._choose_for = functools.cache(functools.partial(choose_expert_product, config, dtype=dtype))
        self.adapter: nn.Module | None = None
        # Which kernels take such weights is known on the device that they will be on.
        self._chosen_without_device = self.product if self.weight.is_meta else None

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Rows [n, in] sorted by expert -> [n, out]; ends: [local experts] int32, where each one's rows end."""
        # FSDP, which divides rows, joins the rows of all experts: [experts x out, in].
        weight = use_parts(self.weight)
        weight = weight if weight.dim() == 3 else weight.unflatten(0, (-1, self.rows_per_expert))
        if self._chosen_without_device is not None and not weight.is_meta:
            # Unless layers in 8 bits have put theirs in its place.
            if self.product is self._chosen_without_device:
                self.product = self._choose(weight.device)
            self._chosen_without_device = None
        output = multiply(self.product, x, weight, ends=ends)
        if self.adapter is None:
            return output

        def multiply_rows(rows: Tensor, matrices: Tensor) -> Tensor:
            product = self._choose_for((matrices.shape[2], matrices.shape[1]), device=matrices.device)
            return multiply(product, rows, matrices, ends=ends)

        adapted: Tensor = self.adapter(x, output, weight, multiply_rows, lambda of: _repeat(of, ends, len(x)))
        return adapted

    def repeat_bias(self, ends: Tensor, rows: int) -> Tensor:
        """Repeat each expert's bias for all of its rows: -> [n, out]."""
        assert self.bias is not None
        return _repeat(use_parts(self.bias).view(-1, self.rows_per_expert), ends, rows)


def _repeat(values: Tensor, ends: Tensor, rows: int) -> Tensor:
    """Repeat what each expert has, [experts, k], for all of its rows: -> [rows, k]."""
    return values.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)), dim=0, output_size=rows)


class Experts(MegatronModule):
    """Rows [n, h], sorted by expert, and their weights [n] -> weighted outputs [n, h]; with several processes in an
    expert, this one's part of the sum."""

    recomputable: ClassVar[Mapping[str, tuple[str, ...]]] = {"moe_act": ("moe",)}

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config)
        number, width, inner = config.num_moe_experts, config.expert_channels, config.moe_ffn_hidden_size
        assert number is not None and inner is not None
        self.activation = build_activation(config, config.moe_mlp_glu_interleave_size)
        way = choose_activate(config)
        self.activate: Activate = way.load()
        self.is_fused = way.is_fused
        self.weighs_input = config.moe_apply_probs_on_input
        fused_gate = config.gated_linear_unit and way.is_fused
        self.fuses_weights = config.use_fused_weighted_squared_relu or fused_gate
        self.weigh = weigh_activated
        ep, etp = pg_collection.ep, pg_collection.expt_tp
        self.adds_bias = etp.rank() == 0
        # Named also in a group of one: by this axis the engine knows experts' gradients, which it sums over other ranks
        # than the other layers' gradients.
        by_expert = Split(0, "ep", ep.size(), ep.rank())
        gated = config.gated_linear_unit
        parts = list_gate_and_up(inner, config.moe_mlp_glu_interleave_size, etp.size()) if gated else None
        self.linear_fc1 = ExpertLinear(
            number,
            width,
            2 * inner if gated else inner,
            config=config,
            init_method=input_initialiser(config),
            splits=(by_expert, *_inside(1, etp, parts)),
            tp_group=etp,
            parallel_dim=1,
            output_parts=Split(1, "etp", etp.size(), etp.rank(), parts).local_parts(2 * inner) if gated else None,
        )
        self.linear_fc2 = ExpertLinear(
            number,
            inner,
            width,
            config=config,
            init_method=output_initialiser(config),
            splits=(by_expert, *_inside(2, etp)),
            tp_group=etp,
            parallel_dim=2,
        )

    def show_experts(self, names: WeightNames) -> None:
        """Show each local expert's weights as separate parameters, views of the stacks, under upstream's names."""
        layers = {"linear_fc1": self.linear_fc1, "linear_fc2": self.linear_fc2}
        if names == "engine":
            for layer in layers.values():
                divide_layer(layer, [layer] * len(layer.weight), numbers=True)
            return
        self.local_experts = nn.ModuleList(
            nn.ModuleDict({name: nn.Module() for name in layers}) for _ in self.linear_fc1.weight
        )
        for name, layer in layers.items():
            divide_layer(layer, [expert.get_submodule(name) for expert in self.local_experts], numbers=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Another device or dtype, for what is stored; what is shown of it follows."""
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for stack in (*vars(self.linear_fc1).values(), *vars(self.linear_fc2).values()):
            if isinstance(stack, nn.Parameter):
                stack.data = fn(stack.data)
                bind_parts(stack)
        return result

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy: parameters come without their attributes."""
        super().__setstate__(state)
        shown = [*self.local_experts] if hasattr(self, "local_experts") else []
        for name, layer in (("linear_fc1", self.linear_fc1), ("linear_fc2", self.linear_fc2)):
            for kind, stack in vars(layer).items():
                if isinstance(stack, nn.Parameter):
                    parts = [getattr(e[name], kind) for e in shown] or [
                        getattr(layer, f"{kind}{index}") for index in range(len(stack))
                    ]
                    tie_parts(stack, parts)

    def compile_regions(self, compiled: Compile[Any]) -> None:
        """See compiled_regions.py."""
        if not self.is_fused:
            # With its weight one region; where backward computes it again, only the activation is one.
            self.weigh = compiled(self.weigh)
            self.activate = compiled(self.activate) if "moe_act" in self.recomputed else self.activate

    def forward(self, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """Rows [n, h] sorted by expert, weights [n] -> weighted outputs [n, h]; ends: [local experts] int32."""
        weights = weights.unsqueeze(-1)
        if self.weighs_input:
            rows, weights = (rows * weights).to(rows.dtype), torch.ones_like(weights)
        # The bias is added outside the activation's fused form, which takes one bias for all rows.
        with offload("expert_fc1"):
            intermediate = self.linear_fc1(rows, ends)  # [n, f / etp], gated [n, 2 f / etp]
        if self.linear_fc1.bias is not None:
            intermediate = intermediate + self.linear_fc1.repeat_bias(ends, len(rows))
        with offload("moe_act"):
            output = self._activate_and_multiply(intermediate, weights, ends)
        if self.linear_fc2.bias is not None:
            # y_e is weighted with its bias: the weight belongs to the expert's output, not only to the product.
            bias = self.linear_fc2.repeat_bias(ends, len(rows))
            if self.adds_bias:
                return output + (bias * weights).to(rows.dtype)
            # Another process adds it to the sum, and has the weights' gradient; the bias's gradient is the same
            # everywhere.
            bias = (bias * weights.detach()).to(rows.dtype)
            return output + (bias - bias.detach())
        return output

    def _activate_and_multiply(self, intermediate: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """The second half of the experts: [n, f / etp], gated [n, 2 f / etp], and weights [n, 1] -> [n, h]."""
        if self.fuses_weights:
            return self._weigh_in_one_operation(intermediate, weights, ends)
        if "moe_act" not in self.recomputed:
            # The product is linear: its input weighted is its output weighted, which then need not be kept.
            return self.linear_fc2(self.weigh(self.activate, intermediate, weights, self.activation), ends)
        activated = self.activate(intermediate, None, self.activation)  # [n, f / etp]

        get_input = hold("moe_act", intermediate)

        def compute() -> tuple[Tensor, Tensor]:
            before = get_input()
            again = self.activate(before, None, self.activation)
            return again, (again * weights).to(before.dtype)

        together = RecomputedTogether(compute)
        with keep_as(activated, together.way(0)):
            weighted = (activated * weights).to(intermediate.dtype)
        with keep_as(weighted, together.way(1)):
            output: Tensor = self.linear_fc2(weighted, ends)
        return output

    def _weigh_in_one_operation(self, intermediate: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """See _activate_and_multiply."""
        weighted = self._activate_and_weigh(intermediate, weights)
        if "moe_act" not in self.recomputed:
            output: Tensor = self.linear_fc2(weighted, ends)
            return output
        get_input = hold("moe_act", intermediate)
        together = RecomputedTogether(lambda: (self._activate_and_weigh(get_input(), weights),))
        with keep_as(weighted, together.way(0)):
            return self.linear_fc2(weighted, ends)

    def _activate_and_weigh(self, intermediate: Tensor, weights: Tensor) -> Tensor:
        """[n, f / etp], gated [n, 2 f / etp], and weights [n, 1] -> [n, f / etp]; keeps only what it is given."""
        if self.config.gated_linear_unit:
            return bias_gated_activation(intermediate, None, self.activation, weights)
        return weighted_squared_relu(intermediate, weights)


def weigh_activated(activate: Activate, x: Tensor, weights: Tensor, activation: Activation) -> Tensor:
    """activate(x) times the weight of each row; x [n, f], gated [n, 2 f], weights [n, 1] -> [n, f] in x's format."""
    return (activate(x, None, activation) * weights).to(x.dtype)


def _inside(dim: int, group: Group, parts: tuple[Part, ...] | None = None) -> tuple[Split, ...]:
    """Return how a dimension of each expert is split over the ranks that share it; not at all in a group of one."""
    return () if group.size() == 1 else (Split(dim, "etp", group.size(), group.rank(), parts),)
