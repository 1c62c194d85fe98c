# SPDX-License-Identifier: Apache-2.0
"""One transformer layer: residual branches, each a part between its norms, added to the residual stream x.

    pre-norm                x = x + attention(norm(x));               x = x + mlp(norm(x))
    norm_placement output   x = x + norm(attention(x));               x = x + norm(mlp(x))
    norm_placement both     x = x + norm(attention(norm(x)));         x = x + norm(mlp(norm(x)))
    hyper-connections       several streams in place of x (hyper_connections.py)
    parallel_residual       x = x + attention(norm(x)) + mlp(norm'(x)), with one norm where they share it

with dropout on what is added. Sources: Xiong et al., 2020 (pre-norm); OLMo 2, 2025, section 3.3 (output); Ding et al.,
2021, section 3.1 (both, sandwich norm); GPT-J, 2021 and GPT-NeoX, 2022, section 2.1 (parallel).

A branch is `ResidualBranch.add`: enter (norm), body, leave (norm, dropout, sum). What surrounds the formula in a run is
chosen by Execution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from megatron.core.errors import ConfigError
from megatron.core.plan.kinds import find_kind
from megatron.core.plan.model_plan import Branch, LayerPlan
from megatron.core.plan.read import read_plan
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.taken_arguments import take_arguments
from megatron.core.transformer.compiled_regions import Compile
from megatron.core.transformer.execution.branch_runner import Runner
from megatron.core.transformer.execution.execution import Execution
from megatron.core.transformer.hyper_connections import HyperConnectedBranch, choose_connection, name_connection
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.layer_submodules import TransformerLayerSubmodules, builds, is_there
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.residual_branch import ResidualBranch
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.weight_names import find_own_name, name_weights

# Put here by a table of upstream's names; declared for type checkers.
get_transformer_layer_offset: Any

_NORMS = {
    "self_attention": ("input_layernorm", "post_self_attn_layernorm"),
    "mixer": ("input_layernorm", "post_self_attn_layernorm"),
    "mlp": ("pre_mlp_layernorm", "post_mlp_layernorm"),
}
"""Module of a branch -> the norms before and after it."""


class TransformerLayer(MegatronModule):
    """Attention and MLP with their norms, each added to the residual stream: [s, b, h] -> [s, b, h], with n streams
    [s, b, n h]."""

    self_attention: Any
    mlp: Any

    @take_arguments(
        "config submodules layer_number hidden_dropout=@hidden_dropout pg_collection vp_stage=... is_mtp_layer=... "
        "add_layer_offset=False pp_layer_offset=0 name=...",
        "the config says how much is dropped, and layer_number counts in the whole model: add "
        "get_transformer_layer_offset(config) to a stage's own number",
    )
    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
        expected_config: Mapping[str, Any] | None = None,
        execution_type: type[Execution] = Execution,
        plan: LayerPlan | None = None,
    ) -> None:
        """layer_number: this layer in the whole model, counted from 1. expected_config: fields of the config that the
        layer's spec was made for; raises ConfigError where the config has other values. execution_type: who chooses
        what surrounds the formula. plan: the layer's; the one of its number in the config's plan when None."""
        super().__init__(config)
        if problems := list(submodules.problems()):
            raise ConfigError(problems)
        for name, value in (expected_config or {}).items():
            if getattr(config, name) != value:
                raise ConfigError(
                    f"the layer spec was made with {name} {value!r}, the config says {getattr(config, name)!r}; "
                    f"give TransformerConfig({name}={value!r})"
                )
        self.execution = execution_type(config)
        groups = pg_collection if pg_collection is not None else ProcessGroupCollection.current()
        self.layer_number = layer_number
        self.plan = read_plan(config).layer(layer_number) if plan is None else plan
        # In the order of forward: gradient buckets follow the order of construction, and fill up in backward from the
        # end.
        built = (self._build_branch(branch, submodules, groups) for branch in self.plan.branches)
        self.branches = tuple(branch for branch in built if branch is not None)
        name_weights(self, submodules.weight_names)
        self.runners: Sequence[Runner] = ()
        self.execution.equip(self, groups)

    def forward(self, hidden_states: Tensor, *inputs: Any, **named: Any) -> Tensor:
        """[s, b, h] -> [s, b, h]; inputs: the fields of LayerInputs."""
        layer_inputs = LayerInputs(*inputs, **named)
        for add in self.runners:
            hidden_states = add(hidden_states, layer_inputs)
        return hidden_states

    def global_parameter_name(self, name: str) -> str:
        """See `list_global_names`: our name, whatever the spec calls a weight."""
        return find_own_name(name)

    def compile_regions(self, compiled: Compile[Any]) -> None:
        """See compiled_regions.py."""
        for branch in self.branches:
            branch.compile_regions(compiled)

    def _build_branch(
        self, branch: Branch, submodules: TransformerLayerSubmodules, groups: ProcessGroupCollection
    ) -> ResidualBranch | None:
        """Build the modules of a branch; None where the spec has no part for it."""
        kind = find_kind(branch.kind)
        policy: Literal["attention", "mlp", "moe"] = "attention"
        if kind.attribute == "mlp":
            policy = "moe" if kind.name == "experts" else "mlp"
        spec = (
            kind.spec
            or submodules.other_kinds.get(kind.name)
            or (policy == "moe" and submodules.moe)
            or getattr(submodules, kind.attribute, None)
        )
        if policy == "moe" and builds(spec, MLP):
            raise ConfigError("--num-experts needs a layer with experts; let the spec's layer have a part `moe`")
        if policy == "mlp" and builds(spec, MoELayer):
            raise ConfigError(
                f"layer {self.layer_number} has no experts by --moe-layer-freq, its spec has; take "
                "get_gpt_decoder_block_spec(config), which has a spec for each layer"
            )
        if spec is None or not is_there(spec):
            return None
        branch_type = ResidualBranch
        if self.config.num_streams is not None:
            setattr(self, name_connection(kind.attribute), choose_connection(self.config)(self.config))
            branch_type = HyperConnectedBranch
        before, after = _NORMS[kind.attribute]
        where = branch.options.norm
        setattr(self, before, self._norm(getattr(submodules, before), where in ("input", "both")))
        if where == "shared":
            before = _NORMS["self_attention"][0]
        # A dense MLP is the same in every layer.
        number = {} if kind.name == "mlp" else {"layer_number": self.layer_number}
        if branch.options.ffn_hidden_size is not None:
            number["ffn_hidden_size"] = branch.options.ffn_hidden_size
        config = self.config.with_query_groups(branch.options.query_groups)
        module = build_module(spec, config=config, pg_collection=groups, **number)
        setattr(self, kind.attribute, module)
        setattr(self, after, self._norm(getattr(submodules, after), where in ("output", "both")))
        return branch_type(
            self.config, self._modules, policy, (before, kind.attribute, after), branch.options.multiplier
        )

    def _norm(self, submodule: Any, is_wanted: bool) -> Any:
        """The norm at one end of a branch; None where there is none."""
        if not is_there(submodule) or not is_wanted:
            return None
        return build_module(submodule, self.config, self.config.hidden_size)
