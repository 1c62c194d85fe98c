# SPDX-License-Identifier: Apache-2.0
"""The families of hybrids: Mamba-2 or linear attention with a state, and attention; see `families.py`.

Their layers are letters of --hybrid-layer-pattern here. Where a layer of theirs is a mixer and an MLP, two letters are
one layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.training.recipes.family import ConfigKey, Family, LayerLetters, Row
from megatron.training.recipes.family_rows import (
    BIASED_ROWS,
    EXPERTS,
    LLAMA_ROWS,
    OURS,
    QK_NORMS,
    THEIRS,
    build_gated_rows,
    build_rows,
    list_projections,
    rename_rows,
    without_rows,
)
from megatron.training.recipes.family_settings import (
    ATTENTION_BIAS,
    EXPERT_GROUPS,
    EXPERT_WIDTH,
    GRANITE_MULTIPLIERS,
    HEAD_WIDTH,
    LLAMA_FLAGS,
    MLP_BIAS,
    ROTARY_SHARE,
    SIZES,
    TOP_K,
    TWO_BEST,
    UNNORMALISED,
    UNTIED,
    USUAL,
    build_sizes,
    list_router_flags,
    with_experts,
)
from megatron.training.recipes.hybrid_defaults import (
    FULL,
    HYBRID_DEFAULTS,
    LINEAR,
    complete_bamba,
    complete_falcon_h1,
    complete_granite_hybrid,
    complete_nemotron_h,
    complete_qwen_hybrid,
)

# ---- settings

DELTA = tuple(
    ConfigKey(name, f"--{name.replace('_', '-')}")
    for name in (
        "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )
)  # fmt: skip


def build_mamba_settings(**names: str) -> tuple[ConfigKey, ...]:
    """The fields of a Mamba-2 layer; names: those that are called otherwise than in most files."""
    usual = (
        ConfigKey("mamba_n_heads", "--mamba-num-heads"),
        ConfigKey("mamba_d_head", "--mamba-head-dim"),
        ConfigKey("mamba_n_groups", "--mamba-num-groups"),
        ConfigKey("mamba_d_state", "--mamba-state-dim"),
        ConfigKey("mamba_conv_bias", "--disable-mamba-conv-bias", "inverted switch", default=True),
        ConfigKey("mamba_proj_bias", "--mamba-proj-bias", "switch", default=False),
        ConfigKey("rms_norm_eps", "--mamba-norm-epsilon", default=1e-5),
        ConfigKey("mamba_expand", "--mamba-num-heads", "expansion"),
        ConfigKey("time_step_limit", "--mamba-dt-min", "bounds", word="--mamba-dt-max"),
    )
    renamed = (dataclasses.replace(each, theirs=names.get(each.theirs, each.theirs)) for each in usual)
    return tuple(setting for setting in renamed if setting.theirs)


# ---- rows


def in_pairs(rows: Mapping[str, Row]) -> tuple[Row, ...]:
    """The rows of models whose layers are two letters here. Decoders of letters end in a norm of another name."""
    return tuple(
        dataclasses.replace(
            row,
            ours=row.ours.replace("decoder.final_layernorm", "decoder.final_norm"),
            theirs=tuple(name.replace("{layer}", "{pair}") for name in row.theirs),
        )
        for row in rows.values()
    )


def build_mamba_rows(theirs: str) -> dict[str, Row]:
    """theirs: prefix of the mixer."""
    plain = ("A_log", "D", "dt_bias", "conv1d.weight", "conv1d.bias", "norm.weight")
    names = (*plain, *(f"{side}_proj.{kind}" for side in ("in", "out") for kind in ("weight", "bias")))
    return build_rows(*(Row(f"{OURS}mixer.{name}", (f"{theirs}{name}",)) for name in names))


def _build_qwen_rows(*projections: str, form: str, sections: tuple[tuple[str, ...], ...]) -> dict[str, Row]:
    theirs = f"{THEIRS}linear_attn."
    names = tuple(f"{theirs}in_proj_{name}.weight" for name in projections)
    return {
        **LLAMA_ROWS,
        **QK_NORMS,
        **build_rows(
            *(
                Row(f"{OURS}self_attention.linear_qkv.{kind}", list_projections(kind), "gated_qkv")
                for kind in ("weight", "bias")
            ),
            Row(f"{OURS}self_attention.in_proj.weight", names, form, sections=sections, kind="gated_delta_net"),  # type: ignore[arg-type]
            *(Row(f"{OURS}self_attention.{name}", (f"{theirs}{name}",)) for name in ("A_log", "dt_bias")),
        ),
        **rename_rows(OURS, THEIRS, {"self_attention.linear_proj": "self_attn.o_proj"}, "bias"),
        **rename_rows(
            f"{OURS}self_attention.", theirs, {"conv1d": "conv1d", "out_norm": "norm", "out_proj": "out_proj"}
        ),
    }


QWEN_EXPERTS = {
    **EXPERTS,
    **build_gated_rows("mlp.shared_experts", "mlp.shared_expert"),
    **build_rows(Row(f"{OURS}mlp.shared_experts.gate_weight", (f"{THEIRS}mlp.shared_expert_gate.weight",))),
}
QWEN_NEXT_ROWS = _build_qwen_rows(
    "qkvz", "ba", form="grouped_sections", sections=(("query", "key", "value", "z"), ("beta", "alpha"))
)
QWEN_35_ROWS = _build_qwen_rows(
    "qkv", "z", "b", "a", form="sections", sections=(("query", "key", "value"), ("z",), ("beta",), ("alpha",))
)
_MIXER = "backbone.layers.{layer}.mixer."
_BACKBONE = {
    **rename_rows(
        "", "", {"embedding.word_embeddings": "backbone.embeddings", "decoder.final_norm": "backbone.norm_f",
                 "output_layer": "lm_head"},
    ),
    **rename_rows(OURS, "backbone.layers.{layer}.", {"input_layernorm": "norm"}),
    **build_mamba_rows(_MIXER),
}  # fmt: skip


def _list_qkv(prefix: str, kind: str) -> tuple[str, ...]:
    return tuple(f"{prefix}{letter}_proj.{kind}" for letter in "qkv")


NEMOTRON_H_ROWS = {
    **_BACKBONE,
    **rename_rows(OURS, "backbone.layers.{layer}.", {"pre_mlp_layernorm": "norm"}),
    **build_rows(Row(f"{OURS}self_attention.linear_qkv.weight", _list_qkv(_MIXER, "weight"), "qkv")),
    **rename_rows(OURS, _MIXER, {"self_attention.linear_proj": "o_proj"}),
    **rename_rows(OURS, _MIXER, {"mlp.linear_fc1": "up_proj", "mlp.linear_fc2": "down_proj"}, "weight", "bias"),
    **rename_rows(
        OURS, _MIXER,
        {"mlp.shared_experts.linear_fc1": "shared_experts.up_proj",
         "mlp.shared_experts.linear_fc2": "shared_experts.down_proj"}, "weight", "bias",
    ),
    **rename_rows(
        OURS, _MIXER,
        {"mlp.experts.linear_fc1": "experts.{expert}.up_proj", "mlp.experts.linear_fc2": "experts.{expert}.down_proj",
         "mlp.router": "gate", "mlp.fc1_latent_proj": "fc1_latent_proj", "mlp.fc2_latent_proj": "fc2_latent_proj"},
    ),
    **build_rows(Row(f"{OURS}mlp.router.expert_bias", (f"{_MIXER}gate.e_score_correction_bias",))),
}  # fmt: skip
BAMBA_ROWS = {
    **without_rows(BIASED_ROWS, ".mlp."),
    **build_gated_rows("mlp", "feed_forward"),
    **build_rows(
        Row(
            f"{OURS}mlp.linear_fc1.bias",
            (f"{THEIRS}feed_forward.gate_proj.bias", f"{THEIRS}feed_forward.up_proj.bias"), "stacked",
        )
    ),
    **rename_rows(OURS, THEIRS, {"mlp.linear_fc2": "feed_forward.down_proj"}, "bias"),
    **rename_rows(OURS, THEIRS, {"pre_mlp_layernorm": "pre_ff_layernorm"}),
    **rename_rows("", "", {"decoder.final_layernorm": "model.final_layernorm"}),
    **build_mamba_rows(f"{THEIRS}mamba."),
}  # fmt: skip
# In each layer both mixers of Bamba.
FALCON_H1_ROWS = {
    ours: dataclasses.replace(row, ours=ours)
    for name, row in BAMBA_ROWS.items()
    for ours in [
        name.replace(".self_attention.", ".self_attention.attention.").replace(".mixer.", ".self_attention.mamba.")
    ]
}
# Gate and up are one matrix; with experts the same MLP is the shared expert.
GRANITE_HYBRID_ROWS = {
    **without_rows(BIASED_ROWS, ".mlp."),
    **rename_rows(
        OURS, THEIRS,
        {"mlp.linear_fc1": "shared_mlp.input_linear", "mlp.linear_fc2": "shared_mlp.output_linear",
         "mlp.shared_experts.linear_fc1": "shared_mlp.input_linear",
         "mlp.shared_experts.linear_fc2": "shared_mlp.output_linear",
         "mlp.experts.linear_fc1": "block_sparse_moe.input_linear",
         "mlp.experts.linear_fc2": "block_sparse_moe.output_linear", "mlp.router": "block_sparse_moe.router.layer"},
    ),
    **build_mamba_rows(f"{THEIRS}mamba."),
}  # fmt: skip


# ---- the families

_LINEAR_OR_FULL = {"linear_attention": "G", "full_attention": "*"}
_MAMBA_OR_FULL = {LINEAR: "M", FULL: "*"}
_QWEN_EXPERT_SETTINGS = with_experts(
    ConfigKey("num_experts", "--moe-shared-expert-gate", "switch"),
    ConfigKey("num_experts", "--num-experts"),
    TOP_K,
    EXPERT_WIDTH,
    ConfigKey("shared_expert_intermediate_size", "--moe-shared-expert-intermediate-size"),
)


def _qwen(name: str, model_type: str, model_class: str, **parts: Any) -> Family:
    return Family(
        name=name,
        model_type=model_type,
        model_class=model_class,
        flags=f"{LLAMA_FLAGS} --apply-layernorm-1p --no-linear-norm-1p --qk-layernorm --attention-output-gate",
        sizes=parts.pop("sizes", SIZES),
        settings=(*USUAL, ROTARY_SHARE, HEAD_WIDTH, *DELTA, *ATTENTION_BIAS, *parts.pop("settings", ())),
        rows=in_pairs(parts.pop("rows")),
        rope={"rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        defaults=HYBRID_DEFAULTS[model_type],
        complete=complete_qwen_hybrid,
        # Of the MTP layers.
        left_out=("mtp.",),
        **parts,
    )


HYBRIDS: tuple[Family, ...] = (
    _qwen(
        "Qwen3-Next", "qwen3_next", "Qwen3NextForCausalLM",
        settings=(*_QWEN_EXPERT_SETTINGS, *with_experts(UNNORMALISED)),
        letters=LayerLetters(_LINEAR_OR_FULL, mlps="mlp_only_layers"),
        rows={**QWEN_NEXT_ROWS, **QWEN_EXPERTS}, idle=frozenset(("full_attention_interval",)),
    ),
    _qwen(
        "Qwen 3.5", "qwen3_5_text", "Qwen3_5ForCausalLM",
        letters=LayerLetters(_LINEAR_OR_FULL, mlps="dense"), rows=QWEN_35_ROWS,
        idle=frozenset(("full_attention_interval",)),
    ),
    _qwen(
        "Qwen 3.5 MoE", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM",
        sizes=tuple(setting for setting in SIZES if setting.flag != "--ffn-hidden-size"),
        settings=_QWEN_EXPERT_SETTINGS, letters=LayerLetters(_LINEAR_OR_FULL, mlps="experts"),
        rows={**QWEN_35_ROWS, **QWEN_EXPERTS}, idle=frozenset(("full_attention_interval",)),
    ),
    Family(
        name="Nemotron-H, Nemotron 3",
        model_type="nemotron_h",
        model_class="NemotronHForCausalLM",
        flags="--position-embedding-type none --normalization RMSNorm --squared-relu --disable-bias-linear "
        "--untie-embeddings-and-output-weights",
        sizes=tuple(setting for setting in SIZES if setting.flag != "--num-layers"),
        settings=(
            HEAD_WIDTH, MLP_BIAS, ConfigKey("layer_norm_epsilon", "--norm-epsilon", default=1e-5),
            *build_mamba_settings(
                mamba_n_heads="mamba_num_heads", mamba_d_head="mamba_head_dim", mamba_n_groups="n_groups",
                mamba_d_state="ssm_state_size", mamba_conv_bias="use_conv_bias", mamba_proj_bias="use_bias",
                rms_norm_eps="layer_norm_epsilon", mamba_expand="", time_step_limit="",
            ),
            # There it is a bound, too, and not of initial values alone.
            ConfigKey("time_step_min", "--mamba-dt-min", default=0.0),
            *list_router_flags("n_routed_experts"),
            *with_experts(
                ConfigKey("n_routed_experts", "--num-experts"), TOP_K, EXPERT_WIDTH,
                ConfigKey("moe_shared_expert_intermediate_size", "--moe-shared-expert-intermediate-size"),
                ConfigKey("moe_latent_size", "--moe-latent-size"),
                ConfigKey("routed_scaling_factor", "--moe-router-topk-scaling-factor", default=1.0),
                *EXPERT_GROUPS, TWO_BEST,
            ),
        ),
        rows=tuple(NEMOTRON_H_ROWS.values()),
        is_rotary=False,
        letters=LayerLetters(
            {LINEAR: "M", "moe": "E", "mlp": "-", FULL: "*"}, field="layers_block_type",
        ),
        defaults=HYBRID_DEFAULTS["nemotron_h"],
        # Whatever the fields say, attention has neither biases nor a window there, and nothing is tied.
        idle=frozenset(
            """expand time_step_max time_step_limit time_step_floor chunk_size mamba_proj_bias mamba_ssm_cache_dtype
            n_shared_experts moe_shared_expert_overlap mtp_layers_block_type residual_in_fp32 rescale_prenorm_residual
            attention_bias sliding_window num_logits_to_keep tie_word_embeddings use_mamba_kernels
            hybrid_override_pattern""".split()
        ),
        other_names={"layer_types": "layers_block_type", "num_local_experts": "n_routed_experts",
                     "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_dt_min": "time_step_min",
                     "mamba_conv_bias": "use_conv_bias"},
        complete=complete_nemotron_h,
        left_out=("mtp.", "backbone.mtp."),
    ),
    Family(
        name="Mamba 2",
        model_type="mamba2",
        model_class="Mamba2ForCausalLM",
        # It has no attention; the flag must say something.
        flags="--position-embedding-type none --normalization RMSNorm --disable-bias-linear --num-attention-heads 1",
        sizes=(ConfigKey("num_hidden_layers", "--num-layers"), ConfigKey("hidden_size", "--hidden-size")),
        settings=(
            UNTIED, ConfigKey("layer_norm_epsilon", "--norm-epsilon", default=1e-5),
            *build_mamba_settings(
                mamba_n_heads="num_heads", mamba_d_head="head_dim", mamba_n_groups="n_groups",
                mamba_d_state="state_size", mamba_conv_bias="use_conv_bias", mamba_proj_bias="use_bias",
                rms_norm_eps="layer_norm_epsilon", mamba_expand="expand",
            ),
        ),
        rows=tuple(_BACKBONE.values()),
        is_rotary=False,
        letters=LayerLetters({LINEAR: "M"}, field=""),
        defaults=HYBRID_DEFAULTS["mamba2"],
        idle=frozenset(
            """residual_in_fp32 time_step_rank time_step_min time_step_max time_step_floor rescale_prenorm_residual
            chunk_size""".split()
        ),
    ),
    Family(
        name="Bamba",
        model_type="bamba",
        model_class="BambaForCausalLM",
        flags=LLAMA_FLAGS,
        sizes=SIZES,
        settings=(*USUAL, ROTARY_SHARE, *ATTENTION_BIAS, MLP_BIAS, *build_mamba_settings()),
        rows=in_pairs(BAMBA_ROWS),
        rope={"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        letters=LayerLetters(_MAMBA_OR_FULL, field="attn_layer_indices", mlps="dense"),
        defaults=HYBRID_DEFAULTS["bamba"],
        # The class makes the kinds of layers of their indices.
        idle=frozenset(
            "mamba_chunk_size z_loss_coefficient num_logits_to_keep layers_block_type layer_types".split()
        ),
        complete=complete_bamba,
    ),
    Family(
        name="Falcon-H1",
        model_type="falcon_h1",
        model_class="FalconH1ForCausalLM",
        flags=f"{LLAMA_FLAGS} --mamba-beside-attention",
        sizes=SIZES,
        settings=(
            *USUAL, HEAD_WIDTH, *ATTENTION_BIAS, MLP_BIAS,
            *build_mamba_settings(mamba_expand=""),
            ConfigKey("mamba_d_ssm", "--mamba-num-heads", "expansion", word="channels"),
            ConfigKey("projectors_bias", "--mamba-proj-bias", "switch", default=False),
            ConfigKey("mamba_rms_norm|mamba_norm_before_gate", "--mamba-gate-norm", "gate norm"),
            ConfigKey("embedding_multiplier", "--embedding-multiplier", default=1.0),
            ConfigKey("lm_head_multiplier", "--logit-multiplier", default=1.0),
            ConfigKey("key_multiplier", "--key-multiplier", default=1.0),
            ConfigKey("attention_in_multiplier", "--attention-input-multiplier", default=1.0),
            ConfigKey("attention_out_multiplier", "--attention-output-multiplier", default=1.0),
            ConfigKey("ssm_in_multiplier", "--mamba-input-multiplier", default=1.0),
            ConfigKey("ssm_out_multiplier", "--mamba-output-multiplier", default=1.0),
            ConfigKey("ssm_multipliers", "--mamba-section-multipliers", "multipliers"),
            ConfigKey(
                "mlp_multipliers", "--activation-input-multiplier", "multipliers", word="--mlp-output-multiplier"
            ),
        ),
        rows=tuple(FALCON_H1_ROWS.values()),
        defaults=HYBRID_DEFAULTS["falcon_h1"],
        idle=frozenset("mamba_chunk_size mamba_expand num_logits_to_keep layers_block_type layer_types".split()),
        complete=complete_falcon_h1,
    ),
    Family(
        name="Granite 4",
        model_type="granitemoehybrid",
        model_class="GraniteMoeHybridForCausalLM",
        flags=LLAMA_FLAGS,
        sizes=(
            *build_sizes(intermediate_size="shared_intermediate_size"),
            ConfigKey("num_key_value_heads", "--num-query-groups", "query groups"),
        ),
        settings=(
            *USUAL, *ATTENTION_BIAS, *GRANITE_MULTIPLIERS, *build_mamba_settings(),
            *with_experts(
                ConfigKey("num_local_experts", "--num-experts"), TOP_K,
                ConfigKey("intermediate_size", "--moe-ffn-hidden-size"),
                ConfigKey("shared_intermediate_size", "--moe-shared-expert-intermediate-size"),
            ),
        ),
        rows=in_pairs(GRANITE_HYBRID_ROWS),
        rotary_field="position_embedding_type",
        letters=LayerLetters(_MAMBA_OR_FULL, mlps="experts"),
        defaults=HYBRID_DEFAULTS["granitemoehybrid"],
        idle=frozenset(("mamba_chunk_size",)),
        other_names={"layers_block_type": "layer_types"},
        complete=complete_granite_hybrid,
    ),
)  # fmt: skip
