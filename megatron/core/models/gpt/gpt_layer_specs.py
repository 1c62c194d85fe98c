"""The parts a GPT layer is made of."""

from __future__ import annotations

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.core_attention.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.norms import build_norm
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


def get_mlp_module_spec() -> ModuleSpec:
    """A dense MLP of parallel linear layers."""
    return ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )


def get_moe_module_spec() -> ModuleSpec:
    """A mixture of experts; its shared expert is made of parallel linear layers."""
    shared_experts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(shared_experts=shared_experts))


def get_gpt_layer_local_spec() -> ModuleSpec:
    """A GPT layer on plain torch; which norm, activation and attention kernel it gets is up to its config."""
    self_attention = ModuleSpec(
        module=SelfAttention,
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=build_norm,
            k_layernorm=build_norm,
        ),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=build_norm,
            self_attention=self_attention,
            post_self_attn_layernorm=build_norm,
            pre_mlp_layernorm=build_norm,
            mlp=get_mlp_module_spec(),
            post_mlp_layernorm=build_norm,
            moe=get_moe_module_spec(),
        ),
    )
