# SPDX-License-Identifier: Apache-2.0
"""Families whose attention and MLP stand side by side and read one norm: Phi, Cohere, StableLM, Falcon; see
`further_families.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from megatron.core.errors import ConfigError
from megatron.training.recipes.family import ConfigKey, Family, Row
from megatron.training.recipes.family_defaults import Fields, fill_layers, list_layers, size, without
from megatron.training.recipes.family_rows import (
    BIASED_ROWS,
    LLAMA_ROWS,
    OURS,
    QKV_BIAS,
    SHARED_EXPERTS,
    THEIRS,
    build_rows,
    rename_rows,
    without_rows,
)
from megatron.training.recipes.family_settings import (
    ATTENTION_BIAS,
    HALF_ROTATED,
    HEAD_WIDTH,
    ROTARY_BASE,
    ROTARY_SHARE,
    TOP_K,
    UNTIED,
    WINDOW,
    WINDOW_LAYERS,
    build_family,
    build_sizes,
)

_UNROTATED = "layers without positions"
_PARALLEL = "--parallel-residual --parallel-residual-shares-norm"
_COHERE = without(size(40, 8192, 22528, 64, None, 8192), "rms_norm_eps") | {
    "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True, "attention_bias": False,
}  # fmt: skip
_COHERE2 = _COHERE | {"sliding_window": 4096, "layer_types": None}
_DEFAULTS: Mapping[str, Fields] = {
    "phi": without(size(24, 2048, 8192, 32, None, 2048), "rms_norm_eps")
    | {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "qk_layernorm": False},
    "stablelm": without(size(32, 2560, 6912, 32, 32, 4096), "rms_norm_eps")
    | {"layer_norm_eps": 1e-5, "use_qkv_bias": False, "qk_layernorm": False, "use_parallel_residual": False},
    "cohere": _COHERE | {"use_qk_norm": False},
    "cohere2": _COHERE2,
    "cohere2_moe": without(_COHERE2, "rope_parameters")
    | {
        "head_dim": 128, "rope_theta": 10000.0, "rope_scaling": None, "num_experts_per_tok": 2, "num_experts": 8,
        "num_shared_experts": 0, "shared_expert_combination_strategy": "average", "expert_selection_fn": "softmax",
        "mlp_layer_types": None, "prefix_dense_sliding_window_pattern": 1, "norm_topk_prob": True,
        "prefix_dense_intermediate_size": None, "rms_norm_eps": None, "sliding_window_pattern": 4,
    },
    "falcon": {
        "num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71, "max_position_embeddings": 2048,
        "num_ln_in_parallel_attn": None, "layer_norm_epsilon": 1e-5, "num_kv_heads": None, "alibi": False,
        "new_decoder_architecture": False, "multi_query": True, "parallel_attn": True, "bias": False,
        "rope_parameters": None, "ffn_hidden_size": None, "activation": "gelu", "tie_word_embeddings": True,
    },
}  # fmt: skip


def _complete_cohere2(fields: Fields) -> Fields:
    """Fill in the layers: every so many see everything, and have no positions."""
    every = fields.pop("sliding_window_pattern", None) or 4
    fill_layers(fields, {layer: layer % every != 0 for layer in list_layers(fields)})
    return fields


def _complete_cohere2_moe(fields: Fields) -> Fields:
    """Fill in the layers: dense ones come first, and have a separate pattern."""
    dense, every = fields.pop("first_k_dense_replace", 0), fields.pop("sliding_window_pattern")
    first = fields.pop("prefix_dense_sliding_window_pattern")
    periods = {layer: (layer, first) if layer <= dense else (layer - dense, every) for layer in list_layers(fields)}
    fill_layers(fields, {layer: place % period != 0 for layer, (place, period) in periods.items()})
    if fields["mlp_layer_types"] is None:
        fields["mlp_layer_types"] = ["dense" if layer <= dense else "sparse" for layer in list_layers(fields)]
    # Dense layers that all see everything have positions.
    turns = [first == 1 and kind == "dense" for kind in fields["mlp_layer_types"]]
    kinds = zip(fields["layer_types"], turns, strict=False)
    fields[_UNROTATED] = ["sliding_attention" if turn else kind for kind, turn in kinds]
    if fields["rope_scaling"] and not fields.get("rope_parameters"):
        raise ConfigError("rope_scaling stands alone in config.json; of this model only rope_parameters are read")
    fields["rope_scaling"] = None
    if fields["expert_selection_fn"] == "softmax":
        fields["norm_topk_prob"] = True
    if not fields["num_shared_experts"]:
        fields["shared_expert_combination_strategy"] = "sum"
    if fields["prefix_dense_intermediate_size"] is None:
        fields["prefix_dense_intermediate_size"] = fields["intermediate_size"]
    return fields


def _complete_falcon(fields: Fields) -> Fields:
    """Say of the first, smaller ones what the fields of the larger ones say: as many key heads, and one norm."""
    if not fields["new_decoder_architecture"]:
        if fields["parallel_attn"] and fields["num_ln_in_parallel_attn"] == 2:
            raise ConfigError(
                "num_ln_in_parallel_attn is 2 in config.json; layers without new_decoder_architecture have one norm"
            )
        heads = 1 if fields["multi_query"] else fields["num_attention_heads"]
        fields |= {"num_kv_heads": heads, "num_ln_in_parallel_attn": 1}
    width, groups, norms = (fields[name] for name in ("ffn_hidden_size", "num_kv_heads", "num_ln_in_parallel_attn"))
    return fields | {
        "new_decoder_architecture": True, "multi_query": True,
        "ffn_hidden_size": 4 * fields["hidden_size"] if width is None else width,
        "num_kv_heads": fields["num_attention_heads"] if groups is None else groups,
        "num_ln_in_parallel_attn": 2 if norms is None else norms,
    }  # fmt: skip


_NORM_BIASES = {
    **rename_rows(
        OURS, THEIRS, {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}, "bias"
    ),
    **rename_rows("", "", {"decoder.final_layernorm": "model.norm"}, "bias"),
}
_EPSILON = ConfigKey("layer_norm_eps", "--norm-epsilon", default=1e-5)
_USUAL = (UNTIED, _EPSILON, ROTARY_BASE, HEAD_WIDTH)
_PHI_ROWS = {
    **without_rows(LLAMA_ROWS, ".mlp.", "pre_mlp", "linear_proj", "final_layernorm"), **QKV_BIAS,
    **rename_rows("", "", {"output_layer": "lm_head"}, "bias"),
    **rename_rows("", "", {"decoder.final_layernorm": "model.final_layernorm"}, "weight", "bias"),
    **rename_rows(
        OURS, THEIRS,
        {"input_layernorm": "input_layernorm", "self_attention.linear_proj": "self_attn.dense",
         "self_attention.q_layernorm": "self_attn.q_layernorm", "self_attention.k_layernorm": "self_attn.k_layernorm",
         "mlp.linear_fc1": "mlp.fc1", "mlp.linear_fc2": "mlp.fc2"}, "weight", "bias",
    ),
}  # fmt: skip
_COHERE_FLAGS = f"--swiglu --disable-bias-linear --norm-parameters weight --rotary-interleaved {_PARALLEL}"
_COHERE_SETTINGS = (
    *_USUAL, *ATTENTION_BIAS, ConfigKey("logit_scale", "--logit-multiplier", default=1.0, needed=True),
)  # fmt: skip
_FALCON = "transformer.h.{layer}."
_FALCON_ROWS = {
    **rename_rows("", "", {"embedding.word_embeddings": "transformer.word_embeddings", "output_layer": "lm_head"}),
    **rename_rows("", "", {"decoder.final_layernorm": "transformer.ln_f"}, "weight", "bias"),
    **rename_rows(
        OURS, _FALCON,
        {"self_attention.linear_qkv": "self_attention.query_key_value", "self_attention.linear_proj":
         "self_attention.dense", "mlp.linear_fc1": "mlp.dense_h_to_4h", "mlp.linear_fc2": "mlp.dense_4h_to_h",
         "pre_mlp_layernorm": "ln_mlp"}, "weight", "bias",
    ),
    **build_rows(
        *(
            Row(
                f"{OURS}input_layernorm.{kind}", (f"{_FALCON}input_layernorm.{kind}",),
                if_apart=(f"{_FALCON}ln_attn.{kind}",),
            )
            for kind in ("weight", "bias")
        )
    ),
}  # fmt: skip

PARALLEL_FAMILIES: tuple[Family, ...] = (
    build_family(
        "Phi 1, 2", "phi", "PhiForCausalLM",
        flags=f"--openai-gelu --add-output-layer-bias {_PARALLEL}",
        settings=(*_USUAL, ROTARY_SHARE, ConfigKey("qk_layernorm", "--qk-layernorm", "switch", default=False)),
        rows=_PHI_ROWS, rope=HALF_ROTATED, defaults=_DEFAULTS["phi"],
    ),
    build_family(
        "StableLM 2", "stablelm", "StableLmForCausalLM",
        flags="--swiglu --disable-bias-linear",
        settings=(
            UNTIED, _EPSILON, ROTARY_BASE, ROTARY_SHARE,
            ConfigKey("use_qkv_bias", "--add-qkv-bias", "switch", default=False),
            *(
                ConfigKey("use_parallel_residual", flag, "switch", default=False) for flag in _PARALLEL.split()
            ),
        ),
        rows={**LLAMA_ROWS, **_NORM_BIASES, **QKV_BIAS},
        rope={"rope_theta": 10000.0, "partial_rotary_factor": 0.25}, expects={"head_dim": None},
        defaults=_DEFAULTS["stablelm"],
    ),
    build_family(
        "Cohere: Command R", "cohere", "CohereForCausalLM",
        flags=_COHERE_FLAGS, settings=_COHERE_SETTINGS, rows=without_rows(BIASED_ROWS, "pre_mlp"),
        rope={"rope_theta": 500000.0}, defaults=_DEFAULTS["cohere"],
    ),
    build_family(
        "Cohere 2: Command R7B, A", "cohere2", "Cohere2ForCausalLM",
        flags=_COHERE_FLAGS,
        settings=(
            *_COHERE_SETTINGS, dataclasses.replace(WINDOW, needed=True), WINDOW_LAYERS,
            ConfigKey("layer_types", "--no-rope-freq", "full layers"),
        ),
        rows=without_rows(BIASED_ROWS, "pre_mlp"), idle=frozenset(("sliding_window_pattern",)),
        complete=_complete_cohere2, defaults=_DEFAULTS["cohere2"],
    ),
    build_family(
        "Cohere 2 MoE", "cohere2_moe", "Cohere2MoeForCausalLM",
        flags=_COHERE_FLAGS,
        sizes=(
            *build_sizes(intermediate_size="prefix_dense_intermediate_size"),
            ConfigKey("num_key_value_heads", "--num-query-groups", "query groups"),
        ),
        settings=(
            *_COHERE_SETTINGS, dataclasses.replace(WINDOW, needed=True), WINDOW_LAYERS,
            ConfigKey(_UNROTATED, "--no-rope-freq", "full layers"),
            ConfigKey("num_experts", "--num-experts"), TOP_K, ConfigKey("intermediate_size", "--moe-ffn-hidden-size"),
            ConfigKey("num_shared_experts*intermediate_size", "--moe-shared-expert-intermediate-size"),
            ConfigKey("shared_expert_combination_strategy", "--mlp-output-multiplier", "average", default="sum"),
            ConfigKey("expert_selection_fn", "--moe-router-score-function", "word", default="softmax", word="sigmoid"),
            ConfigKey("mlp_layer_types", "--moe-layer-freq", "layers with experts", word="sparse"),
        ),
        rows={**without_rows(BIASED_ROWS, "pre_mlp"), **SHARED_EXPERTS},
        complete=_complete_cohere2_moe, defaults=_DEFAULTS["cohere2_moe"],
        idle=frozenset(("first_k_dense_replace",)),
    ),
    build_family(
        "Falcon", "falcon", "FalconForCausalLM",
        flags="--parallel-residual",
        sizes=(
            *build_sizes(intermediate_size="ffn_hidden_size"),
            ConfigKey("num_kv_heads", "--num-query-groups", "query groups"),
        ),
        settings=(
            UNTIED, ConfigKey("layer_norm_epsilon", "--norm-epsilon", default=1e-5), ROTARY_BASE,
            ConfigKey("bias", "--disable-bias-linear", "inverted switch", default=True),
            ConfigKey("num_ln_in_parallel_attn", "--parallel-residual-shares-norm", "one norm"),
        ),
        rows=_FALCON_ROWS, other_names={"n_embed": "hidden_size"},
        expects={"new_decoder_architecture": True, "head_dim": None},
        complete=_complete_falcon, defaults=_DEFAULTS["falcon"],
    ),
)  # fmt: skip
