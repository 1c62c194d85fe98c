# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of Hugging Face, of every family and of its variants: what round trips and runs are tried with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.huggingface_models import SIZES, randomised
from tests.trial.config_fields import BASES
from tests.unit.training.recipes.test_model_families import GEMMA, make

transformers = pytest.importorskip("transformers")

TOKENIZER = Path(__file__).parents[1] / "golden" / "data" / "tok" / "hf_bpe1k"
EAGER = {"attn_implementation": "eager"}
GEMMA3 = {
    "query_pre_attn_scalar": 16, "sliding_window": 6, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
    },
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False,
}  # fmt: skip
STRETCHED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LONGROPE = {"rope_type": "longrope", "partial_rotary_factor": 0.5, "short_factor": [1.1, 1], "long_factor": [2, 5.5]}
MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LATENT = {
    "kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14, "num_key_value_heads": 4,
    "n_routed_experts": 8, "moe_intermediate_size": 24, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "num_experts_per_tok": 3,
}  # fmt: skip
MSCALE = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 8, "mscale": 0.7,
    "mscale_all_dim": 0.9,
}  # fmt: skip
ODD = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 72, "vocab_size": 97}
BIASES = {"attention_bias": True, "mlp_bias": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", ODD),
    "Llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "Llama 3.1": ("Llama", {"rope_parameters": LLAMA3}),
    "Llama, YaRN": ("Llama", {"rope_parameters": YARN}),
    "Llama, linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}}),
    "Mistral": ("Mistral", {"sliding_window": 6, **EAGER}),
    "Qwen 2": ("Qwen2", {"sliding_window": None}),
    "Qwen 3": (
        "Qwen3", {"head_dim": 12, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1} | EAGER,
    ),
    "Phi-3": ("Phi3", {"partial_rotary_factor": 0.5}),
    "Phi-4 mini": ("Phi3", {"original_max_position_embeddings": 16, "rope_parameters": LONGROPE}),
    "OLMo 2": ("Olmo2", {"rms_norm_eps": 1e-6}),
    "SmolLM 3": ("SmolLM3", {"bos_token_id": 1, "eos_token_id": 2}),
    "Gemma 1": ("Gemma", GEMMA),
    "Gemma 2": (
        "Gemma2",
        GEMMA | {"query_pre_attn_scalar": 144, "sliding_window": 6, "attn_logit_softcapping": 2.0,
                 "final_logit_softcapping": 3.0},
    ),
    "Gemma 3": ("Gemma3Text", GEMMA | GEMMA3),
    "Gemma 3, larger ones": (
        "Gemma3Text", GEMMA | GEMMA3 | {"rope_scaling": {"type": "linear", "factor": 8.0}, "rope_parameters": None}),
    "Nemotron": ("Nemotron", {}),
    "GPT-NeoX, Pythia": ("GPTNeoX", {"use_parallel_residual": False}),
    "GPT-2, GPT-3": ("GPT2", {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "Mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6}),
    "Qwen 2 MoE": ("Qwen2Moe", MOE | {"shared_expert_intermediate_size": 40}),
    "Qwen 3 MoE": ("Qwen3Moe", MOE | {"head_dim": 12, "norm_topk_prob": True}),
    "OLMoE": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "num_key_value_heads": 4}),
    "DeepSeek V2 Lite": (
        "DeepseekV2", LATENT | {"q_lora_rank": None, "rms_norm_eps": 1e-5, "num_experts_per_tok": 3} | EAGER,
    ),
    "DeepSeek V2": (
        "DeepseekV2",
        LATENT | {"q_lora_rank": 20, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy",
                  "num_experts_per_tok": 4, "routed_scaling_factor": 1.5, "rope_parameters": MSCALE} | EAGER,
    ),
    "DeepSeek V2 Lite, YaRN": ("DeepseekV2", LATENT | {"q_lora_rank": None, "rope_parameters": MSCALE} | EAGER),
    "DeepSeek V3": (
        "DeepseekV3",
        LATENT | {"q_lora_rank": 20, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4,
                  "routed_scaling_factor": 1.5, "rope_parameters": MSCALE} | EAGER,
    ),
    "DeepSeek V3, plainly": ("DeepseekV3", LATENT | EAGER | {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "DeepSeek V3.2": ("DeepseekV32", BASES["deepseek_v32"] | {"rope_parameters": MSCALE} | EAGER),
    "GLM 5": ("GlmMoeDsa", BASES["glm_moe_dsa"] | EAGER),
    "DeepSeek V4": ("DeepseekV4", BASES["deepseek_v4"] | {"rope_parameters": STRETCHED} | EAGER),
    "gpt-oss": (
        "GptOss", {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 12, "sliding_window": 6} | EAGER,
    ),
    # Blocks of 32 numbers fit into its matrices.
    "gpt-oss, 32": ("GptOss", {"num_local_experts": 4, "head_dim": 8, "intermediate_size": 32} | EAGER),
    "Llama 4": (
        "Llama4Text",
        {"intermediate_size_mlp": 80, "num_local_experts": 4, "head_dim": 12, "interleave_moe_layer_step": 2,
         "attention_chunk_size": 6, "floor_scale": 3, "attn_scale": 0.5, "num_experts_per_tok": 1,
         "rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}} | EAGER,
    ),
    "Llama 4, without norms of queries": (
        "Llama4Text",
        {"num_local_experts": 4, "head_dim": 8, "attention_chunk_size": 5, "use_qk_norm": False, "layer_types":
         ["chunked_attention", "full_attention"] * 2, "no_rope_layers": [1, 0, 0, 1], "attn_temperature_tuning": False,
         "num_experts_per_tok": 1} | EAGER,
    ),
    "GLM 4.5": (
        "Glm4Moe",
        {"n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "n_shared_experts": 2,
         "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "head_dim": 8, "routed_scaling_factor": 1.5,
         "attention_bias": True, "use_qk_norm": True},
    ),
    "Qwen3-Next": ("Qwen3Next", BASES["qwen3_next"] | EAGER),
    "Qwen 3.5": ("Qwen3_5Text", BASES["qwen3_5_text"] | {"attention_bias": True} | EAGER),
    "Qwen 3.5 MoE": ("Qwen3_5MoeText", BASES["qwen3_5_moe_text"] | EAGER),
    "Nemotron-H, Nemotron 3": ("NemotronH", BASES["nemotron_h"] | EAGER),
    "Nemotron-H, without experts": (
        "NemotronH",
        {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "mamba_num_heads": 6,
         "mamba_head_dim": 20, "n_groups": 3, "ssm_state_size": 7, "use_conv_bias": False, "use_bias": True,
         "mlp_bias": True, "head_dim": 10, **ODD} | EAGER,
    ),
    "Mamba 2": ("Mamba2", BASES["mamba2"] | {"use_bias": True, "time_step_limit": [0.3, 0.9]}),
    "Bamba": ("Bamba", BASES["bamba"] | {"attention_bias": True, "mlp_bias": True, "mamba_conv_bias": False} | EAGER),
    "Granite 4": ("GraniteMoeHybrid", BASES["granitemoehybrid"] | {"position_embedding_type": "rope"} | EAGER),
    "Granite 4, dense": (
        "GraniteMoeHybrid",
        BASES["granitemoehybrid"] | {"num_local_experts": 0, "embedding_multiplier": 12, "logits_scaling": 8,
                                     "residual_multiplier": 0.22, "tie_word_embeddings": True} | EAGER,
    ),
    "Falcon-H1": ("FalconH1", BASES["falcon_h1"] | EAGER),
    "Falcon-H1, with norms and biases": (
        "FalconH1",
        {"mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 9, "mamba_rms_norm": True,
         "mamba_proj_bias": True, "projectors_bias": True, "mamba_conv_bias": False, "attention_bias": True,
         "mlp_bias": True, "attention_out_multiplier": 0.6, "ssm_out_multiplier": 1.3, "tie_word_embeddings": True,
         "mlp_multipliers": [1.0, 0.5], "head_dim": 10, "time_step_limit": [0.3, 0.9], **ODD} | EAGER,
    ),
    "OLMo Hybrid": ("OlmoHybrid", BASES["olmo_hybrid"] | EAGER),
    "OLMo Hybrid, without positions": (
        "OlmoHybrid", {"linear_allow_neg_eigval": False, "rope_parameters": {"rope_theta": None}, **ODD} | EAGER,
    ),
    "Kimi Linear": ("KimiLinear", BASES["kimi_linear"] | EAGER),
    "Kimi Linear, without experts": (
        "KimiLinear",
        {"mlp_layer_types": ["dense"] * 5, "num_hidden_layers": 5, "linear_num_heads": 5, "linear_head_dim": 9,
         "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14,
         "num_key_value_heads": 4} | EAGER,
    ),
    "Granite 3": (
        "Granite", {"attention_multiplier": 0.3, "embedding_multiplier": 12, "logits_scaling": 8,
                    "residual_multiplier": 0.22, "attention_bias": True, "mlp_bias": True} | ODD | EAGER,
    ),
    "Seed-OSS": ("SeedOss", {"head_dim": 12, "attention_out_bias": True, "mlp_bias": True} | ODD | EAGER),
    "Ministral": (
        "Ministral", {"head_dim": 12, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
        | EAGER,
    ),
    "Starcoder 2": ("Starcoder2", {"sliding_window": 6, "use_bias": True} | ODD | EAGER),
    "Starcoder 2, without biases": ("Starcoder2", {"use_bias": False, "tie_word_embeddings": False} | EAGER),
    "MiniMax M2": (
        "MiniMaxM2",
        BASES["minimax_m2"] | EAGER
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}},
    ),
    "GLM 4": ("Glm", BASES["glm"] | {"attention_bias": False} | ODD | EAGER),
    "GLM 4 0414": ("Glm4", BASES["glm4"] | ODD | EAGER),
    "ERNIE 4.5": ("Ernie4_5", BASES["ernie4_5"] | {"use_bias": True} | ODD | EAGER),
    "InternLM 3": ("InternLM3", BASES["internlm3"] | BIASES | ODD),
    "IQuest-Coder": ("IQuestCoder", BASES["iquestcoder"] | ODD),
    "Arcee": ("Arcee", BIASES | ODD),
    "Helium": ("Helium", BIASES | ODD | {"head_dim": 12} | EAGER),
    "EXAONE 4": ("Exaone4", BASES["exaone4"] | {"layer_types": ["sliding_attention", "full_attention"] * 2} | EAGER),
    "EXAONE 4, without a window": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4} | ODD),
    "OLMo 3": (
        "Olmo3", BASES["olmo3"] | {"attention_bias": True, "rope_parameters": {
            "full_attention": YARN | {"truncate": True},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        }} | ODD | EAGER,
    ),
    "Granite SWA": (
        "GraniteSWA", BASES["granite_swa"] | BIASES | {"layer_rope_theta": [0, 10000, 10000, 0]} | ODD | EAGER,
    ),
    "Ministral 3": ("Ministral3", BASES["ministral3"] | ODD | EAGER),
    "Hunyuan": ("HunYuanDenseV1", BASES["hunyuan_v1_dense"] | {"attention_bias": True} | ODD | EAGER),
    "Hunyuan, longer": (
        "HunYuanDenseV1", BASES["hunyuan_v1_dense"]
        | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 1000.0}} | EAGER,
    ),
    "Hunyuan MoE": ("HunYuanMoEV1", BASES["hunyuan_v1_moe"] | EAGER),
    "GLM 4.7 Flash": (
        "Glm4MoeLite", BASES["glm4_moe_lite"] | {"mlp_layer_types": ["dense", "sparse"] * 2} | EAGER,
    ),
    "dots.llm1": ("Dots1", BASES["dots1"] | {"attention_bias": True} | EAGER),
    "Granite 3 MoE": ("GraniteMoe", BASES["granitemoe"] | {"attention_bias": True} | ODD | EAGER),
    "Granite 3 MoE, with a shared expert": ("GraniteMoeShared", BASES["granitemoeshared"] | EAGER),
    "Solar Open": ("SolarOpen", BASES["solar_open"] | {"attention_bias": True} | EAGER),
    "Hunyuan 3": ("HYV3", BASES["hy_v3"] | {"attention_bias": True} | ODD),
    "K-EXAONE": ("ExaoneMoe", BASES["exaone_moe"] | EAGER),
    "FlexOlmo": ("FlexOlmo", BASES["flex_olmo"] | {"norm_topk_prob": True, "attention_bias": True} | EAGER),
    "Arcee Trinity": ("Afmoe", BASES["afmoe"] | ODD | EAGER),
    "Phi 1, 2": ("Phi", {"qk_layernorm": True} | ODD | EAGER),
    "Phi 1, 2, tied": ("Phi", {"tie_word_embeddings": True}),
    "StableLM 2": ("StableLm", {"use_qkv_bias": True, "partial_rotary_factor": 0.5} | ODD | EAGER),
    "StableLM 2, side by side": ("StableLm", {"use_parallel_residual": True, "tie_word_embeddings": True}),
    "Cohere": ("Cohere", {"attention_bias": True, "logit_scale": 0.5} | ODD),
    "Cohere 2": (
        "Cohere2", {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2} | EAGER,
    ),
    "Cohere 2 MoE": ("Cohere2Moe", BASES["cohere2_moe"] | EAGER),
    "Cohere 2 MoE, averaged": (
        "Cohere2Moe",
        BASES["cohere2_moe"] | ODD | EAGER
        | {"shared_expert_combination_strategy": "average", "mlp_layer_types": ["sparse"] * 4,
           "expert_selection_fn": "sigmoid", "attention_bias": True},
    ),
    "LFM 2": (
        "Lfm2", {"full_attn_idxs": [1, 3], "conv_bias": True, "conv_L_cache": 4, "block_multiple_of": 8} | ODD | EAGER,
    ),
    "LFM 2 MoE": ("Lfm2Moe", BASES["lfm2_moe"] | {"use_expert_bias": True} | EAGER),
    "OPT": ("OPT", {"ffn_dim": 90, "word_embed_proj_dim": 72, "tie_word_embeddings": False} | ODD),
    "OPT, without biases": (
        "OPT",
        {"ffn_dim": 48, "enable_bias": False, "layer_norm_elementwise_affine": False, "tie_word_embeddings": True},
    ),
    "OLMo 1": ("Olmo", {"attention_bias": True} | ODD),
    "nanochat": ("NanoChat", {"attention_bias": True, "final_logit_softcapping": 3.0} | ODD | EAGER),
    "ERNIE 4.5 MoE": (
        "Ernie4_5_Moe",
        BASES["ernie4_5_moe"] | ODD | EAGER
        | {"use_bias": True, "moe_layer_interval": 2, "moe_layer_start_index": 0},
    ),
    "Mistral Small 4": ("Mistral4", BASES["mistral4"] | EAGER),
    "Falcon 7B": ("Falcon", {"num_attention_heads": 6, "hidden_size": 72, "vocab_size": 97, "bias": True} | EAGER),
    "Falcon 40B": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 90} | EAGER),
}  # fmt: skip
"""Name -> classes in transformers and settings of a tiny model."""


def make_model(name: str) -> Any:
    kind, settings = MODELS[name]
    if kind != "GPT2":
        return make(kind, **settings)
    config = transformers.GPT2Config(vocab_size=SIZES["vocab_size"], pad_token_id=0, **settings)
    return randomised(transformers.GPT2LMHeadModel(config))
