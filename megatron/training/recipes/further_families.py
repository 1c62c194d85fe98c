# SPDX-License-Identifier: Apache-2.0
"""Families whose layers other families have, too: a name, the fields of their config.json and their defaults."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.training.recipes.family import Family, Row, Setting
from megatron.training.recipes.family_defaults import Fields, list_layers, size, without
from megatron.training.recipes.family_rows import (
    BIASED_ROWS,
    MIXTRAL_EXPERTS,
    MLP_BIASES,
    OURS,
    QK_NORMS,
    STARCODER2_ROWS,
    THEIRS,
    build_rows,
)
from megatron.training.recipes.family_settings import (
    ATTENTION_BIAS,
    GRANITE_MULTIPLIERS,
    HEAD_WIDTH,
    MLP_BIAS,
    ROTARY_BASE,
    ROTARY_SHARE,
    TOP_K,
    UNTIED,
    WINDOW,
    WINDOW_LAYERS,
    build_family,
    build_llama,
)

_DEFAULTS: Mapping[str, Fields] = {
    "granite": size(32, 4096, 11008, 32, None, 2048)
    | {
        "attention_bias": False, "mlp_bias": False, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
        "residual_multiplier": 1.0, "attention_multiplier": 1.0,
    },
    "seed_oss": size(64, 4096, 27648, 80, 8, 524288)
    | {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False, "head_dim": 128},
    "ministral": size(32, 4096, 14336, 32, 8, 131072)
    | {"head_dim": None, "sliding_window": 4096, "layer_types": None},
    "starcoder2": without(size(30, 3072, 12288, 24, 2, 4096), "rms_norm_eps")
    | {
        "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "sliding_window": None, "use_bias": True,
        "tie_word_embeddings": True,
    },
    "minimax_m2": size(62, 3072, 1536, 48, 8, 196608)
    | {"head_dim": 128, "num_experts_per_tok": 8, "num_local_experts": 256},
}  # fmt: skip


def _complete_ministral(fields: Fields) -> Fields:
    """Fill in the layers: all have the window, where there is one."""
    if fields["layer_types"] is None:
        kind = "full_attention" if fields["sliding_window"] is None else "sliding_attention"
        fields["layer_types"] = [kind for _ in list_layers(fields)]
    if fields["sliding_window"] is None:
        fields["layer_types"] = ["full_attention" for _ in fields["layer_types"]]
    return fields


def _complete_minimax_m2(fields: Fields) -> Fields:
    """Fill in the share of a head that is rotated, which the published files say in channels."""
    channels = fields.pop("rotary_dim", None)
    if channels is not None:
        fields.setdefault("partial_rotary_factor", channels / fields["head_dim"])
    return fields


FURTHER: tuple[Family, ...] = (
    build_llama(
        "Granite 3", "granite", "GraniteForCausalLM",
        settings=(HEAD_WIDTH, *ATTENTION_BIAS, MLP_BIAS, *GRANITE_MULTIPLIERS),
        rows={**BIASED_ROWS, **MLP_BIASES},
        defaults=_DEFAULTS["granite"],
    ),
    build_llama(
        "Seed-OSS", "seed_oss", "SeedOssForCausalLM",
        settings=(
            HEAD_WIDTH, MLP_BIAS, ATTENTION_BIAS[0],
            Setting("attention_out_bias", "--add-attention-output-bias", "switch", default=False),
        ),
        rows={**BIASED_ROWS, **MLP_BIASES},
        defaults=_DEFAULTS["seed_oss"],
        idle=frozenset(("residual_dropout",)),
    ),
    build_llama(
        "Ministral", "ministral", "MinistralForCausalLM",
        settings=(HEAD_WIDTH, WINDOW, WINDOW_LAYERS),
        defaults=_DEFAULTS["ministral"],
        complete=_complete_ministral,
    ),
    build_family(
        "Starcoder 2", "starcoder2", "Starcoder2ForCausalLM",
        flags="--openai-gelu",
        settings=(
            UNTIED, ROTARY_BASE, Setting("norm_epsilon", "--norm-epsilon", default=1e-5), HEAD_WIDTH, WINDOW,
            Setting("use_bias", "--disable-bias-linear", "inverted switch", default=True),
        ),
        rows=STARCODER2_ROWS,
        defaults=_DEFAULTS["starcoder2"],
        idle=frozenset(("residual_dropout", "embedding_dropout")),
    ),
    build_llama(
        "MiniMax M2", "minimax_m2", "MiniMaxM2ForCausalLM",
        flags="--qk-layernorm --qk-norm-scope all --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        settings=(HEAD_WIDTH, ROTARY_SHARE, Setting("num_local_experts", "--num-experts"), TOP_K),
        rows={
            **QK_NORMS, **MIXTRAL_EXPERTS,
            **build_rows(
                Row(f"{OURS}mlp.router.expert_bias", (f"{THEIRS}block_sparse_moe.e_score_correction_bias",))
            ),
        },
        defaults=_DEFAULTS["minimax_m2"],
        other_names={"num_experts": "num_local_experts"},
        complete=_complete_minimax_m2,
    ),
)  # fmt: skip
