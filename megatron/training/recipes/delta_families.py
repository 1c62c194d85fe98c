# SPDX-License-Identifier: Apache-2.0
"""Families of hybrids that mix delta rules with full attention, in addition to Qwen's: OLMo Hybrid and Kimi Linear; see
`hybrid_families.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from megatron.core.errors import ConfigError
from megatron.training.recipes.family import ConfigKey, Family, LayerLetters, Row
from megatron.training.recipes.family_defaults import Fields, complete_latent, list_layers, size, without
from megatron.training.recipes.family_rows import (
    EXPERT_BIAS,
    LATENT_ROWS,
    LLAMA_ROWS,
    MIXTRAL_EXPERTS,
    OURS,
    QK_NORMS,
    SHARED_EXPERTS,
    THEIRS,
    build_gated_rows,
    build_rows,
    rename_rows,
)
from megatron.training.recipes.family_settings import (
    EXPERT_GROUPS,
    EXPERT_WIDTH,
    LATENT,
    LATENT_SIZES,
    LLAMA_FLAGS,
    NORM_EPSILON,
    SIZES,
    TOP_K,
    TWO_BEST,
    USUAL,
    list_router_flags,
    with_experts,
)
from megatron.training.recipes.hybrid_defaults import FULL, LINEAR
from megatron.training.recipes.hybrid_families import DELTA, in_pairs

DELTA_DEFAULTS: Mapping[str, Fields] = {
    "olmo_hybrid": size(32, 3840, 11008, 30, None, 65536)
    | {
        "attention_bias": False, "layer_types": None, "linear_num_key_heads": None, "linear_num_value_heads": None,
        "linear_key_head_dim": None, "linear_value_head_dim": None, "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
    },
    "kimi_linear": without(size(27, 2304, 9216, 32, 32, 1048576), "rope_parameters", "tie_word_embeddings")
    | {
        "rms_norm_eps": 1e-5, "moe_intermediate_size": 1024, "n_shared_experts": 1, "routed_scaling_factor": 2.446,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
        "n_group": 1, "topk_group": 1, "num_experts_per_tok": 8, "norm_topk_prob": True, "attention_bias": False,
        "num_local_experts": 256, "mlp_layer_types": None, "layer_types": None, "linear_head_dim": 128,
        "linear_num_heads": 32, "linear_conv_kernel_dim": 4,
    },
}  # fmt: skip


def complete_olmo_hybrid(fields: Fields) -> Fields:
    """Fill in the kinds of layers, and the heads of linear ones; a base of rotation that is null is none at all."""
    if fields.get("rope_theta", 0) is None:
        fields["rope_parameters"] = {"rope_theta": None} | (fields["rope_parameters"] or {})
    if fields["layer_types"] is None:
        kinds = [FULL if layer % 4 == 0 else LINEAR for layer in list_layers(fields)]
        fields["layer_types"] = kinds if FULL in kinds else [*kinds[:-1], FULL]
    for name in ("linear_num_key_heads", "linear_num_value_heads", "num_key_value_heads"):
        if fields[name] is None:
            fields[name] = fields["num_attention_heads"]
    if fields["linear_key_head_dim"] is None:
        fields["linear_key_head_dim"] = int(0.75 * fields["hidden_size"] / fields["linear_num_key_heads"])
    if fields["linear_value_head_dim"] is None:
        fields["linear_value_head_dim"] = 2 * fields["linear_key_head_dim"]
    return fields


def complete_kimi_linear(fields: Fields) -> Fields:
    """Fill in the kinds of layers, which published files list by their numbers, from 1, and the kinds of their MLPs."""
    layers, dense = fields["num_hidden_layers"], fields.pop("first_k_dense_replace", 1)
    published = fields.pop("linear_attn_config", None) or {}
    for name, field in (("head_dim", "linear_head_dim"), ("num_heads", "linear_num_heads"),
                        ("short_conv_kernel_size", "linear_conv_kernel_dim")):  # fmt: skip
        fields[field] = published.get(name, fields[field])
    if fields["layer_types"] is None and {"full_attn_layers", "kda_layers"} <= set(published):
        full, linear = set(published["full_attn_layers"]), set(published["kda_layers"])
        if full & linear or full | linear != set(range(1, layers + 1)):
            raise ConfigError(
                f"linear_attn_config in config.json has full_attn_layers {sorted(full)} and kda_layers "
                f"{sorted(linear)}; each of the layers from 1 to {layers} must be in one of the two"
            )
        fields["layer_types"] = [FULL if number in full else LINEAR for number in range(1, layers + 1)]
    if fields["layer_types"] is None:
        fields["layer_types"] = [FULL if index and index % 4 == 0 else LINEAR for index in range(layers)]
    if fields["mlp_layer_types"] is None:
        fields["mlp_layer_types"] = ["dense" if index < dense else "sparse" for index in range(layers)]
    if "sparse" not in fields["mlp_layer_types"]:
        fields["num_local_experts"] = 0
    return dict(complete_latent(fields))


def _build_convolution(theirs: str, kind: str) -> dict[str, Row]:
    """transformers saves equal parts of it, whatever their sections are; published files have the sections."""
    names = tuple(f"{theirs}{letter}_conv1d.weight" for letter in "qkv")
    sections = (("query",), ("key",), ("value",))
    return build_rows(Row(f"{OURS}self_attention.conv1d.weight", names, "stacked", sections=sections, kind=kind))


def _build_projection(theirs: str, kind: str, sections: Mapping[str, str]) -> dict[str, Row]:
    """sections: theirs -> ours."""
    names = tuple(f"{theirs}{name}.weight" for name in sections)
    parts = tuple((section,) for section in sections.values())
    return build_rows(Row(f"{OURS}self_attention.in_proj.weight", names, "sections", sections=parts, kind=kind))


_OLMO_LINEAR, _KIMI = f"{THEIRS}linear_attn.", f"{THEIRS}self_attn."
_QKV = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
_OLMO_HYBRID_ROWS = {
    **LLAMA_ROWS,
    **QK_NORMS,
    **_build_projection(
        _OLMO_LINEAR, "gated_delta_net", _QKV | {"g_proj": "z", "b_proj": "beta", "a_proj": "alpha"}
    ),
    **_build_convolution(_OLMO_LINEAR, "gated_delta_net"),
    **build_rows(*(Row(f"{OURS}self_attention.{name}", (f"{_OLMO_LINEAR}{name}",)) for name in ("A_log", "dt_bias"))),
    **rename_rows(f"{OURS}self_attention.", _OLMO_LINEAR, {"out_norm": "o_norm", "out_proj": "o_proj"}),
    # transformers has one name for the second norm of both kinds of layers.
    **rename_rows(
        OURS, THEIRS,
        {"input_layernorm": "attention_layer_norm", "pre_mlp_layernorm": "feedforward_layer_norm",
         "post_self_attn_layernorm": "feedforward_layer_norm", "post_mlp_layernorm": "post_feedforward_layernorm"},
    ),
}  # fmt: skip
_BLOCK = "block_sparse_moe"
_KIMI_ROWS = {
    **LATENT_ROWS,
    **{ours: dataclasses.replace(row, theirs=tuple(name.replace(".mlp.", f".{_BLOCK}.") for name in row.theirs))
       for ours, row in (SHARED_EXPERTS | EXPERT_BIAS | build_gated_rows("mlp", "mlp")).items()},
    **MIXTRAL_EXPERTS,
    **_build_projection(_KIMI, "kimi_delta", _QKV | {"b_proj": "beta"}),
    **_build_convolution(_KIMI, "kimi_delta"),
    **build_rows(
        Row(f"{OURS}self_attention.A_log", (f"{_KIMI}A_log",), "reshaped", shape=(1, 1, -1, 1)),
        Row(f"{OURS}self_attention.dt_bias", (f"{_KIMI}dt_bias",)),
    ),
    **rename_rows(
        f"{OURS}self_attention.", _KIMI,
        {"out_norm": "o_norm", "out_proj": "o_proj", "further_gates.g.down": "f_a_proj",
         "further_gates.g.up": "f_b_proj", "further_gates.z.down": "g_a_proj", "further_gates.z.up": "g_b_proj"},
    ),
}  # fmt: skip

DELTA_FAMILIES: tuple[Family, ...] = (
    Family(
        name="OLMo Hybrid",
        model_type="olmo_hybrid",
        model_class="OlmoHybridForCausalLM",
        # The norm of heads has a separate epsilon.
        flags=f"{LLAMA_FLAGS} --qk-layernorm --qk-norm-scope all --linear-norm-epsilon 1e-5",
        sizes=SIZES,
        settings=(
            *USUAL, *DELTA, ConfigKey("linear_allow_neg_eigval", "--linear-allow-neg-eigval", "switch", default=False),
            ConfigKey("layer_types", "--output-norm-freq", "full layers"),
        ),
        rows=in_pairs(_OLMO_HYBRID_ROWS),
        rotary_field="rope_parameters",
        letters=LayerLetters({LINEAR: "G", FULL: "*"}, mlps="dense"),
        published={".feedforward_layer_norm.": ".post_attention_layernorm."},
        defaults=DELTA_DEFAULTS["olmo_hybrid"],
        idle=frozenset(
            "linear_a_log_min linear_a_log_max linear_dt_min linear_dt_max linear_dt_init_floor".split()
        ),
        complete=complete_olmo_hybrid,
    ),
    Family(
        name="Kimi Linear",
        model_type="kimi_linear",
        model_class="KimiLinearForCausalLM",
        # Nothing is tied, whatever the field says. A part of each head would be rotated: no layer has positions. Norms
        # of latent vectors have another epsilon.
        flags=f"--multi-latent-attention --qk-layernorm {LLAMA_FLAGS} --position-embedding-type rope --rope-type rope "
        "--no-rope-freq 1 --latent-norm-epsilon 1e-6 --untie-embeddings-and-output-weights",
        sizes=LATENT_SIZES,
        settings=(
            NORM_EPSILON, *LATENT, *list_router_flags("num_local_experts"),
            *with_experts(
                ConfigKey("num_local_experts", "--num-experts"), TOP_K, EXPERT_WIDTH,
                ConfigKey("n_shared_experts*moe_intermediate_size", "--moe-shared-expert-intermediate-size"),
                ConfigKey("routed_scaling_factor", "--moe-router-topk-scaling-factor", default=1.0),
                *EXPERT_GROUPS, TWO_BEST,
            ),
            ConfigKey("linear_num_heads", "--linear-num-key-heads"),
            ConfigKey("linear_num_heads", "--linear-num-value-heads"),
            ConfigKey("linear_head_dim", "--linear-key-head-dim"),
            ConfigKey("linear_head_dim", "--linear-value-head-dim"),
            ConfigKey("linear_head_dim", "--linear-gate-rank"),
            ConfigKey("linear_conv_kernel_dim", "--linear-conv-kernel-dim"),
        ),
        rows=in_pairs(_KIMI_ROWS),
        is_rotary=False,
        letters=LayerLetters({LINEAR: "K", FULL: "+"}, mlps="mlp_layer_types"),
        published={f".{_BLOCK}.": ".mlp."},
        defaults=DELTA_DEFAULTS["kimi_linear"],
        idle=frozenset(
            """head_dim qk_head_dim tie_word_embeddings use_grouped_topk rope_theta rope_scaling rope_parameters
            num_nextn_predict_layers""".split()
        ),
        other_names={
            "model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob",
            "num_expert_group": "n_group", "num_experts": "num_local_experts",
            "num_experts_per_token": "num_experts_per_tok", "num_shared_experts": "n_shared_experts",
        },
        expects={"moe_layer_freq": 1, "mla_use_nope": True, "moe_router_activation_func": "sigmoid"},
        complete=complete_kimi_linear,
    ),
)  # fmt: skip
