# SPDX-License-Identifier: Apache-2.0
"""Fields of config.json files that several families share, each with the flag that it is, and families that start from
another one's. `families.py` and `hybrid_families.py` put them together; `family.py` says what a Setting means.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from megatron.training.recipes.family import ConfigKey, Family, Row
from megatron.training.recipes.family_defaults import DEFAULTS
from megatron.training.recipes.family_rows import LATENT_ROWS, LLAMA_ROWS, OUTPUT_NORM_ROWS, QK_NORMS, SHARED_EXPERTS

# ---- settings


def build_sizes(**renamed: str) -> tuple[ConfigKey, ...]:
    flags = {
        "num_hidden_layers": "--num-layers",
        "hidden_size": "--hidden-size",
        "intermediate_size": "--ffn-hidden-size",
        "num_attention_heads": "--num-attention-heads",
        "max_position_embeddings": "--max-position-embeddings",
    }
    return tuple(ConfigKey(renamed.get(theirs, theirs), flag) for theirs, flag in flags.items())


SIZES = (*build_sizes(), ConfigKey("num_key_value_heads", "--num-query-groups", "query groups"))
GPT2_SIZES = build_sizes(
    num_hidden_layers="n_layer", hidden_size="n_embd", intermediate_size="n_inner", num_attention_heads="n_head",
    max_position_embeddings="n_positions",
)  # fmt: skip

# Models whose heads together are not as wide as the hidden size say so here.
HEAD_WIDTH = ConfigKey("head_dim", "--kv-channels")
UNTIED = ConfigKey("tie_word_embeddings", "--untie-embeddings-and-output-weights", "inverted switch", default=True)
NORM_EPSILON = ConfigKey("rms_norm_eps", "--norm-epsilon", default=1e-5)
ROTARY_BASE = ConfigKey("rope_parameters.rope_theta|rope_theta", "--rotary-base", default=10000)
ROTARY_SHARE = ConfigKey("rope_parameters.partial_rotary_factor|partial_rotary_factor", "--rotary-percent", default=1.0)
USUAL = (UNTIED, NORM_EPSILON, ROTARY_BASE)
# The same two settings, as these families call them.
GPT2_EPSILON = ConfigKey("layer_norm_epsilon", "--norm-epsilon", default=1e-5)
NEMOTRON_EPSILON = ConfigKey("norm_eps", "--norm-epsilon", default=1e-5)
GPT_NEOX_USUAL = (
    UNTIED,
    ConfigKey("layer_norm_eps", "--norm-epsilon", default=1e-5),
    ConfigKey("rope_parameters.rope_theta|rotary_emb_base", "--rotary-base", default=10000),
    ConfigKey("rope_parameters.partial_rotary_factor|rotary_pct", "--rotary-percent", default=1.0),
)
# A window counts the token itself in their files; Setting's form "window" says how ours does.
WINDOW = ConfigKey("sliding_window", "--window-size", "window")
WINDOW_LAYERS = ConfigKey("layer_types", "--window-attn-skip-freq", "window layers")
# Qwen's files hold a window also where it is switched off.
QWEN_WINDOWS = (
    ConfigKey("sliding_window", "--window-size", "window", only_if="use_sliding_window"),
    ConfigKey("layer_types", "--window-attn-skip-freq", "window layers", only_if="use_sliding_window"),
)
# Gemma multiplies embeddings by the root of the hidden size, and scales scores by a separate size.
EMBEDDING_MULTIPLIER = ConfigKey("hidden_size", "--embedding-multiplier", "root")
SCORE_SCALE = ConfigKey("query_pre_attn_scalar", "--softmax-scale", "inverse root", needed=True)
SOFT_CAPS = (
    ConfigKey("attn_logit_softcapping", "--attn-logit-softcapping"),
    ConfigKey("final_logit_softcapping", "--final-logit-softcapping"),
)
TOP_K = ConfigKey("num_experts_per_tok", "--moe-router-topk", needed=True)
EXPERT_WIDTH = ConfigKey("moe_intermediate_size", "--moe-ffn-hidden-size")
UNNORMALISED = ConfigKey("norm_topk_prob", "--moe-router-pre-softmax", "inverted switch", default=True)

# Latent attention has keys and values of all heads; their files count these once more.
LATENT_SIZES = (*build_sizes(), ConfigKey("num_key_value_heads", "--num-attention-heads"))
LATENT = (
    ConfigKey("q_lora_rank", "--q-lora-rank"),
    ConfigKey("kv_lora_rank", "--kv-lora-rank"),
    ConfigKey("qk_nope_head_dim", "--qk-head-dim"),
    ConfigKey("qk_rope_head_dim", "--qk-pos-emb-head-dim"),
    ConfigKey("v_head_dim", "--v-head-dim"),
)
DEEPSEEK_EXPERTS = (
    ConfigKey("n_routed_experts", "--num-experts"),
    TOP_K,
    EXPERT_WIDTH,
    ConfigKey("n_shared_experts*moe_intermediate_size", "--moe-shared-expert-intermediate-size"),
    ConfigKey("first_k_dense_replace", "--moe-layer-freq", "dense layers first", default=0),
    ConfigKey("routed_scaling_factor", "--moe-router-topk-scaling-factor", default=1.0),
)
EXPERT_GROUPS = (
    ConfigKey("n_group", "--moe-router-num-groups", "groups", default=1),
    ConfigKey("topk_group", "--moe-router-group-topk", "groups", default=1),
)
TWO_BEST = ConfigKey("topk_group", "--moe-router-group-score", "two best")
FURTHER_TOKENS = ConfigKey("num_nextn_predict_layers", "--mtp-num-layers", default=0)
LLAMA4_SIZES = (
    *build_sizes(intermediate_size="intermediate_size_mlp"),
    ConfigKey("num_key_value_heads", "--num-query-groups", "query groups"),
)
LLAMA4_ATTENTION = (
    ConfigKey("no_rope_layers", "--no-rope-freq", "layers without positions"),
    ConfigKey("attention_chunk_size", "--attention-chunk-size"),
    ConfigKey("layer_types", "--window-attn-skip-freq", "window layers"),
    ConfigKey("attn_scale", "--attn-temperature-scale", only_if="attn_temperature_tuning"),
    ConfigKey("floor_scale", "--attn-temperature-floor", default=8192),
    ConfigKey("use_qk_norm", "--qk-l2-norm", "switch", default=False),
    ConfigKey("use_qk_norm", "--qk-l2-norm-layers", "switch", default=False, word="rotary"),
)
TEMPERATURE = (
    ConfigKey("rope_parameters.llama_4_scaling_beta", "--attn-temperature-scale", default=0, needed=True),
    ConfigKey("rope_parameters.original_max_position_embeddings", "--attn-temperature-floor", default=8192),
)
# One width for routed experts and the shared one.
LLAMA4_EXPERTS = (
    ConfigKey("num_local_experts", "--num-experts"),
    TOP_K,
    ConfigKey("intermediate_size", "--moe-ffn-hidden-size"),
    ConfigKey("intermediate_size", "--moe-shared-expert-intermediate-size"),
    ConfigKey("moe_layers", "--moe-layer-freq", "layers with experts"),
)


# ---- the families

ALL_BIASES = ("--add-qkv-bias", "--add-attention-output-bias", "--add-mlp-bias")
ATTENTION_BIAS = tuple(ConfigKey("attention_bias", flag, "switch", default=False) for flag in ALL_BIASES[:2])
MLP_BIAS = ConfigKey("mlp_bias", "--add-mlp-bias", "switch", default=False)
GRANITE_MULTIPLIERS = (
    ConfigKey("embedding_multiplier", "--embedding-multiplier", default=1.0),
    ConfigKey("logits_scaling", "--logit-multiplier", "inverse", default=1.0),
    ConfigKey("residual_multiplier", "--residual-multiplier", default=1.0),
    ConfigKey("attention_multiplier", "--softmax-scale", needed=True),
)


def with_experts(*settings: ConfigKey) -> tuple[ConfigKey, ...]:
    """The settings, where the model has experts."""
    return tuple(dataclasses.replace(setting, with_experts=True) for setting in settings)


def list_router_flags(count: str) -> tuple[ConfigKey, ...]:
    """Sigmoid scores, and a bias in the choice of experts; count: the field with their number."""
    return with_experts(
        ConfigKey(count, "--moe-router-score-function", "switch", word="sigmoid"),
        ConfigKey(count, "--moe-router-enable-expert-bias", "switch"),
    )


LLAMA_FLAGS = "--normalization RMSNorm --swiglu --disable-bias-linear"
GEMMA_FLAGS = "--normalization RMSNorm --apply-layernorm-1p --geglu --openai-gelu --disable-bias-linear"
# Other names of fields, which the classes of transformers take for these.
ROUTED = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}
HALF_ROTATED = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}


def start_from(
    flags: str, settings: tuple[ConfigKey, ...], rows: Mapping[str, Row], **usual: Any
) -> Callable[..., Family]:
    """Return a function of a family's name, model_type, model_class and parts: its flags, settings and rows are added
    to these, and other parts replace parts of `usual`."""

    def build(name: str, model_type: str, model_class: str, **parts: Any) -> Family:
        return Family(
            name=name,
            model_type=model_type,
            model_class=model_class,
            flags=f"{flags} {parts.pop('flags', '')}".strip(),
            settings=(*settings, *parts.pop("settings", ())),
            rows=tuple({**rows, **parts.pop("rows", {})}.values()),
            **{"sizes": SIZES, "defaults": DEFAULTS.get(model_type), **usual, **parts},
        )

    return build


build_family = start_from("", (), {})
# Mistral, Qwen and many others start from Llama.
build_llama = start_from(LLAMA_FLAGS, USUAL, LLAMA_ROWS)
build_gemma = start_from(GEMMA_FLAGS, (UNTIED, NORM_EPSILON, HEAD_WIDTH, EMBEDDING_MULTIPLIER), LLAMA_ROWS)
build_olmo = start_from(
    f"{LLAMA_FLAGS} --norm-placement output --qk-layernorm --qk-norm-scope all",
    (UNTIED, NORM_EPSILON, HEAD_WIDTH), OUTPUT_NORM_ROWS | QK_NORMS,
)  # fmt: skip
# Norms of latent vectors have this epsilon whatever the others have. The number itself follows in USUAL.
_LATENT_EPSILON = ConfigKey("rms_norm_eps", "--latent-norm-epsilon", "switch", default=1e-6, word="1e-6")
# Latent attention, and experts after a few dense layers.
build_deepseek = start_from(
    f"--multi-latent-attention --qk-layernorm {LLAMA_FLAGS}", (_LATENT_EPSILON, *USUAL, *LATENT, *DEEPSEEK_EXPERTS),
    LATENT_ROWS | SHARED_EXPERTS, sizes=LATENT_SIZES,
    # The class makes these two of others.
    idle=frozenset(("head_dim", "qk_head_dim")),
)  # fmt: skip
