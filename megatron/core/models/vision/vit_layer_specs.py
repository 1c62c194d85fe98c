# SPDX-License-Identifier: Apache-2.0
"""The layer of a vision transformer: a GPT layer in which every patch sees every other one."""

from __future__ import annotations

import dataclasses

from megatron.core.enums import AttnMaskType
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec


def get_vit_layer_with_local_spec() -> ModuleSpec:
    """Return the spec of a layer without causal mask, on plain torch."""
    return _see_all(get_gpt_layer_local_spec())


def get_vit_layer_with_transformer_engine_spec() -> ModuleSpec:
    """Return the spec of a layer without causal mask, computed by Transformer Engine where this process has a GPU and
    the package; elsewhere it is the local one, with a warning that says why."""
    return _see_all(get_gpt_layer_with_transformer_engine_spec())


def _see_all(layer: ModuleSpec) -> ModuleSpec:
    attention = layer.submodules.self_attention
    attention = dataclasses.replace(attention, params=attention.params | {"attn_mask_type": AttnMaskType.no_mask})
    parts = dataclasses.replace(layer.submodules, self_attention=attention)
    return dataclasses.replace(layer, submodules=parts)
