# SPDX-License-Identifier: Apache-2.0
"""The MLP of a transformer layer: widen, activate, narrow.

plain    y = act(x W1^T + b1) W2^T + b2
gated    y = (act(x Wg^T) * (x Wu^T)) W2^T        Wg and Wu are one matrix: fc1 = (gate | up)     Shazeer, 2020
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron.core.activations import (
    Activation,
    adds_bias_in_place,
    find_activation,
)
from megatron.core.operation_table import OperationWay
from megatron.core.placement import Part, make_grouped_parts
from megatron.core.process_groups_config import Group, ProcessGroupCollection
from megatron.core.taken_arguments import take_arguments
from megatron.core.tensor_parallel.kept_activations import Recomputed, keep_as
from megatron.core.tensor_parallel.layers import LayerOutput
from megatron.core.tensor_parallel.offloaded_activations import hold
from megatron.core.transformer.compiled_regions import Compile, choose_form
from megatron.core.transformer.initialisers import input_initialiser, output_initialiser
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

# Put here by a table of upstream's names; declared for type checkers.
apply_swiglu_sharded_factory: Any

Activate = Callable[[Tensor, Tensor | None, Activation], Tensor]
"""(x [..., f], gated [..., 2 f], its bias or None, activation) -> [..., f]."""


@dataclass
class MLPSubmodules:
    """The parts of an MLP: specs or classes."""

    linear_fc1: Any
    linear_fc2: Any


def choose_activate(config: TransformerConfig, device: torch.device | None = None) -> OperationWay:
    """Choose a way of computing (fc1's output [s, b, f], its bias [f] or None, activation) -> fc2's input."""
    # A user's callable has no hand-written derivative; it runs from elementary operations instead.
    known = build_activation(config).backward_ is not None
    name, is_fused = "gated activation" if config.gated_linear_unit else "activation", config.bias_activation_fusion
    return choose_form(config, name, is_fused=is_fused and known, region="activation", device=device).way


def build_activation(config: TransformerConfig, interleave_size: int | None = None) -> Activation:
    """Build the activation that the config names, with its clamp and offset. interleave_size: see Activation."""
    found, factor = find_activation(config.activation_func), config.activation_input_multiplier
    if factor != 1.0:
        function = found.forward
        found = dataclasses.replace(
            found, name=f"{found.name} of {factor} x", forward=lambda x: function(x * factor), backward_=None
        )
    # A copy: the table's entries are shared by all models of the process.
    return dataclasses.replace(
        found,
        clamp_value=config.activation_func_clamp_value,
        linear_offset=config.glu_linear_offset,
        interleave_size=interleave_size,
    )


def list_gate_and_up(width: int, interleave_size: int | None, num_shards: int) -> tuple[Part, ...]:
    """List the parts of a gated layer's outputs, `width` each of gate and up: two, or blocks that take turns.

    num_shards: ranks that share the layer. Each has the gate of what it has of up.
    """
    if interleave_size is None:
        return Part(width, name="gate"), Part(width, name="up")
    blocks = (Part(interleave_size, name="gate"), Part(interleave_size, name="up"))
    return make_grouped_parts(width // interleave_size, blocks, num_shards)


class MLP(MegatronModule):
    """[s, b, h] -> [s, b, h] and the bias that is still to be added."""

    recomputable: ClassVar[Mapping[str, tuple[str, ...]]] = {"mlp_act": ("mlp",)}

    @take_arguments("* name=...")
    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        is_expert: bool = False,
        input_size: int | None = None,
        ffn_hidden_size: int | None = None,
        tp_group: Group | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        interleave_size: int | None = None,
    ) -> None:
        """is_expert: a single expert, built by a user's program. input_size, ffn_hidden_size: width of the input, and
        inner width; the config's when None. tp_group: the ranks that share it; pg_collection's when None.
        interleave_size: channels of a gate's block, see Activation."""
        super().__init__(config)
        if tp_group is None:
            groups = pg_collection if pg_collection is not None else ProcessGroupCollection.current()
            tp_group = groups.expt_tp if is_expert else groups.tp
        inputs = config.hidden_size if input_size is None else input_size
        width = config.ffn_hidden_size if ffn_hidden_size is None else ffn_hidden_size
        assert width is not None and inputs is not None
        # Only where it says something: a user's own layers need not know it.
        divided: dict[str, Any] = {"tp_group": tp_group} | ({"is_expert": True} if is_expert else {})
        self.activation = build_activation(config, interleave_size)
        way = choose_activate(config)
        self.activate: Activate = way.load()
        self.is_fused = way.is_fused
        # One matrix (gate | up) is one product.
        gated = config.gated_linear_unit
        self.linear_fc1 = build_module(
            submodules.linear_fc1,
            inputs,
            2 * width if gated else width,
            config=config,
            init_method=input_initialiser(config),
            bias=config.add_bias_linear or config.add_mlp_bias,
            skip_bias_add=True,  # added by the activation
            parts=list_gate_and_up(width, interleave_size, tp_group.size()) if gated else None,
            **divided,
        )
        self.linear_fc2 = build_module(
            submodules.linear_fc2,
            width,
            config.hidden_size,
            config=config,
            init_method=output_initialiser(config),
            bias=config.add_bias_linear or config.add_mlp_bias,
            skip_bias_add=True,  # added with dropout and residual
            **divided,
        )

    def compile_regions(self, compiled: Compile[Any]) -> None:
        """See compiled_regions.py."""
        if not self.is_fused:
            self.activate = compiled(self.activate)

    def forward(self, hidden_states: Tensor) -> LayerOutput:
        """Hidden states [s, b, h] -> (output [s, b, h], bias [h] or None, which the caller adds)."""
        with self.offload("mlp_fc1"):
            intermediate, bias = self.linear_fc1(hidden_states)  # [s, b, f / tp], gated [s, b, 2 f / tp]
        with self.offload("mlp_act"):
            # The bias is handed over, so that the fused form adds it in the same pass and keeps the sum only once.
            activated = self.activate(intermediate, bias, self.activation)  # [s, b, f / tp]
            if "mlp_act" not in self.recomputed:
                output: LayerOutput = self.linear_fc2(activated)
                return output
            # What is in the product's memory now is the product, or already the sum.
            again = None if self.is_fused and adds_bias_in_place(intermediate, bias) else bias
            get_input = hold("mlp_act", intermediate)
            compute = Recomputed(lambda: self.activate(get_input(), again, self.activation))
            with keep_as(activated, compute):
                return self.linear_fc2(activated)
