# SPDX-License-Identifier: Apache-2.0
"""Map between tensors of published files and parameters of ours, as rows that several families share.

The entries of families.py put them together; `family.py` says what a Row means. Names are as in the files.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron.training.recipes.family import Row


def rename_rows(prefix: str, their_prefix: str, names: Mapping[str, str], *kinds: str) -> dict[str, Row]:
    """Rows for modules that only have other names; kinds: weight, bias."""
    return {
        row.ours: row
        for ours, theirs in names.items()
        for kind in kinds or ("weight",)
        for row in [Row(f"{prefix}{ours}.{kind}", (f"{their_prefix}{theirs}.{kind}",))]
    }


def build_rows(*rows: Row) -> dict[str, Row]:
    return {row.ours: row for row in rows}


def without_rows(rows: Mapping[str, Row], *parts: str) -> dict[str, Row]:
    return {name: row for name, row in rows.items() if not any(part in name for part in parts)}


OURS, THEIRS = "decoder.layers.{layer}.", "model.layers.{layer}."


def list_projections(kind: str) -> tuple[str, ...]:
    return tuple(f"{THEIRS}self_attn.{letter}_proj.{kind}" for letter in "qkv")


def build_gated_rows(
    ours: str, theirs: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> dict[str, Row]:
    """A gated MLP: linear_fc1 is [gate | up], linear_fc2 is down."""
    return build_rows(
        Row(
            f"{OURS}{ours}.linear_fc1.weight",
            (f"{THEIRS}{theirs}.{gate}.weight", f"{THEIRS}{theirs}.{up}.weight"),
            "stacked",
        ),
        Row(f"{OURS}{ours}.linear_fc2.weight", (f"{THEIRS}{theirs}.{down}.weight",)),
    )


ENDS = {"embedding.word_embeddings": "model.embed_tokens", "decoder.final_layernorm": "model.norm"}
LLAMA_ROWS = {
    **rename_rows("", "", ENDS | {"output_layer": "lm_head"}),
    **rename_rows(
        OURS, THEIRS, {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
    ),
    **build_rows(Row(f"{OURS}self_attention.linear_qkv.weight", list_projections("weight"), "qkv")),
    **rename_rows(OURS, THEIRS, {"self_attention.linear_proj": "self_attn.o_proj"}),
    **build_gated_rows("mlp", "mlp"),
}
QKV_BIAS = build_rows(Row(f"{OURS}self_attention.linear_qkv.bias", list_projections("bias"), "qkv"))
QK_NORMS = rename_rows(OURS, THEIRS, {f"self_attention.{x}_layernorm": f"self_attn.{x}_norm" for x in "qk"})
# In these models "post_attention_layernorm" is a norm on attention's output; in Llama the same name stands for the norm
# before the MLP.
OUTPUT_NORMS = rename_rows(
    OURS, THEIRS,
    {"post_self_attn_layernorm": "post_attention_layernorm", "post_mlp_layernorm": "post_feedforward_layernorm"},
)  # fmt: skip
OUTPUT_NORM_ROWS = {**without_rows(LLAMA_ROWS, "input_layernorm", "pre_mlp_layernorm"), **OUTPUT_NORMS}
SANDWICH_NORMS = OUTPUT_NORMS | rename_rows(OURS, THEIRS, {"pre_mlp_layernorm": "pre_feedforward_layernorm"})
EXPERTS = build_gated_rows("mlp.experts", "mlp.experts.{expert}") | rename_rows(
    OURS, THEIRS, {"mlp.router": "mlp.gate"}
)
SHARED_EXPERTS = EXPERTS | build_gated_rows("mlp.shared_experts", "mlp.shared_experts")
EXPERT_BIAS = build_rows(Row(f"{OURS}mlp.router.expert_bias", (f"{THEIRS}mlp.gate.e_score_correction_bias",)))
# A layer of multi-token prediction as DeepSeek-V3's files have it: with copies of the embedding and the output layer.
PREDICTION_ROWS = {
    **rename_rows(
        "mtp.layers.{layer}.", THEIRS,
        {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "shared_head.norm"},
    ),
    **build_rows(
        Row(
            "embedding.word_embeddings.weight", ("model.embed_tokens.weight",), copies=(f"{THEIRS}embed_tokens.weight",)
        ),
        Row("output_layer.weight", ("lm_head.weight",), copies=(f"{THEIRS}shared_head.head.weight",)),
    ),
}  # fmt: skip
LATENT_ROWS = without_rows(LLAMA_ROWS, "linear_qkv") | rename_rows(
    OURS, THEIRS,
    {
        "self_attention.linear_q_proj": "self_attn.q_proj",
        "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
        "self_attention.q_layernorm": "self_attn.q_a_layernorm",
        "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
        "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
        "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
        "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
    },
)  # fmt: skip
# w1 is the gate, w3 the other half, w2 the way back.
MIXTRAL_EXPERTS = {
    **build_gated_rows("mlp.experts", "block_sparse_moe.experts.{expert}", "w1", "w3", "w2"),
    **rename_rows(OURS, THEIRS, {"mlp.router": "block_sparse_moe.gate"}),
}
# Already joined in their files.
PACKED_MLP = rename_rows(OURS, THEIRS, {"mlp.linear_fc1": "mlp.gate_up_proj"})
PHI3_ROWS = PACKED_MLP | build_rows(
    Row(f"{OURS}self_attention.linear_qkv.weight", (f"{THEIRS}self_attn.qkv_proj.weight",), "qkv"),
)
# An MLP without a gate: linear_fc1 is one matrix.
UNGATED_MLP = rename_rows(OURS, THEIRS, {"mlp.linear_fc1": "mlp.up_proj"})
NEMOTRON_ROWS = {
    **LLAMA_ROWS,
    **UNGATED_MLP,
    **rename_rows(
        OURS, THEIRS, {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}, "bias"
    ),
    **rename_rows("", "", {"decoder.final_layernorm": "model.norm"}, "bias"),
}
GPT2_MATRICES = {
    "self_attention.linear_proj": "attn.c_proj",
    "mlp.linear_fc1": "mlp.c_fc",
    "mlp.linear_fc2": "mlp.c_proj",
}
# The published files of GPT-2 itself leave out the prefix "transformer.".
GPT2_ROWS = {
    **rename_rows("embedding.", "transformer.", {"word_embeddings": "wte", "position_embeddings": "wpe"}),
    **rename_rows("decoder.", "transformer.", {"final_layernorm": "ln_f"}, "weight", "bias"),
    **rename_rows(
        OURS, "transformer.h.{layer}.", {"input_layernorm": "ln_1", "pre_mlp_layernorm": "ln_2"}, "weight", "bias"
    ),
    **rename_rows(OURS, "transformer.h.{layer}.", GPT2_MATRICES, "bias"),
    **build_rows(
        *(
            Row(f"{OURS}{ours}.weight", (f"transformer.h.{{layer}}.{theirs}.weight",), transposed=True)
            for ours, theirs in GPT2_MATRICES.items()
        ),
        Row(f"{OURS}self_attention.linear_qkv.weight", ("transformer.h.{layer}.attn.c_attn.weight",), "qkv", True),
        Row(f"{OURS}self_attention.linear_qkv.bias", ("transformer.h.{layer}.attn.c_attn.bias",), "qkv"),
    ),
}
GPT_NEOX_MODULES = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.linear_qkv": "attention.query_key_value",
    "self_attention.linear_proj": "attention.dense",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}
GPT_NEOX_ROWS = {
    **rename_rows("", "", {"embedding.word_embeddings": "gpt_neox.embed_in", "output_layer": "embed_out"}),
    **rename_rows("", "", {"decoder.final_layernorm": "gpt_neox.final_layer_norm"}, "weight", "bias"),
    **rename_rows(OURS, "gpt_neox.layers.{layer}.", GPT_NEOX_MODULES, "weight", "bias"),
}
# Stacks of matrices [inputs, outputs]; a dense layer and the shared expert are as everywhere.
LLAMA4_ROWS = {
    **without_rows(LLAMA_ROWS, ".mlp."),
    **build_gated_rows("mlp", "feed_forward"),
    **build_gated_rows("mlp.shared_experts", "feed_forward.shared_expert"),
    **rename_rows(OURS, THEIRS, {"mlp.router": "feed_forward.router"}),
    **build_rows(
        Row(f"{OURS}mlp.experts.linear_fc1.weight", (f"{THEIRS}feed_forward.experts.gate_up_proj",), transposed=True),
        Row(f"{OURS}mlp.experts.linear_fc2.weight", (f"{THEIRS}feed_forward.experts.down_proj",), transposed=True),
    ),
}
SINKS = build_rows(Row(f"{OURS}self_attention.core_attention.softmax_offset", (f"{THEIRS}self_attn.sinks",)))
# The rows of the gate and of the other half alternate, and matrices are [inputs, outputs].
GPT_OSS_EXPERTS = build_rows(
    Row(f"{OURS}mlp.experts.linear_fc1.weight", (f"{THEIRS}mlp.experts.gate_up_proj",), "interleaved", True),
    Row(f"{OURS}mlp.experts.linear_fc1.bias", (f"{THEIRS}mlp.experts.gate_up_proj_bias",), "interleaved"),
    Row(f"{OURS}mlp.experts.linear_fc2.weight", (f"{THEIRS}mlp.experts.down_proj",), transposed=True),
    Row(f"{OURS}mlp.experts.linear_fc2.bias", (f"{THEIRS}mlp.experts.down_proj_bias",)),
) | rename_rows(OURS, THEIRS, {"mlp.router": "mlp.router"}, "weight", "bias")
# Attention with biases in all projections, an MLP whose two first ones are stacked.
BIASED_ATTENTION = QKV_BIAS | rename_rows(OURS, THEIRS, {"self_attention.linear_proj": "self_attn.o_proj"}, "bias")
BIASED_ROWS = LLAMA_ROWS | BIASED_ATTENTION


def build_gated_biases(module: str) -> dict[str, Row]:
    """The biases of a gated MLP, which has the same name on both sides."""
    first = (f"{THEIRS}{module}.gate_proj.bias", f"{THEIRS}{module}.up_proj.bias")
    return {
        **build_rows(Row(f"{OURS}{module}.linear_fc1.bias", first, "stacked")),
        **rename_rows(OURS, THEIRS, {f"{module}.linear_fc2": f"{module}.down_proj"}, "bias"),
    }


MLP_BIASES = build_gated_biases("mlp")
STARCODER2_ROWS = {
    **without_rows(BIASED_ROWS, ".mlp."),
    **rename_rows(
        OURS, THEIRS, {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}, "bias"
    ),
    **rename_rows("", "", {"decoder.final_layernorm": "model.norm"}, "bias"),
    **rename_rows(OURS, THEIRS, {"mlp.linear_fc1": "mlp.c_fc", "mlp.linear_fc2": "mlp.c_proj"}, "weight", "bias"),
}
