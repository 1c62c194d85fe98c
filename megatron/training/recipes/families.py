# SPDX-License-Identifier: Apache-2.0
"""The table of model families: their flags, the fields of their config.json, and the names of their weights.

docs/models.md lists the flags of published models as this table gives them; the tests compare tiny random models of
every family with those of Hugging Face transformers, through the files that transformers writes. `family.py` says what
the entries mean. Sources: the configuration classes of transformers, and the files of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.errors import ConfigError
from megatron.training.recipes.family import Family, Row, Setting
from megatron.training.recipes.family_defaults import (
    DEFAULTS,
    complete_alternating,
    complete_deepseek_v2,
    complete_gemma,
    complete_gemma3,
    complete_gpt_oss,
    complete_latent,
    complete_llama4,
    complete_phi3,
    complete_qwen,
    complete_qwen2_moe,
    complete_qwen3_moe,
    complete_smollm3,
)
from megatron.training.recipes.family_rows import (
    EXPERT_BIAS,
    EXPERTS,
    GPT2_ROWS,
    GPT_NEOX_ROWS,
    GPT_OSS_EXPERTS,
    LATENT_ROWS,
    LLAMA4_ROWS,
    LLAMA_ROWS,
    MIXTRAL_EXPERTS,
    NEMOTRON_ROWS,
    OURS,
    OUTPUT_NORMS,
    PHI3_ROWS,
    PREDICTION_ROWS,
    QK_NORMS,
    QKV_BIAS,
    SANDWICH_NORMS,
    SHARED_EXPERTS,
    THEIRS,
    build_gated_rows,
    build_rows,
    rename_rows,
    without_rows,
)

# ---- settings


def _build_sizes(**renamed: str) -> tuple[Setting, ...]:
    flags = {
        "num_hidden_layers": "--num-layers",
        "hidden_size": "--hidden-size",
        "intermediate_size": "--ffn-hidden-size",
        "num_attention_heads": "--num-attention-heads",
        "max_position_embeddings": "--max-position-embeddings",
    }
    return tuple(Setting(renamed.get(theirs, theirs), flag) for theirs, flag in flags.items())


SIZES = (*_build_sizes(), Setting("num_key_value_heads", "--num-query-groups", "query groups"))
GPT2_SIZES = _build_sizes(
    num_hidden_layers="n_layer", hidden_size="n_embd", intermediate_size="n_inner", num_attention_heads="n_head",
    max_position_embeddings="n_positions",
)  # fmt: skip

# Models whose heads together are not as wide as the hidden size say so here.
HEAD_WIDTH = Setting("head_dim", "--kv-channels")
UNTIED = Setting("tie_word_embeddings", "--untie-embeddings-and-output-weights", "inverted switch", default=True)
NORM_EPSILON = Setting("rms_norm_eps", "--norm-epsilon", default=1e-5)
ROTARY_BASE = Setting("rope_parameters.rope_theta|rope_theta", "--rotary-base", default=10000)
ROTARY_SHARE = Setting("rope_parameters.partial_rotary_factor|partial_rotary_factor", "--rotary-percent", default=1.0)
USUAL = (UNTIED, NORM_EPSILON, ROTARY_BASE)
# The same two settings, as these families call them.
GPT2_EPSILON = Setting("layer_norm_epsilon", "--norm-epsilon", default=1e-5)
NEMOTRON_EPSILON = Setting("norm_eps", "--norm-epsilon", default=1e-5)
GPT_NEOX_USUAL = (
    UNTIED,
    Setting("layer_norm_eps", "--norm-epsilon", default=1e-5),
    Setting("rope_parameters.rope_theta|rotary_emb_base", "--rotary-base", default=10000),
    Setting("rope_parameters.partial_rotary_factor|rotary_pct", "--rotary-percent", default=1.0),
)
# A window counts the token itself in their files; Setting's form "window" says how ours does.
WINDOW = Setting("sliding_window", "--window-size", "window")
WINDOW_LAYERS = Setting("layer_types", "--window-attn-skip-freq", "window layers")
# Qwen's files hold a window also where it is switched off.
QWEN_WINDOWS = (
    Setting("sliding_window", "--window-size", "window", only_if="use_sliding_window"),
    Setting("layer_types", "--window-attn-skip-freq", "window layers", only_if="use_sliding_window"),
)
# Gemma multiplies embeddings by the root of the hidden size, and scales scores by a size of their own.
EMBEDDING_MULTIPLIER = Setting("hidden_size", "--embedding-multiplier", "root")
SCORE_SCALE = Setting("query_pre_attn_scalar", "--softmax-scale", "inverse root", needed=True)
SOFT_CAPS = (
    Setting("attn_logit_softcapping", "--attn-logit-softcapping"),
    Setting("final_logit_softcapping", "--final-logit-softcapping"),
)
TOP_K = Setting("num_experts_per_tok", "--moe-router-topk", needed=True)
EXPERT_WIDTH = Setting("moe_intermediate_size", "--moe-ffn-hidden-size")
UNNORMALISED = Setting("norm_topk_prob", "--moe-router-pre-softmax", "inverted switch", default=True)

# Latent attention has keys and values of all heads; their files count these once more.
LATENT_SIZES = (*_build_sizes(), Setting("num_key_value_heads", "--num-attention-heads"))
LATENT = (
    Setting("q_lora_rank", "--q-lora-rank"),
    Setting("kv_lora_rank", "--kv-lora-rank"),
    Setting("qk_nope_head_dim", "--qk-head-dim"),
    Setting("qk_rope_head_dim", "--qk-pos-emb-head-dim"),
    Setting("v_head_dim", "--v-head-dim"),
)
DEEPSEEK_EXPERTS = (
    Setting("n_routed_experts", "--num-experts"),
    TOP_K,
    EXPERT_WIDTH,
    Setting("n_shared_experts*moe_intermediate_size", "--moe-shared-expert-intermediate-size"),
    Setting("first_k_dense_replace", "--moe-layer-freq", "dense layers first", default=0),
    Setting("routed_scaling_factor", "--moe-router-topk-scaling-factor", default=1.0),
)
EXPERT_GROUPS = (
    Setting("n_group", "--moe-router-num-groups", "groups", default=1),
    Setting("topk_group", "--moe-router-group-topk", "groups", default=1),
)
TWO_BEST = Setting("topk_group", "--moe-router-group-score", "two best")
FURTHER_TOKENS = Setting("num_nextn_predict_layers", "--mtp-num-layers", default=0)
LLAMA4_SIZES = (
    *_build_sizes(intermediate_size="intermediate_size_mlp"),
    Setting("num_key_value_heads", "--num-query-groups", "query groups"),
)
LLAMA4_ATTENTION = (
    Setting("no_rope_layers", "--no-rope-freq", "layers without positions"),
    Setting("attention_chunk_size", "--attention-chunk-size"),
    Setting("layer_types", "--window-attn-skip-freq", "window layers"),
    Setting("attn_scale", "--attn-temperature-scale", only_if="attn_temperature_tuning"),
    Setting("floor_scale", "--attn-temperature-floor", default=8192),
    Setting("use_qk_norm", "--qk-l2-norm", "switch", default=False),
    Setting("use_qk_norm", "--qk-l2-norm-layers", "switch", default=False, word="rotary"),
)
# One width for routed experts and the shared one.
LLAMA4_EXPERTS = (
    Setting("num_local_experts", "--num-experts"),
    TOP_K,
    Setting("intermediate_size", "--moe-ffn-hidden-size"),
    Setting("intermediate_size", "--moe-shared-expert-intermediate-size"),
    Setting("moe_layers", "--moe-layer-freq", "layers with experts"),
)


# ---- the families

LLAMA_FLAGS = "--normalization RMSNorm --swiglu --disable-bias-linear"
GEMMA_FLAGS = "--normalization RMSNorm --apply-layernorm-1p --geglu --openai-gelu --disable-bias-linear"
# Other names of fields, which the classes of transformers take for these.
ROUTED = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}
HALF_ROTATED = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}


def _gemma(name: str, model_type: str, model_class: str, **parts: Any) -> Family:
    return Family(
        name=name,
        model_type=model_type,
        model_class=model_class,
        flags=f"{GEMMA_FLAGS}{parts.pop('flags', '')}",
        sizes=SIZES,
        settings=(UNTIED, NORM_EPSILON, HEAD_WIDTH, EMBEDDING_MULTIPLIER, *parts.pop("settings", ())),
        rows=tuple({**LLAMA_ROWS, **parts.pop("rows", {})}.values()),
        defaults=DEFAULTS[model_type],
        **parts,
    )


def _llama(name: str, model_type: str, model_class: str, **parts: Any) -> Family:
    """What differs from Llama; Mistral, Qwen and many others start from it."""
    return Family(
        name=name,
        model_type=model_type,
        model_class=model_class,
        flags=f"{LLAMA_FLAGS}{parts.pop('flags', '')}",
        sizes=SIZES,
        settings=(*USUAL, *parts.pop("settings", ())),
        rows=tuple({**LLAMA_ROWS, **parts.pop("rows", {})}.values()),
        defaults=DEFAULTS[model_type],
        **parts,
    )


def _deepseek(name: str, model_type: str, model_class: str, flags: str, **parts: Any) -> Family:
    """Latent attention, and experts behind a few dense layers."""
    return Family(
        name=name,
        model_type=model_type,
        model_class=model_class,
        flags=f"--multi-latent-attention --qk-layernorm {LLAMA_FLAGS} {flags}",
        sizes=LATENT_SIZES,
        settings=(*USUAL, *LATENT, *DEEPSEEK_EXPERTS, *parts.pop("settings", ())),
        rows=tuple({**LATENT_ROWS, **SHARED_EXPERTS, **parts.pop("rows", {})}.values()),
        defaults=DEFAULTS[model_type],
        # The class makes these two of others.
        idle=frozenset(("head_dim", "qk_head_dim")),
        expects={"moe_layer_freq": 1, **parts.pop("expects")},
        **parts,
    )


FAMILIES: tuple[Family, ...] = (
    Family(
        name="GPT-2, GPT-3",
        model_type="gpt2",
        model_class="GPT2LMHeadModel",
        flags="--openai-gelu",
        sizes=GPT2_SIZES,
        settings=(GPT2_EPSILON,),
        rows=tuple(GPT2_ROWS.values()),
        is_rotary=False,
        defaults=DEFAULTS["gpt2"],
        other_names={
            "hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
    ),
    _llama(
        "Llama", "llama", "LlamaForCausalLM",
        settings=(HEAD_WIDTH,),
    ),
    _llama(
        "Mistral", "mistral", "MistralForCausalLM",
        settings=(HEAD_WIDTH, WINDOW),
    ),
    _llama(
        "Qwen 2", "qwen2", "Qwen2ForCausalLM",
        flags=" --add-qkv-bias", settings=(HEAD_WIDTH, *QWEN_WINDOWS), rows=QKV_BIAS, complete=complete_qwen,
    ),
    _llama(
        "Qwen 3", "qwen3", "Qwen3ForCausalLM",
        flags=" --qk-layernorm", settings=(HEAD_WIDTH, *QWEN_WINDOWS), rows=QK_NORMS, complete=complete_qwen,
    ),
    _llama(
        "Phi-3", "phi3", "Phi3ForCausalLM",
        settings=(HEAD_WIDTH, ROTARY_SHARE, WINDOW), rows=PHI3_ROWS, complete=complete_phi3,
    ),
    Family(
        name="OLMo 2",
        model_type="olmo2",
        model_class="Olmo2ForCausalLM",
        flags=f"{LLAMA_FLAGS} --norm-placement output --qk-layernorm --qk-norm-scope all",
        sizes=SIZES,
        settings=(*USUAL, HEAD_WIDTH),
        rows=tuple({
            **without_rows(LLAMA_ROWS, "input_layernorm", "pre_mlp_layernorm"), **OUTPUT_NORMS, **QK_NORMS,
        }.values()),
        defaults=DEFAULTS["olmo2"],
    ),
    _llama(
        # Every fourth layer has no positions (Kazemnejad et al., 2023); theirs marks layers with 1 where they have
        # some.
        "SmolLM 3", "smollm3", "SmolLM3ForCausalLM",
        settings=(HEAD_WIDTH, Setting("no_rope_layers", "--no-rope-freq", "layers without positions")),
        rope={"rope_theta": 2000000.0}, complete=complete_smollm3,
    ),
    _gemma(
        "Gemma 1", "gemma", "GemmaForCausalLM",
        settings=(ROTARY_BASE,), complete=complete_gemma,
    ),
    _gemma(
        "Gemma 2", "gemma2", "Gemma2ForCausalLM",
        flags=" --norm-placement both",
        settings=(
            *SOFT_CAPS, SCORE_SCALE, WINDOW, WINDOW_LAYERS, ROTARY_BASE,
        ),
        rows=SANDWICH_NORMS,
        complete=complete_alternating,
    ),
    _gemma(
        "Gemma 3", "gemma3_text", "Gemma3ForCausalLM",
        flags=" --norm-placement both --qk-layernorm",
        settings=(
            *SOFT_CAPS, SCORE_SCALE, WINDOW, WINDOW_LAYERS,
            Setting("rope_parameters.full_attention.rope_theta|rope_theta", "--rotary-base", default=10000),
            Setting("rope_parameters.sliding_attention.rope_theta|rope_local_base_freq", "--rotary-base-local"),
        ),
        rows={**SANDWICH_NORMS, **QK_NORMS},
        # The larger ones stretch the positions of the layers without a window alone.
        rope={"full_attention": {"rope_theta": 1000000.0}, "sliding_attention": {"rope_theta": 10000.0}},
        idle=frozenset(("sliding_window_pattern", "_sliding_window_pattern")), complete=complete_gemma3,
    ),
    Family(
        name="Nemotron",
        model_type="nemotron",
        model_class="NemotronForCausalLM",
        flags="--squared-relu --apply-layernorm-1p --disable-bias-linear",
        sizes=SIZES,
        settings=(UNTIED, NEMOTRON_EPSILON, ROTARY_BASE, ROTARY_SHARE, HEAD_WIDTH),
        rows=tuple(NEMOTRON_ROWS.values()),
        defaults=DEFAULTS["nemotron"],
        rope=HALF_ROTATED,
    ),
    Family(
        name="GPT-NeoX, Pythia",
        model_type="gpt_neox",
        model_class="GPTNeoXForCausalLM",
        flags="",
        sizes=_build_sizes(),
        settings=(*GPT_NEOX_USUAL, Setting("use_parallel_residual", "--parallel-residual", "switch", default=False)),
        rows=tuple(GPT_NEOX_ROWS.values()),
        defaults=DEFAULTS["gpt_neox"],
        rope={"rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    ),
    Family(
        name="gpt-oss",
        model_type="gpt_oss",
        model_class="GptOssForCausalLM",
        flags="--normalization RMSNorm --quick-geglu --activation-func-clamp-value 7 --glu-linear-offset 1 "
        "--softmax-type learnable --moe-router-add-bias",
        sizes=SIZES,
        settings=(
            *USUAL, HEAD_WIDTH, WINDOW, WINDOW_LAYERS, Setting("num_local_experts", "--num-experts"), TOP_K,
        ),
        rows=tuple({
            **without_rows(LLAMA_ROWS, ".mlp."), **QKV_BIAS, **GPT_OSS_EXPERTS,
            **rename_rows(OURS, THEIRS, {"self_attention.linear_proj": "self_attn.o_proj"}, "bias"),
            **build_rows(Row(f"{OURS}self_attention.core_attention.softmax_offset", (f"{THEIRS}self_attn.sinks",))),
        }.values()),
        defaults=DEFAULTS["gpt_oss"],
        rope={"rope_theta": 150000.0},
        other_names={"num_experts": "num_local_experts"},
        complete=complete_gpt_oss,
    ),
    _llama(
        "Mixtral", "mixtral", "MixtralForCausalLM",
        settings=(HEAD_WIDTH, WINDOW, Setting("num_local_experts", "--num-experts"), TOP_K),
        rows=MIXTRAL_EXPERTS, rope={"rope_theta": 1000000.0}, other_names={"num_experts": "num_local_experts"},
    ),
    _llama(
        "Qwen 2 MoE", "qwen2_moe", "Qwen2MoeForCausalLM",
        flags=" --add-qkv-bias --moe-shared-expert-gate",
        settings=(
            Setting("num_experts", "--num-experts"), TOP_K, EXPERT_WIDTH, UNNORMALISED,
            Setting("shared_expert_intermediate_size", "--moe-shared-expert-intermediate-size"), HEAD_WIDTH,
            *QWEN_WINDOWS,
        ),
        rows={
            **QKV_BIAS, **EXPERTS, **build_gated_rows("mlp.shared_experts", "mlp.shared_expert"),
            **build_rows(Row(f"{OURS}mlp.shared_experts.gate_weight", (f"{THEIRS}mlp.shared_expert_gate.weight",))),
        },
        complete=complete_qwen2_moe,
    ),
    _llama(
        "Qwen 3 MoE", "qwen3_moe", "Qwen3MoeForCausalLM",
        flags=" --qk-layernorm",
        settings=(
            HEAD_WIDTH, Setting("num_experts", "--num-experts"), TOP_K, EXPERT_WIDTH, UNNORMALISED,
            QWEN_WINDOWS[0],
        ),
        rows={**QK_NORMS, **EXPERTS},
        other_names={"num_local_experts": "num_experts"}, complete=complete_qwen3_moe,
    ),
    _llama(
        "OLMoE", "olmoe", "OlmoeForCausalLM",
        flags=" --qk-layernorm --qk-norm-scope all",
        # The width of an expert is called like that of a dense MLP.
        settings=(HEAD_WIDTH, Setting("num_experts", "--num-experts"), TOP_K, UNNORMALISED),
        rows={**QK_NORMS, **EXPERTS},
        other_names={"num_local_experts": "num_experts"}, expects={"sliding_window": None},
    ),
    _deepseek(
        "DeepSeek V2", "deepseek_v2", "DeepseekV2ForCausalLM", "--moe-router-pre-softmax",
        settings=(*EXPERT_GROUPS, Setting("topk_method", "--moe-router-group-score", "group score", default="greedy")),
        other_names={"num_experts": "n_routed_experts"}, expects={"scoring_func": "softmax"},
        complete=complete_deepseek_v2,
    ),
    _deepseek(
        "DeepSeek V3, Kimi K2", "deepseek_v3", "DeepseekV3ForCausalLM",
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        aliases=("kimi_k2",), settings=(*EXPERT_GROUPS, TWO_BEST, FURTHER_TOKENS),
        rows=EXPERT_BIAS | PREDICTION_ROWS,
        other_names=ROUTED, expects={"topk_method": "noaux_tc", "scoring_func": "sigmoid"}, complete=complete_latent,
    ),
    _llama(
        "GLM 4.5", "glm4_moe", "Glm4MoeForCausalLM",
        flags=" --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        settings=(
            ROTARY_SHARE, HEAD_WIDTH, *DEEPSEEK_EXPERTS, *EXPERT_GROUPS, TWO_BEST, FURTHER_TOKENS,
            Setting("attention_bias", "--add-qkv-bias", "switch", default=False),
            Setting("use_qk_norm", "--qk-layernorm", "switch", default=False),
        ),
        rows={
            **QKV_BIAS, **QK_NORMS, **SHARED_EXPERTS, **EXPERT_BIAS, **PREDICTION_ROWS,
        },
        rope=HALF_ROTATED, other_names=ROUTED,
    ),
    Family(
        name="Llama 4",
        model_type="llama4_text",
        model_class="Llama4ForCausalLM",
        flags=f"--rotary-interleaved {LLAMA_FLAGS} --moe-router-score-function sigmoid --moe-apply-probs-on-input",
        sizes=LLAMA4_SIZES,
        settings=(*USUAL, HEAD_WIDTH, *LLAMA4_ATTENTION, *LLAMA4_EXPERTS),
        rows=tuple(LLAMA4_ROWS.values()),
        defaults=DEFAULTS["llama4_text"],
        rope={"rope_theta": 500000.0},
        complete=complete_llama4,
    ),
)  # fmt: skip


def find_family(model_type: str, families: Sequence[Family] = FAMILIES) -> Family:
    """The first family with a config.json's `model_type`. Raises ConfigError for one that is not known."""
    for family in families:
        if model_type in (family.model_type, *family.aliases):
            return family
    known = ", ".join(name for family in families for name in (family.model_type, *family.aliases))
    raise ConfigError(f"models of the type {model_type} are not known; known are {known}")
