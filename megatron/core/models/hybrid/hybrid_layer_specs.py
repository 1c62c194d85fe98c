# SPDX-License-Identifier: Apache-2.0
"""The parts that the layers of a hybrid are made of, by upstream's names: the parts of a GPT's layers, one in each."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from megatron.core.errors import ConfigError
from megatron.core.models.gpt.gpt_layer_specs import (
    STATE_MIXERS,
    by_transformer_engine,
    get_gpt_layer_spec,
    get_gpt_mtp_block_spec,
    get_latent_attention_spec,
    get_mlp_module_spec,
    get_moe_module_spec,
    get_self_attention_spec,
    get_sparse_attention_spec,
)
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.state_mixer import get_state_mixer_spec
from megatron.core.transformer.norms import build_norm
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.weight_names import WeightNames


def get_hybrid_stack_spec(names: WeightNames = "own") -> ModuleSpec:
    """Return the spec of a stack on plain torch with layers of every letter. names: of its weights."""
    mixers = {kind: get_state_mixer_spec(mixer) for kind, mixer in STATE_MIXERS.items()}

    def layer(place: str, after: str, **parts: Any) -> ModuleSpec:
        """A layer of one branch. place, after: names of the norms before and after it."""
        parts |= {place: build_norm, after: build_norm, "weight_names": names}
        return ModuleSpec(TransformerLayer, submodules=TransformerLayerSubmodules(**parts))

    attention = functools.partial(layer, "input_layernorm", "post_self_attn_layernorm")
    mlp = functools.partial(layer, "pre_mlp_layernorm", "post_mlp_layernorm")
    nets = {kind: mixers[kind] for kind in ("gated_delta_net", "gated_delta_net_2")}
    return ModuleSpec(
        HybridStack,
        submodules=HybridStackSubmodules(
            mamba_layer=ModuleSpec(
                MambaLayer, submodules=MambaLayerSubmodules(mixer=mixers["mamba"], weight_names=names)
            ),
            gdn_layer=attention(other_kinds=nets),
            attention_layer=attention(self_attention=get_self_attention_spec()),
            dsa_layer=attention(self_attention=get_sparse_attention_spec()),
            mla_layer=attention(self_attention=get_latent_attention_spec()),
            mlp_layer=mlp(mlp=get_mlp_module_spec()),
            moe_layer=mlp(moe=get_moe_module_spec()),
            kda_layer=attention(other_kinds={"kimi_delta": mixers["kimi_delta"]}),
            other_layer=get_gpt_layer_spec(names=names),
        ),
    )


hybrid_stack_spec = get_hybrid_stack_spec("engine")
"""Layers of every letter, whose weights have upstream's names."""

hybrid_inference_stack_spec = hybrid_stack_spec
"""The same: layers that train also generate."""


def get_hybrid_mtp_block_spec(config: TransformerConfig, stack: ModuleSpec) -> ModuleSpec | None:
    """Return the spec of multi-token prediction with the layers that the pattern has after `/`; None without any.

    stack: of the decoder, whose mtp_block_spec comes first.
    """
    if config.mtp_num_layers is None or stack.submodules.mtp_block_spec is not None:
        return None if config.mtp_num_layers is None else stack.submodules.mtp_block_spec
    return get_gpt_mtp_block_spec(config, dataclasses.replace(stack, params=stack.params | {"is_mtp_layer": True}))


def by_transformer_engine_in_stack(stack: ModuleSpec) -> ModuleSpec:
    """Return the spec of the same stack, whose layers Transformer Engine computes where it can."""
    parts = {
        field.name: by_transformer_engine(spec)
        for field in dataclasses.fields(stack.submodules)
        if isinstance(spec := getattr(stack.submodules, field.name), ModuleSpec) and field.name != "mtp_block_spec"
    }
    return dataclasses.replace(stack, submodules=dataclasses.replace(stack.submodules, **parts))


def get_stack_of(layer: ModuleSpec) -> ModuleSpec:
    """Return the spec of a stack whose layers, whatever their letter, have this spec."""
    parts = {field.name: layer for field in dataclasses.fields(HybridStackSubmodules) if field.name != "mtp_block_spec"}
    return ModuleSpec(HybridStack, submodules=HybridStackSubmodules(**parts))


def gated_delta_product_stack_spec(*_: Any) -> ModuleSpec:
    """Refuse what does not exist here. Raises ConfigError."""
    raise ConfigError(
        "gated delta products (the letter M of --spec gdp_stack_spec) do not exist here; use hybrid_stack_spec, whose "
        "letter M is Mamba-2, or the letter G, a gated delta net"
    )


gdp_stack_spec = gated_delta_product_inference_stack_spec = gdp_inference_stack_spec = gated_delta_product_stack_spec
mamba_stack_spec = hybrid_stack_spec
"""Its name in earlier releases."""
mamba_inference_stack_spec = hybrid_inference_stack_spec
