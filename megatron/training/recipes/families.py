# SPDX-License-Identifier: Apache-2.0
"""The table of model families: their flags, the fields of their config.json, and the names of their weights.

docs/models.md lists the flags of published models as this table gives them; the tests compare tiny random models of
every family with Hugging Face transformers', through the files that transformers writes. `family.py` says what the
entries mean. Sources: the configuration classes of transformers, and the files of the published checkpoints.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from megatron.core.errors import ConfigError
from megatron.training.recipes.compressed_families import COMPRESSED_FAMILIES
from megatron.training.recipes.convolution_families import CONVOLUTION_FAMILIES
from megatron.training.recipes.delta_families import DELTA_FAMILIES
from megatron.training.recipes.expert_families import EXPERT_FAMILIES
from megatron.training.recipes.family import ConfigKey, Family, Row
from megatron.training.recipes.family_defaults import (
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
    LLAMA4_ROWS,
    LLAMA_ROWS,
    MIXTRAL_EXPERTS,
    NEMOTRON_ROWS,
    OURS,
    PHI3_ROWS,
    PREDICTION_ROWS,
    QK_NORMS,
    QKV_BIAS,
    SANDWICH_NORMS,
    SHARED_EXPERTS,
    SINKS,
    THEIRS,
    build_gated_rows,
    build_rows,
    rename_rows,
    without_rows,
)
from megatron.training.recipes.family_settings import (
    DEEPSEEK_EXPERTS,
    EXPERT_GROUPS,
    EXPERT_WIDTH,
    FURTHER_TOKENS,
    GPT2_EPSILON,
    GPT2_SIZES,
    GPT_NEOX_USUAL,
    HALF_ROTATED,
    HEAD_WIDTH,
    LLAMA4_ATTENTION,
    LLAMA4_EXPERTS,
    LLAMA4_SIZES,
    LLAMA_FLAGS,
    NEMOTRON_EPSILON,
    QWEN_WINDOWS,
    ROTARY_BASE,
    ROTARY_SHARE,
    ROUTED,
    SCORE_SCALE,
    SOFT_CAPS,
    TOP_K,
    TWO_BEST,
    UNNORMALISED,
    UNTIED,
    USUAL,
    WINDOW,
    WINDOW_LAYERS,
    build_deepseek,
    build_family,
    build_gemma,
    build_llama,
    build_olmo,
    build_sizes,
)
from megatron.training.recipes.further_families import FURTHER
from megatron.training.recipes.hybrid_families import HYBRIDS
from megatron.training.recipes.missing_families import MISSING
from megatron.training.recipes.parallel_families import PARALLEL_FAMILIES
from megatron.training.recipes.sparse_families import SPARSE_FAMILIES

FAMILIES: tuple[Family, ...] = (
    build_family(
        "GPT-2, GPT-3", "gpt2", "GPT2LMHeadModel",
        flags="--openai-gelu",
        sizes=GPT2_SIZES,
        settings=(GPT2_EPSILON,),
        rows=GPT2_ROWS,
        is_rotary=False,
        other_names={
            "hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
    ),
    build_llama(
        "Llama", "llama", "LlamaForCausalLM",
        settings=(HEAD_WIDTH,),
    ),
    build_llama(
        "Mistral", "mistral", "MistralForCausalLM",
        settings=(HEAD_WIDTH, WINDOW),
    ),
    build_llama(
        "Qwen 2", "qwen2", "Qwen2ForCausalLM",
        flags="--add-qkv-bias", settings=(HEAD_WIDTH, *QWEN_WINDOWS), rows=QKV_BIAS, complete=complete_qwen,
    ),
    build_llama(
        "Qwen 3", "qwen3", "Qwen3ForCausalLM",
        flags="--qk-layernorm", settings=(HEAD_WIDTH, *QWEN_WINDOWS), rows=QK_NORMS, complete=complete_qwen,
    ),
    build_llama(
        "Phi-3", "phi3", "Phi3ForCausalLM",
        settings=(HEAD_WIDTH, ROTARY_SHARE, WINDOW), rows=PHI3_ROWS, complete=complete_phi3,
    ),
    build_olmo("OLMo 2", "olmo2", "Olmo2ForCausalLM", settings=(ROTARY_BASE,)),
    build_llama(
        # Every fourth layer has no positions (Kazemnejad et al., 2023); theirs marks layers with 1 where they have
        # some.
        "SmolLM 3", "smollm3", "SmolLM3ForCausalLM",
        settings=(HEAD_WIDTH, ConfigKey("no_rope_layers", "--no-rope-freq", "layers without positions")),
        rope={"rope_theta": 2000000.0}, complete=complete_smollm3,
    ),
    build_gemma(
        "Gemma 1", "gemma", "GemmaForCausalLM",
        settings=(ROTARY_BASE,), complete=complete_gemma,
    ),
    build_gemma(
        "Gemma 2", "gemma2", "Gemma2ForCausalLM",
        flags="--norm-placement both",
        settings=(
            *SOFT_CAPS, SCORE_SCALE, WINDOW, WINDOW_LAYERS, ROTARY_BASE,
        ),
        rows=SANDWICH_NORMS,
        complete=complete_alternating,
    ),
    build_gemma(
        "Gemma 3", "gemma3_text", "Gemma3ForCausalLM",
        flags="--norm-placement both --qk-layernorm",
        settings=(
            *SOFT_CAPS, SCORE_SCALE, WINDOW, WINDOW_LAYERS,
            ConfigKey("rope_parameters.full_attention.rope_theta|rope_theta", "--rotary-base", default=10000),
            ConfigKey("rope_parameters.sliding_attention.rope_theta|rope_local_base_freq", "--rotary-base-local"),
        ),
        rows={**SANDWICH_NORMS, **QK_NORMS},
        # The larger ones stretch the positions of the layers without a window alone.
        rope={"full_attention": {"rope_theta": 1000000.0}, "sliding_attention": {"rope_theta": 10000.0}},
        idle=frozenset(("sliding_window_pattern", "_sliding_window_pattern")), complete=complete_gemma3,
    ),
    build_family(
        "Nemotron", "nemotron", "NemotronForCausalLM",
        flags="--squared-relu --apply-layernorm-1p --disable-bias-linear",
        settings=(UNTIED, NEMOTRON_EPSILON, ROTARY_BASE, ROTARY_SHARE, HEAD_WIDTH),
        rows=NEMOTRON_ROWS,
        rope=HALF_ROTATED,
    ),
    build_family(
        "GPT-NeoX, Pythia", "gpt_neox", "GPTNeoXForCausalLM",
        sizes=build_sizes(),
        settings=(*GPT_NEOX_USUAL, ConfigKey("use_parallel_residual", "--parallel-residual", "switch", default=False)),
        rows=GPT_NEOX_ROWS,
        rope={"rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    ),
    build_family(
        "gpt-oss", "gpt_oss", "GptOssForCausalLM",
        flags="--normalization RMSNorm --quick-geglu --activation-func-clamp-value 7 --glu-linear-offset 1 "
        "--softmax-type learnable --moe-router-add-bias",
        settings=(
            *USUAL, HEAD_WIDTH, WINDOW, WINDOW_LAYERS, ConfigKey("num_local_experts", "--num-experts"), TOP_K,
        ),
        rows={
            **without_rows(LLAMA_ROWS, ".mlp."), **QKV_BIAS, **GPT_OSS_EXPERTS,
            **rename_rows(OURS, THEIRS, {"self_attention.linear_proj": "self_attn.o_proj"}, "bias"),
            **SINKS,
        },
        rope={"rope_theta": 150000.0},
        other_names={"num_experts": "num_local_experts"},
        complete=complete_gpt_oss,
    ),
    build_llama(
        "Mixtral", "mixtral", "MixtralForCausalLM",
        settings=(HEAD_WIDTH, WINDOW, ConfigKey("num_local_experts", "--num-experts"), TOP_K),
        rows=MIXTRAL_EXPERTS, rope={"rope_theta": 1000000.0}, other_names={"num_experts": "num_local_experts"},
    ),
    build_llama(
        "Qwen 2 MoE", "qwen2_moe", "Qwen2MoeForCausalLM",
        flags="--add-qkv-bias --moe-shared-expert-gate",
        settings=(
            ConfigKey("num_experts", "--num-experts"), TOP_K, EXPERT_WIDTH, UNNORMALISED,
            ConfigKey("shared_expert_intermediate_size", "--moe-shared-expert-intermediate-size"), HEAD_WIDTH,
            *QWEN_WINDOWS,
        ),
        rows={
            **QKV_BIAS, **EXPERTS, **build_gated_rows("mlp.shared_experts", "mlp.shared_expert"),
            **build_rows(Row(f"{OURS}mlp.shared_experts.gate_weight", (f"{THEIRS}mlp.shared_expert_gate.weight",))),
        },
        complete=complete_qwen2_moe,
    ),
    build_llama(
        "Qwen 3 MoE", "qwen3_moe", "Qwen3MoeForCausalLM",
        flags="--qk-layernorm",
        settings=(
            HEAD_WIDTH, ConfigKey("num_experts", "--num-experts"), TOP_K, EXPERT_WIDTH, UNNORMALISED,
            QWEN_WINDOWS[0],
        ),
        rows={**QK_NORMS, **EXPERTS},
        other_names={"num_local_experts": "num_experts"}, complete=complete_qwen3_moe,
    ),
    build_llama(
        "OLMoE", "olmoe", "OlmoeForCausalLM",
        flags="--qk-layernorm --qk-norm-scope all",
        # The width of an expert has the name of a dense MLP's.
        settings=(HEAD_WIDTH, ConfigKey("num_experts", "--num-experts"), TOP_K, UNNORMALISED),
        rows={**QK_NORMS, **EXPERTS},
        other_names={"num_local_experts": "num_experts"}, expects={"sliding_window": None},
    ),
    build_deepseek(
        "DeepSeek V2", "deepseek_v2", "DeepseekV2ForCausalLM",
        flags="--moe-router-pre-softmax",
        settings=(
            *EXPERT_GROUPS,
            ConfigKey("topk_method", "--moe-router-group-score", "group score", default="greedy"),
        ),
        other_names={"num_experts": "n_routed_experts"}, expects={"moe_layer_freq": 1, "scoring_func": "softmax"},
        complete=complete_deepseek_v2,
    ),
    build_deepseek(
        "DeepSeek V3, Kimi K2", "deepseek_v3", "DeepseekV3ForCausalLM",
        flags="--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        aliases=("kimi_k2",), settings=(*EXPERT_GROUPS, TWO_BEST, FURTHER_TOKENS),
        rows=EXPERT_BIAS | PREDICTION_ROWS,
        other_names=ROUTED, complete=complete_latent,
        expects={"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    build_llama(
        "GLM 4.5", "glm4_moe", "Glm4MoeForCausalLM",
        flags="--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        settings=(
            ROTARY_SHARE, HEAD_WIDTH, *DEEPSEEK_EXPERTS, *EXPERT_GROUPS, TWO_BEST, FURTHER_TOKENS,
            ConfigKey("attention_bias", "--add-qkv-bias", "switch", default=False),
            ConfigKey("use_qk_norm", "--qk-layernorm", "switch", default=False),
        ),
        rows={
            **QKV_BIAS, **QK_NORMS, **SHARED_EXPERTS, **EXPERT_BIAS, **PREDICTION_ROWS,
        },
        rope=HALF_ROTATED, other_names=ROUTED,
    ),
    build_family(
        "Llama 4", "llama4_text", "Llama4ForCausalLM",
        flags=f"--rotary-interleaved {LLAMA_FLAGS} --moe-router-score-function sigmoid --moe-apply-probs-on-input",
        sizes=LLAMA4_SIZES,
        settings=(*USUAL, HEAD_WIDTH, *LLAMA4_ATTENTION, *LLAMA4_EXPERTS),
        rows=LLAMA4_ROWS,
        rope={"rope_theta": 500000.0},
        complete=complete_llama4,
    ),
    *FURTHER,
    *EXPERT_FAMILIES,
    *PARALLEL_FAMILIES,
    *HYBRIDS,
    *DELTA_FAMILIES,
    *COMPRESSED_FAMILIES,
    *CONVOLUTION_FAMILIES,
    *SPARSE_FAMILIES,
)  # fmt: skip


_OWN_CODE = dict.fromkeys(
    ("nemotron-nas", "deci"),
    "transformers has no class for them (Llama-Nemotron, DeciLMForCausalLM), their files bring code of their own that "
    "is not run, and without it no result can be compared; train such layers by --heterogeneous-layers-config-path, "
    "which reads their config.json",
)
"""`model_type` of models that no class of transformers computes -> what to do."""


def find_family(model_type: str, families: Sequence[Family] = FAMILIES) -> Family:
    """The first family with a config.json's `model_type`. Raises ConfigError for one that is not known."""
    for family in families:
        if model_type in (family.model_type, *family.aliases):
            return family
    if model_type in _OWN_CODE:
        raise ConfigError(f"models of the type {model_type} do not convert: {_OWN_CODE[model_type]}")
    if model_type in MISSING:
        raise ConfigError(f"models of the type {model_type} do not convert: they have {MISSING[model_type]}")
    names = {name: family for family in families for name in (family.model_type, *family.aliases)}
    nearest = difflib.get_close_matches(model_type, names, n=1, cutoff=0.0)
    near = f"; the nearest name is {nearest[0]} ({names[nearest[0]].name})" if nearest else ""
    raise ConfigError(f"models of the type {model_type} are not known{near}; known are {', '.join(names)}")
