# SPDX-License-Identifier: Apache-2.0
"""Families of hybrids that mix short convolutions with full attention: LFM 2; see `hybrid_families.py`."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.training.recipes.family import ConfigKey, Family, LayerLetters, Row
from megatron.training.recipes.family_defaults import Fields, size, without
from megatron.training.recipes.family_rows import (
    LLAMA_ROWS,
    OURS,
    THEIRS,
    build_gated_rows,
    build_rows,
    rename_rows,
    without_rows,
)
from megatron.training.recipes.family_settings import (
    EXPERT_WIDTH,
    HEAD_WIDTH,
    LLAMA_FLAGS,
    ROTARY_BASE,
    SIZES,
    TOP_K,
    UNTIED,
    with_experts,
)
from megatron.training.recipes.hybrid_families import in_pairs

_LFM = without(size(32, 2560, 12288, 32, 8, 128000), "hidden_act", "rms_norm_eps") | {
    "norm_eps": 1e-5, "tie_word_embeddings": True, "conv_bias": False, "conv_L_cache": 3, "layer_types": None,
}  # fmt: skip
_DEFAULTS: Mapping[str, Fields] = {
    "lfm2": _LFM
    | {
        "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True,
        "full_attn_idxs": None,
    },
    "lfm2_moe": _LFM
    | {
        "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_dense_layers": 2,
        "num_experts_per_tok": 4, "num_experts": 32, "use_expert_bias": True, "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    },
}  # fmt: skip


def _complete_lfm2(fields: Fields) -> Fields:
    """Fill in the layers, and the width of an MLP that the class makes of others."""
    attention, multiple = fields.pop("full_attn_idxs"), fields.pop("block_multiple_of")
    factor, layers = fields.pop("block_ffn_dim_multiplier"), range(fields["num_hidden_layers"])
    if fields["layer_types"] is None:
        chosen = layers if attention is None else attention
        fields["layer_types"] = ["full_attention" if layer in chosen else "conv" for layer in layers]
    if fields["block_auto_adjust_ff_dim"]:
        width = int(2 * fields["intermediate_size"] / 3)
        if factor is not None:
            width = multiple * -(-int(factor * width) // multiple)
        fields |= {"intermediate_size": width, "block_auto_adjust_ff_dim": False}
    return fields


_SETTINGS = (
    UNTIED, ConfigKey("norm_eps", "--norm-epsilon", default=1e-5), ROTARY_BASE, HEAD_WIDTH,
    ConfigKey("conv_bias", "--short-conv-bias", "switch", default=False),
    ConfigKey("conv_L_cache", "--short-conv-kernel-dim", default=3),
)  # fmt: skip
_LETTERS = {"conv": "L", "full_attention": "*"}
_ROWS = {
    **without_rows(LLAMA_ROWS, "layernorm", "linear_proj", ".mlp."),
    **rename_rows("", "", {"decoder.final_layernorm": "model.embedding_norm"}),
    **rename_rows(
        OURS, THEIRS,
        {"input_layernorm": "operator_norm", "pre_mlp_layernorm": "ffn_norm", "self_attention.linear_proj":
         "self_attn.out_proj", "self_attention.q_layernorm": "self_attn.q_layernorm",
         "self_attention.k_layernorm": "self_attn.k_layernorm"},
    ),
    **rename_rows(
        OURS, THEIRS,
        {"self_attention.in_proj": "conv.in_proj", "self_attention.conv1d": "conv.conv",
         "self_attention.out_proj": "conv.out_proj"}, "weight", "bias",
    ),
    **build_gated_rows("mlp", "feed_forward", "w1", "w3", "w2"),
}  # fmt: skip
_EXPERT_ROWS = {
    **build_gated_rows("mlp.experts", "feed_forward.experts.{expert}", "w1", "w3", "w2"),
    **rename_rows(OURS, THEIRS, {"mlp.router": "feed_forward.gate"}),
    **build_rows(Row(f"{OURS}mlp.router.expert_bias", (f"{THEIRS}feed_forward.expert_bias",))),
}
_OTHER_NAMES = {"tie_embedding": "tie_word_embeddings"}

CONVOLUTION_FAMILIES: tuple[Family, ...] = (
    Family(
        name="LFM 2",
        model_type="lfm2",
        model_class="Lfm2ForCausalLM",
        flags=f"{LLAMA_FLAGS} --qk-layernorm",
        sizes=SIZES,
        settings=_SETTINGS,
        rows=in_pairs(_ROWS),
        rope={"rope_theta": 1000000.0},
        letters=LayerLetters(_LETTERS, mlps="dense"),
        defaults=_DEFAULTS["lfm2"],
        other_names=_OTHER_NAMES | {"block_ff_dim": "intermediate_size"},
        expects={"block_auto_adjust_ff_dim": False},
        complete=_complete_lfm2,
    ),
    Family(
        name="LFM 2 MoE",
        model_type="lfm2_moe",
        model_class="Lfm2MoeForCausalLM",
        flags=f"{LLAMA_FLAGS} --qk-layernorm --moe-router-score-function sigmoid",
        sizes=SIZES,
        settings=(
            *_SETTINGS,
            *with_experts(
                ConfigKey("num_experts", "--num-experts"), TOP_K, EXPERT_WIDTH,
                ConfigKey("routed_scaling_factor", "--moe-router-topk-scaling-factor", default=1.0),
                ConfigKey("use_expert_bias", "--moe-router-enable-expert-bias", "switch", default=False),
            ),
        ),
        rows=in_pairs(_ROWS | _EXPERT_ROWS),
        rope={"rope_theta": 1000000.0},
        letters=LayerLetters(_LETTERS, mlps="num_dense_layers"),
        defaults=_DEFAULTS["lfm2_moe"],
        other_names=_OTHER_NAMES,
    ),
)  # fmt: skip
