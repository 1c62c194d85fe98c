# SPDX-License-Identifier: Apache-2.0
"""Families with sparse attention, whose other parts are DeepSeek V3's; see `families.py`."""

from __future__ import annotations

from megatron.core.errors import ConfigError
from megatron.training.recipes.family import ConfigKey, Family
from megatron.training.recipes.family_defaults import Fields, complete_latent, list_layers, size
from megatron.training.recipes.family_rows import EXPERT_BIAS, OURS, PREDICTION_ROWS, THEIRS, rename_rows
from megatron.training.recipes.family_settings import EXPERT_GROUPS, FURTHER_TOKENS, ROUTED, TWO_BEST, build_deepseek

_DEFAULTS: Fields = size(61, 7168, 18432, 128, 128, 163840) | {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "attention_bias": False, "mlp_bias": False, "moe_intermediate_size": 2048, "n_shared_experts": 1,
    "n_routed_experts": 256, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "mlp_layer_types": None, "first_k_dense_replace": 3, "layer_types": None,
    "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64,
}  # fmt: skip
_GLM_DEFAULTS: Fields = _DEFAULTS | size(78, 6144, 12288, 64, 64, 202752) | {
    "rms_norm_eps": 1e-5, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_group": 1,
    "topk_group": 1, "index_n_heads": 32, "indexer_types": None,
}  # fmt: skip
_INDEXER = (
    ConfigKey("index_n_heads", "--dsa-indexer-n-heads", needed=True),
    ConfigKey("index_head_dim", "--dsa-indexer-head-dim", needed=True),
    ConfigKey("index_topk", "--dsa-indexer-topk", needed=True),
    ConfigKey("mlp_layer_types", "--moe-layer-freq", "layers with experts", word="sparse"),
)
_INDEXER_ROWS = {
    **rename_rows(
        f"{OURS}self_attention.core_attention.indexer.", f"{THEIRS}self_attn.indexer.",
        {"linear_wq_b": "wq_b", "linear_wk": "wk", "linear_weights_proj": "weights_proj"},
    ),
    **rename_rows(
        f"{OURS}self_attention.core_attention.indexer.", f"{THEIRS}self_attn.indexer.", {"k_norm": "k_norm"},
        "weight", "bias",
    ),
}  # fmt: skip


def _complete_sparse(fields: Fields) -> Fields:
    """Fill in the kinds of MLPs; all layers attend sparsely."""
    layers, dense = list_layers(fields), fields.pop("first_k_dense_replace")
    if fields["mlp_layer_types"] is None:
        fields["mlp_layer_types"] = ["dense" if layer <= dense else "sparse" for layer in layers]
    kinds = fields.pop("layer_types")
    if kinds is not None and kinds != ["indexed_attention"] * len(layers):
        raise ConfigError(f"layer_types is {kinds!r} in config.json; only 'indexed_attention' of each layer is known")
    return dict(complete_latent(fields))


def _complete_glm(fields: Fields) -> Fields:
    """Fill in how often layers have an indexer, which a file may say in three ways."""
    types, pattern, layers = fields.pop("indexer_types"), fields.pop("index_topk_pattern", None), list_layers(fields)
    every, first = max(fields.get("index_topk_freq", 1), 1), fields.get("index_skip_topk_offset", 2)
    if types is None:
        words = {"F": "full", "S": "shared"}
        types = [words.get(letter, letter) for letter in pattern] if pattern else _list_types(layers, every, first)
    found = next(
        ((n, start) for n in layers for start in layers if types == _list_types(layers, n, start)), None
    )  # fmt: skip
    if found is None:
        raise ConfigError(
            f"indexer_types is {types!r} in config.json; a layer with an indexer comes every so many layers, from the "
            "first on"
        )
    fields["index_topk_freq"], fields["index_skip_topk_offset"] = found
    return _complete_sparse(fields)


def _list_types(layers: range, every: int, first: int) -> list[str]:
    return ["shared" if max(layer - first, 0) % every else "full" for layer in layers]


_FLAGS = "--experimental-attention-variant dsa --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
_NORM = " --dsa-indexer-k-norm-epsilon 1e-6"
SPARSE_FAMILIES: tuple[Family, ...] = (
    build_deepseek(
        "DeepSeek V3.2", "deepseek_v32", "DeepseekV32ForCausalLM",
        flags=_FLAGS + _NORM, settings=(*_INDEXER, *EXPERT_GROUPS, TWO_BEST, FURTHER_TOKENS),
        rows=EXPERT_BIAS | PREDICTION_ROWS | _INDEXER_ROWS, other_names=ROUTED,
        complete=_complete_sparse, defaults=_DEFAULTS,
        expects={"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    build_deepseek(
        "GLM 5", "glm_moe_dsa", "GlmMoeDsaForCausalLM",
        flags=f"{_FLAGS}{_NORM} --dsa-indexer-rope-interleaved --no-dsa-indexer-rotate-activation",
        settings=(
            *_INDEXER, *EXPERT_GROUPS, TWO_BEST, FURTHER_TOKENS,
            ConfigKey("index_topk_freq", "--dsa-indexer-topk-freq", default=1),
            ConfigKey("index_skip_topk_offset", "--dsa-indexer-skip-topk-offset", default=1),
        ),
        rows=EXPERT_BIAS | PREDICTION_ROWS | _INDEXER_ROWS, other_names=ROUTED,
        complete=_complete_glm, defaults=_GLM_DEFAULTS,
        expects={"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "index_topk_pattern": None},
    ),
)  # fmt: skip
