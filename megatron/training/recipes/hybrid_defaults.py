# SPDX-License-Identifier: Apache-2.0
"""Meaning of the fields that the config.json of a hybrid leaves out; see `family_defaults.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatron.core.errors import ConfigError
from megatron.training.recipes.family_defaults import Fields, list_layers, size, without

LINEAR, FULL = "linear_attention", "full_attention"
_RENAMED = {"mamba": LINEAR, "attention": FULL}
"""Words of earlier releases for kinds of layers."""

_DELTA = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "layer_types": None,
}  # fmt: skip
_QWEN = {"head_dim": 256, "attention_bias": False} | _DELTA
_STEPS = (0.0, math.inf)
_MAMBA = {
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False, "time_step_limit": _STEPS,
}  # fmt: skip

HYBRID_DEFAULTS: Mapping[str, Fields] = {
    "nemotron_h": {
        "hidden_size": 4096, "layers_block_type": None, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "intermediate_size": 21504,
        "mlp_hidden_act": "relu2", "mlp_bias": False, "ssm_state_size": 128, "mamba_num_heads": 128,
        "mamba_head_dim": 64, "mamba_hidden_act": "silu", "n_groups": 8, "conv_kernel": 4, "time_step_min": 0.001,
        "use_conv_bias": True, "n_routed_experts": 8, "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688, "moe_latent_size": None, "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "num_nextn_predict_layers": 0, "use_bias": False, "layer_norm_epsilon": 1e-5,
    },
    "mamba2": {
        "num_heads": 128, "head_dim": 64, "hidden_size": 4096, "state_size": 128, "num_hidden_layers": 64,
        "layer_norm_epsilon": 1e-5, "expand": 2, "conv_kernel": 4, "n_groups": 8, "use_bias": False,
        "use_conv_bias": True, "hidden_act": "silu", "time_step_limit": _STEPS, "tie_word_embeddings": False,
    },
    "bamba": size(32, 4096, 14336, 32, 8, 262144)
    | _MAMBA
    | {"rms_norm_eps": 1e-5, "attn_layer_indices": None, "attention_bias": False, "mlp_bias": False},
    "falcon_h1": size(32, 4096, 14336, 32, 8, 8192)
    | {name: value for name, value in _MAMBA.items() if name != "mamba_expand"}
    | {
        "rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False, "projectors_bias": False,
        "mamba_d_ssm": 1024, "mamba_norm_before_gate": True, "mamba_rms_norm": False, "lm_head_multiplier": 1.0,
        "embedding_multiplier": 1.0, "mlp_multipliers": None, "key_multiplier": 1.0, "attention_out_multiplier": 1.0,
        "attention_in_multiplier": 1.0, "ssm_multipliers": None, "ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0,
    },
    "granitemoehybrid": size(32, 4096, 11008, 32, None, 2048)
    | _MAMBA
    | {
        "attention_bias": False, "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
        "attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024, "position_embedding_type": None, "layer_types": None,
    },
    "qwen3_next": size(48, 2048, 5632, 16, 2, 32768)
    | _QWEN
    | {
        "decoder_sparse_step": 1, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10, "num_experts": 512, "norm_topk_prob": True, "mlp_only_layers": None,
    },
    "qwen3_5_text": size(32, 4096, 12288, 16, 4, 32768) | _QWEN,
    "qwen3_5_moe_text": without(size(40, 2048, 0, 16, 2, 32768), "intermediate_size")
    | _QWEN
    | {
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts_per_tok": 8,
        "num_experts": 256,
    },
}  # fmt: skip
"""`model_type` -> field -> default."""

# ---- what follows from other fields


def _rename_layers(fields: Fields, name: str = "layer_types") -> None:
    if fields[name] is not None:
        fields[name] = [_RENAMED.get(word, word) for word in fields[name]]


def _complete_mamba(fields: Fields) -> None:
    if fields["mamba_d_head"] == "auto":
        fields["mamba_d_head"] = fields["mamba_expand"] * fields["hidden_size"] // fields["mamba_n_heads"]


def complete_nemotron_h(fields: Fields) -> Fields:
    """Fill in the layers, which the published files give as letters."""
    words = {"M": LINEAR, "E": "moe", "*": FULL, "-": "mlp"}
    pattern, name = fields.pop("hybrid_override_pattern", None), "layers_block_type"
    if fields[name] is None:
        fields[name] = [LINEAR, "moe", FULL, "mlp"] if pattern is None else [words.get(x, x) for x in pattern]
    _rename_layers(fields, name)
    layers = fields.setdefault("num_hidden_layers", len(fields[name]))
    if layers != len(fields[name]):
        raise ConfigError(
            f"num_hidden_layers is {layers} in config.json, and {name} has {len(fields[name])} layers; leave it out"
        )
    if "moe" not in fields[name]:
        fields["n_routed_experts"] = 0
    if fields["mlp_bias"] and fields["moe_latent_size"] and fields["n_routed_experts"]:
        raise ConfigError("mlp_bias is true in config.json; with moe_latent_size only false is known")
    return fields


def complete_bamba(fields: Fields) -> Fields:
    """Fill in the channels of a head; half of each attention head is rotated in any case."""
    _complete_mamba(fields)
    fields["partial_rotary_factor"] = 0.5
    return fields


def complete_falcon_h1(fields: Fields) -> Fields:
    """Fill in the channels of Mamba-2, which follow from the hidden size unless set."""
    if fields["mamba_d_ssm"] is None:
        fields["mamba_d_ssm"] = fields.get("mamba_expand", 2) * fields["hidden_size"]
    if fields["mamba_d_head"] == "auto":
        fields["mamba_d_head"] = fields["mamba_d_ssm"] // fields["mamba_n_heads"]
    if bool(fields["projectors_bias"]) != bool(fields["mamba_proj_bias"]):
        raise ConfigError(
            f"projectors_bias is {fields['projectors_bias']} in config.json, and mamba_proj_bias "
            f"{fields['mamba_proj_bias']}; both projections of Mamba-2 have a bias here, or none"
        )
    return fields


def complete_granite_hybrid(fields: Fields) -> Fields:
    """Fill in the layers and the channels of a head."""
    _complete_mamba(fields)
    _rename_layers(fields)
    if fields["layer_types"] is None:
        fields["layer_types"] = [LINEAR] * fields["num_hidden_layers"]
    return fields


def complete_qwen_hybrid(fields: Fields) -> Fields:
    """Every so many layers attend to all tokens; layers have experts but for those that are named."""
    every = fields.pop("full_attention_interval", 4)
    _rename_layers(fields)
    if fields["layer_types"] is None:
        fields["layer_types"] = [FULL if layer % every == 0 else LINEAR for layer in list_layers(fields)]
    if "mlp_only_layers" in fields:
        dense, step = fields["mlp_only_layers"] or [], fields.pop("decoder_sparse_step")
        is_dense = {layer - 1: layer - 1 in dense or layer % step != 0 for layer in list_layers(fields)}
        fields["mlp_only_layers"] = [layer for layer in is_dense if is_dense[layer] or not fields["num_experts"]]
        if len(fields["mlp_only_layers"]) == len(is_dense):
            fields["num_experts"] = 0
    return fields
