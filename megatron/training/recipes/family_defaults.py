# SPDX-License-Identifier: Apache-2.0
"""Meaning of the fields that a config.json leaves out, by the classes of Hugging Face transformers.

`DEFAULTS` has every field of a family's class that changes the model, with the class's default; a test compares it with
the installed release. Layers of multi-token prediction are none where a file does not name them: the classes leave them
out whatever they say. The functions below it fill in what the classes derive from other fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.errors import ConfigError

Fields = dict[str, Any]


def size(layers: int, hidden: int, ffn: int, heads: int, groups: int | None, length: int) -> Fields:
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads,
        "num_key_value_heads": groups, "max_position_embeddings": length, "hidden_act": "silu",
        "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_parameters": None,
    }  # fmt: skip


def without(fields: Fields, *names: str) -> Fields:
    return {name: value for name, value in fields.items() if name not in names}


_BIASES = {"attention_bias": False, "mlp_bias": False}
_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096}
_GEMMA = {
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "attention_bias": False,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None,
}  # fmt: skip
_QWEN_EXPERTS = {"decoder_sparse_step": 1, "norm_topk_prob": False, "mlp_only_layers": None}
_LATENT = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "attention_bias": False,
}  # fmt: skip

DEFAULTS: Mapping[str, Fields] = {
    "gpt2": {
        "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False, "tie_word_embeddings": True,
    },
    "llama": size(32, 4096, 11008, 32, None, 2048) | _BIASES | {"head_dim": None},
    "mistral": size(32, 4096, 14336, 32, 8, 131072) | {"head_dim": None, "sliding_window": 4096},
    "qwen2": size(32, 4096, 22016, 32, 32, 32768) | _WINDOWS | {"max_window_layers": 28, "layer_types": None},
    "qwen3": size(32, 4096, 22016, 32, 32, 32768)
    | _WINDOWS
    | {"max_window_layers": 28, "layer_types": None, "head_dim": 128, "attention_bias": False},
    "phi3": size(32, 3072, 8192, 32, None, 4096)
    | {"rms_norm_eps": 1e-5, "sliding_window": None, "original_max_position_embeddings": 4096},
    "olmo2": size(32, 4096, 11008, 32, None, 2048) | {"rms_norm_eps": 1e-5, "attention_bias": False},
    "smollm3": size(36, 2048, 11008, 16, 4, 32768)
    | _BIASES
    | {
        "tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": None, "no_rope_layers": None,
        "no_rope_layer_interval": 4, "layer_types": None,
    },
    "gemma": size(28, 3072, 24576, 16, 16, 8192)
    | {
        "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "attention_bias": False,
        "use_bidirectional_attention": None,
    },
    "gemma2": without(size(26, 2304, 9216, 8, 4, 8192), "hidden_act")
    | _GEMMA
    | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "use_bidirectional_attention": None},
    "gemma3_text": without(size(26, 2304, 9216, 8, 4, 131072), "hidden_act")
    | _GEMMA
    | {"final_logit_softcapping": None, "attn_logit_softcapping": None, "use_bidirectional_attention": False},
    "nemotron": without(size(32, 6144, 24576, 48, None, 4096), "rms_norm_eps")
    | _BIASES
    | {"hidden_act": "relu2", "norm_eps": 1e-5, "head_dim": None},
    "gpt_neox": without(size(44, 6144, 24576, 64, None, 2048), "rms_norm_eps", "num_key_value_heads")
    | {
        "hidden_act": "gelu", "layer_norm_eps": 1e-5, "use_parallel_residual": True, "attention_bias": True,
        "is_decoder": False,
    },
    "gpt_oss": size(36, 2880, 2880, 64, 8, 131072)
    | {
        "rms_norm_eps": 1e-5, "num_local_experts": 128, "head_dim": 64, "sliding_window": 128,
        "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "layer_types": None,
        "attention_bias": True,
    },
    "mixtral": size(32, 4096, 14336, 32, 8, 131072)
    | {
        "rms_norm_eps": 1e-5, "head_dim": None, "sliding_window": None, "num_experts_per_tok": 2,
        "num_local_experts": 8,
    },
    "qwen2_moe": size(24, 2048, 5632, 16, 16, 32768)
    | _WINDOWS
    | _QWEN_EXPERTS
    | {
        "max_window_layers": 28, "layer_types": None, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "num_experts": 60, "qkv_bias": True,
    },
    "qwen3_moe": size(24, 2048, 6144, 32, 4, 32768)
    | _WINDOWS
    | _QWEN_EXPERTS
    | {
        "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128, "attention_bias": False,
    },
    "olmoe": size(16, 2048, 2048, 16, None, 4096)
    | {
        "rms_norm_eps": 1e-5, "attention_bias": False, "clip_qkv": None, "num_experts_per_tok": 8,
        "num_experts": 64, "norm_topk_prob": False,
    },
    "deepseek_v2": size(32, 4096, 11008, 32, None, 2048)
    | _LATENT
    | {
        "mlp_bias": False, "first_k_dense_replace": 0, "n_group": None, "n_routed_experts": 64, "n_shared_experts": 2,
        "routed_scaling_factor": 1.0, "topk_group": None, "topk_method": "greedy", "norm_topk_prob": False,
        "num_experts_per_tok": None, "moe_intermediate_size": 1407,
    },
    "deepseek_v3": size(61, 7168, 18432, 128, 128, 4096)
    | _LATENT
    | {
        "moe_intermediate_size": 2048, "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5,
        "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True,
        "rope_interleave": True, "num_nextn_predict_layers": 0,
    },
    "glm4_moe": size(46, 4096, 10944, 96, 8, 131072)
    | {
        "rms_norm_eps": 1e-5, "attention_bias": False, "moe_intermediate_size": 1408, "num_experts_per_tok": 8,
        "n_shared_experts": 1, "n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "norm_topk_prob": True, "use_qk_norm": False, "num_nextn_predict_layers": 0,
    },
    "llama4_text": size(48, 5120, 8192, 40, 8, 131072)
    | {
        "rms_norm_eps": 1e-5, "intermediate_size_mlp": 16384, "head_dim": 128, "num_experts_per_tok": 1,
        "num_local_experts": 16, "moe_layers": None, "interleave_moe_layer_step": 1, "use_qk_norm": True,
        "no_rope_layers": None, "no_rope_layer_interval": 4, "attention_chunk_size": 8192, "layer_types": None,
        "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1, "attention_bias": False,
    },
}  # fmt: skip
"""`model_type` -> field -> default."""

# ---- what follows from other fields


def fill_layers(fields: Fields, is_local: Mapping[int, bool], local: str = "sliding_attention") -> None:
    """Fill in which layers have a window or chunks, where a file does not say it layer by layer."""
    if fields["layer_types"] is None:
        fields["layer_types"] = [local if is_local[layer] else "full_attention" for layer in is_local]


def list_layers(fields: Fields) -> range:
    return range(1, fields["num_hidden_layers"] + 1)


def complete_qwen(fields: Fields) -> Fields:
    """The first layers see everything; a window that is switched off is none."""
    first, window = fields.pop("max_window_layers"), fields["sliding_window"]
    is_on = bool(fields["use_sliding_window"]) and window is not None
    fill_layers(fields, {layer: is_on and layer > first for layer in list_layers(fields)})
    _refuse_windows_that_are_off(fields, is_on)
    return fields


def complete_qwen2_moe(fields: Fields) -> Fields:
    """Every other layer of the first ones has the window."""
    first, is_on = fields.pop("max_window_layers"), bool(fields["use_sliding_window"])
    fill_layers(fields, {layer: is_on and layer % 2 == 1 and layer <= first for layer in list_layers(fields)})
    _refuse_windows_that_are_off(fields, is_on)
    return fields


def _refuse_windows_that_are_off(fields: Fields, is_on: bool) -> None:
    if not is_on:
        fields["sliding_window"] = None
    if not is_on and "sliding_attention" in fields["layer_types"]:
        raise ConfigError(
            "layer_types in config.json has layers with a window, and use_sliding_window or sliding_window says that "
            "there is none; set one of them right"
        )


def complete_qwen3_moe(fields: Fields) -> Fields:
    """A window that is switched off is none."""
    return fields if fields["use_sliding_window"] else {**fields, "sliding_window": None}


def complete_phi3(fields: Fields) -> Fields:
    """Other words of earlier releases for the same positions."""
    renamed = {"su": "longrope", "yarn": "longrope"}
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.get(name)
        if rope:
            kind = rope.get("rope_type") or rope.get("type")
            fields[name] = {**rope, "rope_type": renamed.get(kind, kind)}
    return fields


def complete_smollm3(fields: Fields) -> Fields:
    """Every so many layers have no positions; they may have a window, which no model does that is known here."""
    every = fields.pop("no_rope_layer_interval")
    if fields["no_rope_layers"] is None:
        fields["no_rope_layers"] = [int(layer % every != 0) for layer in list_layers(fields)]
    if not fields["use_sliding_window"]:
        fields["sliding_window"] = None
    if set(fields["layer_types"] or ()) <= {"full_attention"}:
        fields["layer_types"] = None
    return fields


def complete_gemma(fields: Fields) -> Fields:
    """The first files say `gelu` and mean its tanh form."""
    return {**fields, "hidden_act": "gelu_pytorch_tanh"} if fields["hidden_act"] == "gelu" else fields


def complete_alternating(fields: Fields) -> Fields:
    """Every other layer has the window, from the first on."""
    fill_layers(fields, {layer: layer % 2 == 1 for layer in list_layers(fields)})
    return fields


def complete_gemma3(fields: Fields) -> Fields:
    """Every so many layers see everything."""
    every = fields.pop("sliding_window_pattern", None) or 6
    fill_layers(fields, {layer: layer % every != 0 for layer in list_layers(fields)})
    return fields


def complete_gpt_oss(fields: Fields) -> Fields:
    """Alternating windows, and positions that are stretched where nothing else is said."""
    if not fields.get("rope_scaling") and fields["rope_parameters"] is None:
        fields["rope_parameters"] = {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        }  # fmt: skip
    return complete_alternating(fields)


def complete_latent(fields: Fields) -> Fields:
    """Every head of latent attention has separate keys and values."""
    heads = fields["num_attention_heads"]
    groups = fields["num_key_value_heads"]
    if groups not in (None, heads):
        raise ConfigError(
            f"num_key_value_heads is {groups} in config.json; latent attention has one for each of its {heads} heads"
        )
    width = fields.get("head_dim")
    if width not in (None, fields["qk_rope_head_dim"]):
        # One of the classes believes it, and turns so many channels.
        raise ConfigError(
            f"head_dim is {width!r} in config.json; with latent attention it must be qk_rope_head_dim, "
            f"{fields['qk_rope_head_dim']}"
        )
    return {**fields, "num_key_value_heads": heads}


def complete_deepseek_v2(fields: Fields) -> Fields:
    """Set aside the groups of a config.json whose experts are chosen one by one: there they mean nothing."""
    if fields["topk_method"] == "greedy":
        fields |= {"n_group": 1, "topk_group": 1}
    elif not fields["n_group"] or not fields["topk_group"]:
        raise ConfigError(
            f"topk_method is {fields['topk_method']!r} in config.json; n_group and topk_group must be, too"
        )
    return complete_latent(fields)


def complete_llama4(fields: Fields) -> Fields:
    """Fill in which layers have positions, chunks and experts, where a config.json gives only how often they come."""
    every, step = fields.pop("no_rope_layer_interval"), fields.pop("interleave_moe_layer_step")
    layers = list_layers(fields)
    rotated = fields["no_rope_layers"] or [int(layer % every != 0) for layer in layers]
    fill_layers(fields, {layer: bool(each) for layer, each in enumerate(rotated)}, "chunked_attention")
    if fields["moe_layers"] is None:
        fields["moe_layers"] = [layer - 1 for layer in layers if layer % step == 0]
    return {**fields, "no_rope_layers": rotated}
