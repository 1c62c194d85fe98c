# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of a global batch as the reference system counts them, for figures that can be compared.

For a GPT that is our count without windows and chunks. For a decoder of letters its formula differs from what a model
multiplies, and our count (throughput.py), which MFU uses, does not:

    M       the inner width is twice the hidden size, whatever --mamba-num-heads and --mamba-head-dim make of it; the
            state costs 7 operations for each channel and element, where writing and reading it are 4
    G       the state costs 4 H V^2 multiplications a token, where the rule has 3 H K V; the convolution counts
    E       the router does not count, nor here
    D, +    count nothing, though they are attention
    K       is not known there, and counts nothing
    depths  of multi-token prediction count without their projections and norms

Attention counts causally in both. T: tokens of the batch, s: tokens of a sequence, h: hidden size.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from megatron.core.plan.read import read_plan
from megatron.core.plan.state_kinds import list_delta_2_sections, list_delta_sections
from megatron.planner.throughput import count_training_flops_per_token

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def count_batch_flops(
    model: TransformerConfig, *, seq_length: int, padded_vocab_size: int, global_batch_size: int, as_reference: bool
) -> int:
    """Floating-point operations of forward and backward of a global batch of whole sequences.

    as_reference: as the reference system counts, instead of what the model's products are.
    """
    tokens = global_batch_size * seq_length
    if not as_reference or model.hybrid_layer_pattern is None:
        return tokens * count_training_flops_per_token(
            model, seq_length=seq_length, padded_vocab_size=padded_vocab_size, sees_all=as_reference
        )
    plan, depths = read_plan(model), model.mtp_num_layers or 0
    predicting = itertools.islice(itertools.cycle(plan.list_depths()), depths)
    used = [*plan.decoder, *itertools.chain.from_iterable(predicting)]
    forward = sum(_count(model, branch.kind, seq_length) for layer in used for branch in layer.branches)
    forward += (1 + depths) * 2 * model.hidden_size * padded_vocab_size
    return 3 * tokens * forward


def _count(model: TransformerConfig, kind: str, seq_length: int) -> int:
    """Operations of forward for a token of a layer."""
    hidden = model.hidden_size
    gated = 3 if model.gated_linear_unit else 2  # twice the factor 1.5 or 1 of the reference system's formula
    if kind == "mlp":
        return 2 * model.ffn_hidden_size * gated * hidden
    if kind == "experts":
        outer = model.moe_latent_size or hidden
        count = 2 * outer * model.moe_ffn_hidden_size * model.moe_router_topk * gated
        count += 4 * hidden * (model.moe_latent_size or 0)
        return count + 2 * hidden * (model.moe_shared_expert_intermediate_size or 0) * gated
    if kind == "attention":
        width = model.kv_channels
        queries, keys = model.num_attention_heads * width, model.num_query_groups * width
        return 4 * hidden * (queries + keys) + 2 * seq_length * queries
    if kind == "parallel":
        return _count(model, "attention", seq_length) + _count(model, "mamba", seq_length)
    if kind == "mamba":
        inner, states = 2 * hidden, model.mamba_state_dim
        heads = model.mamba_num_heads or inner // model.mamba_head_dim
        projected = 2 * inner + 2 * model.mamba_num_groups * states + heads
        return 2 * hidden * projected + 7 * inner * states + 2 * inner * hidden
    if kind in ("gated_delta_net", "gated_delta_net_2"):
        sections = (list_delta_sections if kind == "gated_delta_net" else list_delta_2_sections)(model)
        convolved = model.linear_conv_kernel_dim * (2 * sections["key"] + sections["value"])
        states = 4 * model.linear_num_value_heads * model.linear_value_head_dim**2
        return 2 * (hidden * sum(sections.values()) + convolved + states + hidden * sections["value"])
    return 0
