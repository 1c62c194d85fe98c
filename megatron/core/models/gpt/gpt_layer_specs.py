# SPDX-License-Identifier: Apache-2.0
"""The parts a GPT layer is made of."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

from megatron.core.device import current_device
from megatron.core.enums import AttnMaskType
from megatron.core.errors import ConfigError
from megatron.core.plan.compressed_kinds import COMPRESSED_KINDS
from megatron.core.plan.read import read_plan
from megatron.core.plan.stages import build_pipeline_layout
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNet2
from megatron.core.ssm.kimi_delta_attention import KimiDeltaAttention
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.ssm.parallel_mixers import ParallelMixers, ParallelMixersSubmodules
from megatron.core.ssm.short_convolution import get_short_convolution_spec
from megatron.core.ssm.state_mixer import StateMixer, get_state_mixer_spec
from megatron.core.taken_arguments import take_arguments
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.compressed_attention import CompressedSelfAttention
from megatron.core.transformer.core_attention.dot_product_attention import DotProductAttention
from megatron.core.transformer.execution.transformer_engine import EngineExecution
from megatron.core.transformer.execution.transformer_engine_package import choose_implementation
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.norms import build_norm
from megatron.core.transformer.own_stage import find_own_stage
from megatron.core.transformer.replacement_linear import ReplacementLinear
from megatron.core.transformer.sparse_attention import SparseCore, SparseSelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.weight_names import WeightNames

STATE_MIXERS: dict[str, type[StateMixer]] = {
    "mamba": MambaMixer,
    "gated_delta_net": GatedDeltaNet,
    "gated_delta_net_2": GatedDeltaNet2,
    "kimi_delta": KimiDeltaAttention,
}
"""Kinds of branches (core/plan/kinds.py) whose state has a constant size."""


def get_mlp_module_spec() -> ModuleSpec:
    """Return the spec of a dense MLP of parallel linear layers."""
    return ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )


@take_arguments("use_te=... num_experts=... moe_grouped_gemm=...")  # the config says it when the layer is built
def get_moe_module_spec() -> ModuleSpec:
    """Return the spec of a mixture of experts; its shared expert is made of parallel linear layers."""
    shared = ModuleSpec(SharedExpertMLP, params={"gate": False}, submodules=get_mlp_module_spec().submodules)
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(shared_experts=shared))


def get_self_attention_spec() -> ModuleSpec:
    """Return the spec of attention with one packed projection to queries, keys and values."""
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
            # Named here for every model; a config without --qk-layernorm leaves them unbuilt.
            q_layernorm=build_norm,
            k_layernorm=build_norm,
        ),
    )


def get_latent_attention_spec() -> ModuleSpec:
    """Return the spec of latent attention, whose projections to latent vectors are whole on every rank."""
    return ModuleSpec(
        module=MLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ReplicatedLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ReplicatedLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
            # As above: --qk-layernorm says whether they are built.
            q_layernorm=build_norm,
            kv_layernorm=build_norm,
        ),
    )


def get_sparse_attention_spec() -> ModuleSpec:
    """Return the spec of latent attention to keys that an indexer chooses."""
    latent = get_latent_attention_spec()
    parts = dataclasses.replace(latent.submodules, core_attention=SparseCore)
    return dataclasses.replace(latent, module=SparseSelfAttention, submodules=parts)


def get_parallel_mixers_spec() -> ModuleSpec:
    """Return the spec of attention and Mamba-2 side by side."""
    mixers = ParallelMixersSubmodules(get_self_attention_spec(), get_state_mixer_spec(MambaMixer))
    return ModuleSpec(module=ParallelMixers, submodules=mixers)


def get_gpt_layer_spec(*, multi_latent_attention: bool = False, names: WeightNames = "own") -> ModuleSpec:
    """Return the spec of a GPT layer, dense or with experts as its config says. names: of its weights."""
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=build_norm,
            self_attention=get_latent_attention_spec() if multi_latent_attention else get_self_attention_spec(),
            post_self_attn_layernorm=build_norm,
            pre_mlp_layernorm=build_norm,
            mlp=get_mlp_module_spec(),
            post_mlp_layernorm=build_norm,
            # Both forms of the MLP: each layer takes one, by its number and the config's pattern.
            moe=get_moe_module_spec(),
            other_kinds={name: get_state_mixer_spec(mixer) for name, mixer in STATE_MIXERS.items()}
            | {"parallel": get_parallel_mixers_spec(), "short_convolution": get_short_convolution_spec()}
            | {"sparse_attention": get_sparse_attention_spec()}
            | {kind.name: ModuleSpec(CompressedSelfAttention) for kind in COMPRESSED_KINDS}
            | dict.fromkeys(("linear_for_attention", "linear_for_mlp"), ReplacementLinear),
            weight_names=names,
        ),
    )


def get_gpt_layer_local_spec(
    num_experts: int | None = None,
    moe_grouped_gemm: bool | None = False,
    qk_layernorm: bool | None = False,
    multi_latent_attention: bool | None = False,
    fp8: str | None = None,
    moe_use_legacy_grouped_gemm: bool | None = False,
    normalization: str | None = None,
    qk_l2_norm: bool | None = False,
    use_kitchen: bool = False,
) -> ModuleSpec:
    """Return the spec of a GPT layer on plain torch, whose norm, activation and attention kernel its config chooses.

    A layer takes num_experts, qk_layernorm, normalization, qk_l2_norm and fp8 from its config (num_moe_experts, ...),
    so that one spec serves all layers; where they are given here, building the layer raises ConfigError unless the
    config says the same. multi_latent_attention: the layer is for a config with latent attention, and for no other.
    moe_grouped_gemm: how experts are computed is up to the config; the numbers are the same. Raises ConfigError for
    what does not exist: moe_use_legacy_grouped_gemm, use_kitchen.
    """
    return _make_layer_spec(
        "local", multi_latent_attention, moe_use_legacy_grouped_gemm, use_kitchen, num_moe_experts=num_experts,
        qk_layernorm=qk_layernorm, qk_l2_norm=qk_l2_norm, fp8=fp8, normalization=normalization,
    )  # fmt: skip


def get_gpt_layer_with_transformer_engine_spec(
    num_experts: int | None = None,
    moe_grouped_gemm: bool | None = False,
    qk_layernorm: bool | None = False,
    multi_latent_attention: bool | None = False,
    fp8: str | None = None,
    moe_use_legacy_grouped_gemm: bool | None = False,
    qk_l2_norm: bool | None = False,
    use_te_op_fuser: bool | None = False,
    use_kitchen: bool = False,
    use_te_activation_func: bool = False,
    post_self_attn_layernorm: bool | None = None,
    post_mlp_layernorm: bool | None = None,
) -> ModuleSpec:
    """Return the local spec with the weights' names of Transformer Engine's modules (transformer/weight_names.py), and
    with layers that compute by it where this process has a GPU and the package; elsewhere they are the local ones, with
    a warning that says why. Arguments as there; use_te_op_fuser and use_te_activation_func have no effect, since
    TransformerConfig(compile=True) fuses operations. post_self_attn_layernorm, post_mlp_layernorm: a norm after
    attention and MLP, which is the config's to say (norm_placement)."""
    if bool(post_self_attn_layernorm) != bool(post_mlp_layernorm):
        raise ConfigError(
            "post_self_attn_layernorm and post_mlp_layernorm go together: norm_placement says both; give both"
        )
    spec = _make_layer_spec(
        "engine", multi_latent_attention, moe_use_legacy_grouped_gemm, use_kitchen, num_moe_experts=num_experts,
        qk_layernorm=qk_layernorm, qk_l2_norm=qk_l2_norm, fp8=fp8,
        norm_placement="both" if post_self_attn_layernorm else None,
    )  # fmt: skip
    chosen = choose_implementation("auto", current_device())
    if chosen.is_engine:
        return by_transformer_engine(spec)
    # A warning, not an error: a script written for Transformer Engine trains the same model here.
    warnings.warn(f"layers are those of the local spec ({chosen.name})", stacklevel=2)
    return spec


def _make_layer_spec(
    names: WeightNames,
    multi_latent_attention: bool | None,
    legacy_experts: bool | None,
    use_kitchen: bool,
    **asked: Any,
) -> ModuleSpec:
    """asked: fields of the config that the layer is made for; those that are False or None, upstream's defaults, say
    nothing."""
    # Refused rather than dropped: a layer without them would train another model than the caller asked for.
    if legacy_experts:
        raise ConfigError("moe_use_legacy_grouped_gemm has no meaning: experts have one grouped product; leave it out")
    if use_kitchen:
        raise ConfigError("use_kitchen asks for a package that is not used here; leave it out, and give fp8_recipe")
    spec = get_gpt_layer_spec(multi_latent_attention=bool(multi_latent_attention), names=names)
    asked = {name: value for name, value in asked.items() if value}
    if asked:  # a user's own layer class may not take this argument
        spec.params["expected_config"] = asked
    if "num_moe_experts" in asked:
        spec.submodules.mlp = spec.submodules.moe  # where programs look for the experts' spec
        spec.submodules.other_kinds["mlp"] = get_mlp_module_spec()  # of layers that have none
    return spec


def by_transformer_engine(spec: ModuleSpec) -> ModuleSpec:
    """Return the spec of the same layer, computed by Transformer Engine where that can."""
    return dataclasses.replace(spec, params=spec.params | {"execution_type": EngineExecution})


def get_gpt_layer_with_inference_spec(
    qk_layernorm: bool | None = False, multi_latent_attention: bool | None = False, qk_l2_norm: bool | None = False
) -> ModuleSpec:
    """Return the local spec: the layers that train also generate."""
    return get_gpt_layer_local_spec(None, False, qk_layernorm, multi_latent_attention, qk_l2_norm=qk_l2_norm)


def get_gpt_decoder_layer_specs(
    config: TransformerConfig,
    use_transformer_engine: bool = False,
    normalization: str | None = None,
    qk_l2_norm: bool | None = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> list[ModuleSpec]:
    """Return a spec for each layer of the whole decoder, dense or with experts; none shares anything with another, so
    that a program may edit one. Arguments as of `get_gpt_decoder_block_spec`."""
    # The config builds the norms: another word here would be ignored in silence.
    if normalization not in (None, config.normalization):
        raise ConfigError(
            f"normalization {normalization} contradicts the config's {config.normalization}; leave it out"
        )
    if qk_l2_norm and not config.qk_l2_norm:
        raise ConfigError("qk_l2_norm is the config's to say: TransformerConfig(qk_l2_norm=True)")
    build = get_gpt_layer_with_transformer_engine_spec if use_transformer_engine else get_gpt_layer_local_spec
    specs = []
    for layer in read_plan(config).decoder:
        spec = build(multi_latent_attention=config.multi_latent_attention)
        if any(branch.kind == "experts" for branch in layer.branches):
            spec.submodules.mlp = spec.submodules.moe
        spec.submodules.moe = None  # the layer's kind is known: it has one MLP
        specs.append(spec)
    return specs


def get_gpt_decoder_block_spec(
    config: TransformerConfig,
    use_transformer_engine: bool = False,
    normalization: str | None = None,
    qk_l2_norm: bool | None = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> TransformerBlockSubmodules:
    """Return GPTModel's transformer_layer_spec with a spec for each layer of this stage: `layer_specs`, each dense or
    with experts, and `layer_norm`.

    normalization, qk_l2_norm: of the config, which they must not contradict (ConfigError). vp_stage: chunk of the
    stage. pp_rank: the stage, this process's when None. pg_collection: the groups whose pipeline it is, the current
    ones when None; with one stage, or with pp_rank, none are needed.
    """
    specs = get_gpt_decoder_layer_specs(config, use_transformer_engine, normalization, qk_l2_norm)
    shape, stage = find_own_stage(config, vp_stage, pp_rank, pg_collection)
    layers = build_pipeline_layout(config, shape)[stage].layers
    return TransformerBlockSubmodules(specs[layers.start : layers.stop], build_norm)


def get_gpt_mtp_block_spec(
    config: TransformerConfig,
    spec: ModuleSpec | TransformerBlockSubmodules | Sequence[ModuleSpec],
    use_transformer_engine: bool = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> ModuleSpec | None:
    """Return GPTModel's mtp_block_spec: a layer like the decoder's last one for each further token, or one for
    all with mtp_use_repeated_layer; None without multi-token prediction.

    spec: of a decoder layer, or of each of a stage's. use_transformer_engine, vp_stage, pp_rank: part of upstream's
    signature; GPTModel builds the block on the stage where it lies.
    """
    if config.mtp_num_layers is None:
        return None
    specs = spec.layer_specs if isinstance(spec, TransformerBlockSubmodules) else spec
    of_layer = specs if isinstance(specs, ModuleSpec) else specs[-1] if specs else None
    if of_layer is None:  # a stage without layers: the decoder's last layer is not among the given ones
        of_layer = get_gpt_decoder_layer_specs(config, use_transformer_engine)[-1]
    layer = ModuleSpec(
        module=MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=build_norm,
            hnorm=build_norm,
            eh_proj=ColumnParallelLinear,
            mtp_model_layer=of_layer,
            layer_norm=build_norm,
        ),
    )
    layers = [layer] * len(read_plan(config).list_depths())
    return ModuleSpec(
        module=MultiTokenPredictionBlock, submodules=MultiTokenPredictionBlockSubmodules(layer_specs=layers)
    )
