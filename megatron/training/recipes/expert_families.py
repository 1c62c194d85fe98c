# SPDX-License-Identifier: Apache-2.0
"""Families with experts whose layers other families have, too; see `further_families.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from megatron.core.errors import ConfigError
from megatron.training.recipes.family import ConfigKey, Family, Row
from megatron.training.recipes.family_defaults import Fields, complete_latent, fill_layers, list_layers, size, without
from megatron.training.recipes.family_rows import (
    BIASED_ATTENTION,
    BIASED_ROWS,
    EXPERT_BIAS,
    EXPERTS,
    MIXTRAL_EXPERTS,
    MLP_BIASES,
    OURS,
    QK_NORMS,
    QKV_BIAS,
    SHARED_EXPERTS,
    THEIRS,
    build_gated_biases,
    build_gated_rows,
    build_rows,
    rename_rows,
    without_rows,
)
from megatron.training.recipes.family_settings import (
    ALL_BIASES,
    ATTENTION_BIAS,
    DEEPSEEK_EXPERTS,
    EMBEDDING_MULTIPLIER,
    EXPERT_GROUPS,
    EXPERT_WIDTH,
    GRANITE_MULTIPLIERS,
    HEAD_WIDTH,
    ROTARY_BASE,
    ROTARY_SHARE,
    SIZES,
    TEMPERATURE,
    TOP_K,
    TWO_BEST,
    UNNORMALISED,
    WINDOW,
    WINDOW_LAYERS,
    build_deepseek,
    build_llama,
    build_olmo,
    list_router_flags,
    with_experts,
)
from megatron.training.recipes.further_families import (
    EXAONE_PATTERN,
    EXAONE_WINDOWS,
    HUNYUAN_FLAGS,
    HUNYUAN_ROWS,
    complete_exaone,
    complete_hunyuan,
)

_GRANITE = size(32, 4096, 11008, 32, None, 2048) | {
    "attention_bias": False, "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
    "attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
_DEFAULTS: Mapping[str, Fields] = {
    "minimax_m2": size(62, 3072, 1536, 48, 8, 196608)
    | {"head_dim": 128, "num_experts_per_tok": 8, "num_local_experts": 256},
    "glm4_moe_lite": size(47, 2048, 10240, 20, 20, 202752)
    | {
        "rms_norm_eps": 1e-5, "moe_intermediate_size": 1536, "n_shared_experts": 1, "n_routed_experts": 64,
        "routed_scaling_factor": 1.8, "kv_lora_rank": 512, "q_lora_rank": 768, "qk_rope_head_dim": 64,
        "v_head_dim": 256, "qk_nope_head_dim": 192, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4,
        "norm_topk_prob": True, "rope_interleave": True, "mlp_layer_types": None, "attention_bias": False,
    },
    "dots1": size(62, 4608, 10944, 32, 32, 2048)
    | {
        "moe_intermediate_size": 1408, "n_shared_experts": None, "n_routed_experts": None, "n_group": 1,
        "topk_group": 1, "num_experts_per_tok": None, "first_k_dense_replace": 0, "norm_topk_prob": False,
        "attention_bias": False, "routed_scaling_factor": 1.0, "sliding_window": 4096, "max_window_layers": 62,
        "layer_types": None,
    },
    "ernie4_5_moe": size(28, 2560, 12288, 20, 4, 131072)
    | {
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "use_bias": False, "moe_intermediate_size": 1536, "moe_k": 6,
        "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1,
        "moe_layer_interval": 1, "moe_norm_min": 1e-12,
    },
    "mistral4": size(36, 4096, 12288, 32, 32, 1048576)
    | {
        "moe_intermediate_size": 2048, "n_shared_experts": 1, "n_routed_experts": 128, "routed_scaling_factor": 1.0,
        "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 64,
        "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4, "first_k_dense_replace": 0, "norm_topk_prob": True,
        "rope_interleave": True, "attention_bias": False,
    },
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE | {"shared_intermediate_size": 0},
    "solar_open": without(size(48, 4096, 0, 64, 8, 131072), "intermediate_size")
    | {
        "rms_norm_eps": 1e-5, "attention_bias": False, "moe_intermediate_size": 1280, "num_experts_per_tok": 8,
        "n_shared_experts": 1, "n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "head_dim": 128,
    },
    "hy_v3": size(80, 4096, 13312, 64, 8, 131072)
    | {
        "head_dim": 128, "rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False, "num_experts": 192,
        "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 1536,
        "router_scaling_factor": 2.826, "mlp_layer_types": None,
    },
    "hunyuan_v1_moe": size(32, 4096, 11008, 32, None, 2048)
    | {"rms_norm_eps": 1e-5, "attention_bias": False, "num_experts": 1, "moe_topk": 1, "head_dim": None},
    "exaone_moe": size(32, 4096, 16384, 32, 32, 2048)
    | {
        "rms_norm_eps": 1e-5, "sliding_window": 4096, "layer_types": None, "mlp_layer_types": None,
        "first_k_dense_replace": 1, "moe_intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8,
        "num_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1,
    },
    "flex_olmo": size(32, 4096, 11008, 32, None, 4096)
    | {"attention_bias": False, "num_experts_per_tok": 5, "num_experts": 7, "norm_topk_prob": False},
    "afmoe": size(32, 2048, 6144, 16, None, 16384)
    | {
        "rms_norm_eps": 1e-5, "moe_intermediate_size": 1408, "num_dense_layers": 1, "head_dim": 128, "num_experts": 64,
        "num_experts_per_tok": 6, "num_shared_experts": 2, "route_scale": 1.0, "global_attn_every_n_layers": 4,
        "sliding_window": 1024, "layer_types": None, "mup_enabled": False, "attention_bias": False,
    },
}  # fmt: skip


def _complete_minimax_m2(fields: Fields) -> Fields:
    """Fill in the share of a head that is rotated, which the published files say in channels."""
    channels = fields.pop("rotary_dim", None)
    if channels is not None:
        fields.setdefault("partial_rotary_factor", channels / fields["head_dim"])
    return fields


def _fill_mlps(fields: Fields, dense: int = 1) -> Fields:
    """Fill in the kinds of MLPs: after a few dense ones all have experts."""
    if fields["mlp_layer_types"] is None:
        fields["mlp_layer_types"] = ["dense" if layer <= dense else "sparse" for layer in list_layers(fields)]
    return fields


def _complete_dots1(fields: Fields) -> Fields:
    """Fill in the layers: all after the first ones have the window. Without experts, nothing is set."""
    first = fields.pop("max_window_layers")
    if fields["n_routed_experts"] is None:
        fields["norm_topk_prob"] = True
    elif fields["num_experts_per_tok"] is None:
        raise ConfigError("num_experts_per_tok is null in config.json; a model with experts needs it")
    has_window = fields["sliding_window"] is not None
    fill_layers(fields, {layer: has_window and layer > first for layer in list_layers(fields)})
    return fields


def _complete_exaone_moe(fields: Fields) -> Fields:
    return complete_exaone(_fill_mlps(fields, fields.pop("first_k_dense_replace")))


def _complete_afmoe(fields: Fields) -> Fields:
    """Fill in the layers: every so many see everything."""
    every = fields.pop("global_attn_every_n_layers")
    fill_layers(fields, {layer: layer % every != 0 for layer in list_layers(fields)})
    return fields


def _complete_ernie(fields: Fields) -> Fields:
    """Fill in the last layer with experts."""
    last = fields["moe_layer_end_index"]
    return fields | {"moe_layer_end_index": fields["num_hidden_layers"] - 1 if last == -1 else last}


def _complete_mistral4(fields: Fields) -> Fields:
    """Fill in the positions, which are stretched where nothing else is said."""
    if not fields.get("rope_scaling") and fields["rope_parameters"] is None:
        fields["rope_parameters"] = {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        }  # fmt: skip
    turned, width = fields["qk_rope_head_dim"], fields["qk_rope_head_dim"] + fields["qk_nope_head_dim"]
    # The width of a whole head here, and of its rotated part in what is common to all.
    if fields.get("head_dim") == width:
        fields["head_dim"] = turned
    return complete_latent(fields)


_SIGMOID = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
_EXPERTS_BY_WORD = ConfigKey("mlp_layer_types", "--moe-layer-freq", "layers with experts", word="sparse")


def _list_experts(scaling: str = "routed_scaling_factor") -> tuple[ConfigKey, ...]:
    """Fields of routed and shared experts; scaling: the name of the factor on the routed ones."""
    return (
        ConfigKey("num_experts", "--num-experts"), TOP_K, EXPERT_WIDTH,
        ConfigKey("num_shared_experts*moe_intermediate_size", "--moe-shared-expert-intermediate-size"),
        ConfigKey(scaling, "--moe-router-topk-scaling-factor", default=1.0),
    )  # fmt: skip


_GRANITE_ROWS = BIASED_ATTENTION | rename_rows(
    OURS, THEIRS,
    {"mlp.experts.linear_fc1": "block_sparse_moe.input_linear", "mlp.experts.linear_fc2":
     "block_sparse_moe.output_linear", "mlp.router": "block_sparse_moe.router.layer",
     "mlp.shared_experts.linear_fc1": "shared_mlp.input_linear",
     "mlp.shared_experts.linear_fc2": "shared_mlp.output_linear"},
)  # fmt: skip
_GRANITE_SETTINGS = (
    HEAD_WIDTH, *ATTENTION_BIAS, *GRANITE_MULTIPLIERS, ConfigKey("num_local_experts", "--num-experts"), TOP_K,
)  # fmt: skip
# Trinity's names of the router and of its bias, which Hunyuan has, too.
_ROUTER_ROWS = {
    **rename_rows(OURS, THEIRS, {"mlp.router": "mlp.router.gate"}),
    **build_rows(Row(f"{OURS}mlp.router.expert_bias", (f"{THEIRS}mlp.expert_bias",))),
}

EXPERT_FAMILIES: tuple[Family, ...] = (
    build_llama(
        "MiniMax M2", "minimax_m2", "MiniMaxM2ForCausalLM",
        flags=f"--qk-layernorm --qk-norm-scope all {_SIGMOID}",
        settings=(HEAD_WIDTH, ROTARY_SHARE, ConfigKey("num_local_experts", "--num-experts"), TOP_K),
        rows={
            **QK_NORMS, **MIXTRAL_EXPERTS,
            **build_rows(
                Row(f"{OURS}mlp.router.expert_bias", (f"{THEIRS}block_sparse_moe.e_score_correction_bias",))
            ),
        },
        defaults=_DEFAULTS["minimax_m2"],
        other_names={"num_experts": "num_local_experts"},
        rope={"rope_theta": 5000000.0}, complete=_complete_minimax_m2,
    ),
    build_deepseek(
        "GLM 4.7 Flash", "glm4_moe_lite", "Glm4MoeLiteForCausalLM",
        flags=_SIGMOID, settings=(_EXPERTS_BY_WORD, *EXPERT_GROUPS, TWO_BEST), rows=EXPERT_BIAS,
        other_names={"num_local_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"},
        idle=frozenset(("qk_head_dim",)),
        complete=lambda fields: complete_latent(_fill_mlps(fields, fields.pop("first_k_dense_replace", 1))),
        defaults=_DEFAULTS["glm4_moe_lite"],
    ),
    build_deepseek(
        "Mistral Small 4", "mistral4", "Mistral4ForCausalLM",
        flags="--attn-temperature-layers all",
        settings=(
            *TEMPERATURE, *EXPERT_GROUPS, TWO_BEST,
            ConfigKey("rope_parameters.partial_rotary_factor", "--qk-pos-emb-head-dim", "rotated share"),
            ConfigKey("norm_topk_prob", "--moe-router-score-function", "switch", default=False, word="softmax-share"),
            UNNORMALISED,
        ),
        rows=build_rows(
            Row(f"{OURS}mlp.experts.linear_fc1.weight", (f"{THEIRS}mlp.experts.gate_up_proj",)),
            Row(f"{OURS}mlp.experts.linear_fc2.weight", (f"{THEIRS}mlp.experts.down_proj",)),
        ),
        other_names={"num_local_experts": "n_routed_experts"}, idle=frozenset(("head_dim", "qk_head_dim")),
        complete=_complete_mistral4, defaults=_DEFAULTS["mistral4"],
    ),
    build_llama(
        "ERNIE 4.5 MoE", "ernie4_5_moe", "Ernie4_5_MoeForCausalLM",
        flags="--rotary-interleaved --moe-router-score-function softmax-share --moe-router-enable-expert-bias",
        settings=(
            HEAD_WIDTH,
            *(
                ConfigKey("use_bias", flag, "switch", default=False)
                for flag in (*ALL_BIASES, "--add-output-layer-bias")
            ),
            ConfigKey("moe_num_experts", "--num-experts"), ConfigKey("moe_k", "--moe-router-topk", needed=True),
            EXPERT_WIDTH,
            ConfigKey("moe_num_shared_experts*moe_intermediate_size", "--moe-shared-expert-intermediate-size"),
            ConfigKey(
                "moe_layer_start_index|moe_layer_end_index|moe_layer_interval", "--moe-layer-freq", "expert span"
            ),
        ),
        rows={
            **BIASED_ROWS, **MLP_BIASES, **SHARED_EXPERTS, **build_gated_biases("mlp.shared_experts"),
            **rename_rows("", "", {"output_layer": "lm_head"}, "bias"),
            **build_rows(
                Row(
                    f"{OURS}mlp.router.expert_bias", (f"{THEIRS}mlp.moe_statics.e_score_correction_bias",), "reshaped",
                    shape=(1, -1),
                )
            ),
        },
        other_names={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        rope={"rope_theta": 500000.0}, complete=_complete_ernie, defaults=_DEFAULTS["ernie4_5_moe"],
    ),
    build_llama(
        "dots.llm1", "dots1", "Dots1ForCausalLM",
        flags="--qk-layernorm",
        settings=(
            HEAD_WIDTH, *ATTENTION_BIAS, WINDOW, WINDOW_LAYERS, *list_router_flags("n_routed_experts"),
            *with_experts(
                *(setting for setting in DEEPSEEK_EXPERTS if setting != TOP_K), *EXPERT_GROUPS, TWO_BEST,
                dataclasses.replace(TOP_K, needed=False),
            ),
        ),
        rows={**BIASED_ATTENTION, **QK_NORMS, **SHARED_EXPERTS, **EXPERT_BIAS},
        other_names={"num_local_experts": "n_routed_experts"}, expects={"norm_topk_prob": True},
        complete=_complete_dots1, defaults=_DEFAULTS["dots1"],
    ),
    build_llama(
        "Granite 3 MoE", "granitemoe", "GraniteMoeForCausalLM",
        settings=_GRANITE_SETTINGS, rows=without_rows(_GRANITE_ROWS, "shared"), defaults=_DEFAULTS["granitemoe"],
    ),
    build_llama(
        "Granite 3 MoE, with a shared expert", "granitemoeshared", "GraniteMoeSharedForCausalLM",
        settings=(
            *_GRANITE_SETTINGS,
            ConfigKey("shared_intermediate_size", "--moe-shared-expert-intermediate-size", default=0),
        ),
        rows=_GRANITE_ROWS, defaults=_DEFAULTS["granitemoeshared"],
    ),
    build_llama(
        "Solar Open", "solar_open", "SolarOpenForCausalLM",
        flags=_SIGMOID,
        sizes=tuple(setting for setting in SIZES if setting.theirs != "intermediate_size"),
        settings=(
            HEAD_WIDTH, ROTARY_SHARE, ATTENTION_BIAS[0], *EXPERT_GROUPS, TWO_BEST,
            *(setting for setting in DEEPSEEK_EXPERTS if setting.form != "dense layers first"),
        ),
        rows={**QKV_BIAS, **SHARED_EXPERTS, **EXPERT_BIAS},
        other_names={"num_local_experts": "n_routed_experts"},
        rope={"rope_theta": 1000000.0}, defaults=_DEFAULTS["solar_open"],
    ),
    build_llama(
        "Hunyuan 3", "hy_v3", "HYV3ForCausalLM",
        flags=f"--qk-layernorm {_SIGMOID}",
        settings=(HEAD_WIDTH, *ATTENTION_BIAS, *_list_experts("router_scaling_factor"), _EXPERTS_BY_WORD),
        rows={
            **BIASED_ATTENTION, **QK_NORMS, **EXPERTS, **_ROUTER_ROWS,
            **build_gated_rows("mlp.shared_experts", "mlp.shared_mlp"),
        },
        # A sum in float32: rounding alone.
        idle=frozenset(("enable_moe_fp32_combine",)), other_names={"num_local_experts": "num_experts"},
        rope={"rope_theta": 11158840.0}, complete=_fill_mlps, defaults=_DEFAULTS["hy_v3"],
    ),
    build_llama(
        "Hunyuan MoE", "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM",
        flags=HUNYUAN_FLAGS,
        settings=(
            HEAD_WIDTH, *ATTENTION_BIAS, ConfigKey("num_experts", "--num-experts"),
            ConfigKey("moe_topk", "--moe-router-topk", needed=True),
            # The shared expert is as wide as each of the others.
            ConfigKey("intermediate_size", "--moe-shared-expert-intermediate-size"),
        ),
        rows={
            **HUNYUAN_ROWS, **EXPERTS, **build_gated_rows("mlp.shared_experts", "mlp.shared_mlp"),
            **rename_rows(OURS, THEIRS, {"mlp.router": "mlp.gate.wg"}),
        },
        idle=frozenset(("eod_token_id", "sep_token_id")),
        other_names={"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"},
        complete=complete_hunyuan, defaults=_DEFAULTS["hunyuan_v1_moe"],
    ),
    build_llama(
        "K-EXAONE", "exaone_moe", "ExaoneMoeForCausalLM",
        flags=f"--qk-layernorm {_SIGMOID}",
        settings=(HEAD_WIDTH, *EXAONE_WINDOWS, *_list_experts(), _EXPERTS_BY_WORD, *EXPERT_GROUPS, TWO_BEST),
        rows={
            **QK_NORMS, **SHARED_EXPERTS,
            **build_rows(Row(f"{OURS}mlp.router.expert_bias", (f"{THEIRS}mlp.e_score_correction_bias",))),
        },
        idle=EXAONE_PATTERN, other_names={"sliding_window_pattern": "window_pattern"},
        complete=_complete_exaone_moe, defaults=_DEFAULTS["exaone_moe"],
    ),
    build_olmo(
        "FlexOlmo", "flex_olmo", "FlexOlmoForCausalLM",
        settings=(ROTARY_BASE, *ATTENTION_BIAS, ConfigKey("num_experts", "--num-experts"), TOP_K, UNNORMALISED),
        rows={**BIASED_ATTENTION, **EXPERTS}, other_names={"num_local_experts": "num_experts"},
        rope={"rope_theta": 500000.0}, defaults=_DEFAULTS["flex_olmo"],
    ),
    build_llama(
        "Arcee Trinity", "afmoe", "AfmoeForCausalLM",
        flags=f"--norm-placement both --qk-layernorm --attention-output-gate {_SIGMOID}",
        settings=(
            HEAD_WIDTH, WINDOW, WINDOW_LAYERS, ConfigKey("layer_types", "--no-rope-freq", "full layers"),
            dataclasses.replace(EMBEDDING_MULTIPLIER, only_if="mup_enabled"), *_list_experts("route_scale"),
            ConfigKey("num_dense_layers", "--moe-layer-freq", "dense layers first", default=0),
        ),
        rows={
            **SHARED_EXPERTS, **QK_NORMS, **_ROUTER_ROWS,
            **rename_rows(
                OURS, THEIRS,
                {"pre_mlp_layernorm": "pre_mlp_layernorm", "post_self_attn_layernorm": "post_attention_layernorm",
                 "post_mlp_layernorm": "post_mlp_layernorm"},
            ),
            **build_rows(
                Row(
                    f"{OURS}self_attention.linear_qkv.weight",
                    tuple(f"{THEIRS}self_attn.{name}_proj.weight" for name in ("q", "gate", "k", "v")), "qkv",
                )
            ),
        },
        complete=_complete_afmoe, defaults=_DEFAULTS["afmoe"],
    ),
)  # fmt: skip
