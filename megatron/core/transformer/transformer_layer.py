# SPDX-License-Identifier: Apache-2.0
"""One transformer layer: residual branches, each a part between its norms, added to the residual stream x.

    pre-norm                x = x + attention(norm(x));               x = x + mlp(norm(x))
    norm_placement output   x = x + norm(attention(x));               x = x + norm(mlp(x))
    norm_placement both     x = x + norm(attention(norm(x)));         x = x + norm(mlp(norm(x)))
    parallel_residual       x = x + attention(norm(x)) + mlp(norm'(x))

with dropout on what is added. Sources: Xiong et al., 2020 (pre-norm); OLMo 2, 2025, section 3.3 (output); Ding et al.,
2021, section 3.1 (both, sandwich norm); GPT-J, 2021 and GPT-NeoX, 2022, section 2.1 (parallel).

A branch is `ResidualBranch.add`: enter (norm), body, leave (norm, dropout, sum). What surrounds the formula in a run is
chosen by Execution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.core.errors import ConfigError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.compiled_regions import Compile
from megatron.core.transformer.execution.branch_runner import Runner
from megatron.core.transformer.execution.execution import Execution
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.layer_patterns import has_experts
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.residual_branch import ResidualBranch
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class TransformerLayerSubmodules:
    """The parts of a layer: specs or classes. Of the norms those are built that norm_placement asks for. A layer of one
    branch has either attention or an MLP."""

    input_layernorm: Any = None
    self_attention: Any = None
    pre_mlp_layernorm: Any = None
    mlp: Any = None
    post_self_attn_layernorm: Any = None
    post_mlp_layernorm: Any = None
    moe: Any = None
    """What takes the place of `mlp` in layers with experts."""


class TransformerLayer(MegatronModule):
    """Attention and MLP with their norms, each added to the residual stream: [s, b, h] -> [s, b, h]."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
        expected_config: Mapping[str, Any] | None = None,
        execution_type: type[Execution] = Execution,
    ) -> None:
        """layer_number: this layer in the whole model, counted from 1. expected_config: fields of the config that the
        layer's spec was made for; raises ConfigError where the config has other values. execution_type: who chooses
        what surrounds the formula."""
        super().__init__(config)
        for name, value in (expected_config or {}).items():
            if getattr(config, name) != value:
                raise ConfigError(
                    f"the layer spec was made with {name} {value!r}, the config says {getattr(config, name)!r}; "
                    f"give TransformerConfig({name}={value!r})"
                )
        self.execution = execution_type(config)
        groups = pg_collection if pg_collection is not None else ProcessGroupCollection.current()
        self.layer_number = layer_number
        branches = []
        # In the order of forward: gradient buckets follow the order of construction, and fill up in backward from the
        # end.
        if submodules.self_attention is not None:
            self.input_layernorm = self._norm(submodules.input_layernorm, "input")
            self.self_attention = build_module(
                submodules.self_attention, config=config, layer_number=layer_number, pg_collection=groups
            )
            self.post_self_attn_layernorm = self._norm(submodules.post_self_attn_layernorm, "output")
            names = ("input_layernorm", "self_attention", "post_self_attn_layernorm")
            branches.append(ResidualBranch(config, self._modules, "attention", names))
        if submodules.mlp is not None or submodules.moe is not None:
            self.pre_mlp_layernorm = self._norm(submodules.pre_mlp_layernorm, "input")
            is_dense = not has_experts(config, layer_number)
            if is_dense:
                self.mlp = build_module(submodules.mlp, config=config, pg_collection=groups)
            elif submodules.moe is not None:
                self.mlp = build_module(submodules.moe, config=config, layer_number=layer_number, pg_collection=groups)
            else:
                raise ConfigError("--num-experts needs a layer with experts; let the spec's layer have a part `moe`")
            self.post_mlp_layernorm = self._norm(submodules.post_mlp_layernorm, "output")
            names = ("pre_mlp_layernorm", "mlp", "post_mlp_layernorm")
            branches.append(ResidualBranch(config, self._modules, "mlp" if is_dense else "moe", names))
        self.branches = tuple(branches)
        self.runners: Sequence[Runner] = ()
        self.execution.equip(self, groups)

    def forward(self, hidden_states: Tensor, *inputs: Any, **named: Any) -> Tensor:
        """[s, b, h] -> [s, b, h]; inputs: the fields of LayerInputs."""
        layer_inputs = LayerInputs(*inputs, **named)
        for add in self.runners:
            hidden_states = add(hidden_states, layer_inputs)
        return hidden_states

    def compile_regions(self, compiled: Compile[Any]) -> None:
        """See compiled_regions.py."""
        for branch in self.branches:
            branch.compile_regions(compiled)

    def _norm(self, submodule: Any, place: str) -> Any:
        """The norm at the `input` or `output` of a branch; None where the config has none."""
        if submodule is None or self.config.norm_placement not in (place, "both"):
            return None
        return build_module(submodule, self.config, self.config.hidden_size)
