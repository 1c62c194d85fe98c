# SPDX-License-Identifier: Apache-2.0
"""Upstream's questions about layers: which lie where, and what a router chooses."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.errors import ConfigError
from megatron.core.plan.stages import build_pipeline_layout, build_virtual_stages, parse_layout
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.moe.routing import choose_experts
from megatron.core.transformer.own_stage import find_own_stage
from megatron.core.transformer.transformer_config import TransformerConfig


def layers_of(config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None) -> range:
    """Layers, counted from 0, of a pipeline stage and its chunk. pp_rank: this process's when None."""
    shape, stage = find_own_stage(config, vp_stage, pp_rank)
    return build_pipeline_layout(config, shape)[stage].layers


def get_num_layers_to_build(config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
    """Return how many layers a pipeline stage has, or a chunk of it."""
    return len(layers_of(config, vp_stage, pp_rank))


def get_transformer_layer_offset(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> int:
    """Number of the first layer, counted from 0, of a pipeline stage or of a chunk of it."""
    return layers_of(config, vp_stage, pp_rank).start


def get_mtp_ranks(pp_ranks: list[int], config: TransformerConfig) -> list[int]:
    """Return which of a pipeline's ranks, given in the order of its stages, hold layers of multi-token prediction."""
    if config.mtp_num_layers is None:
        return []
    shape = build_virtual_stages(config)
    layout = build_pipeline_layout(config, shape)
    return [pp_ranks[shape.holder(stage)[0]] for stage, content in enumerate(layout) if content.has_prediction]


def mtp_on_this_rank(
    layout: str | None = None,
    mtp_num_layers: int | None = None,
    ignore_virtual: bool = True,
    vp_stage: int | None = None,
) -> bool:
    """Return whether this process holds layers of multi-token prediction. layout: --pipeline-model-parallel-layout;
    they are on the last stage when None. ignore_virtual: ask of all chunks of the process, else of its chunk
    vp_stage."""
    if not mtp_num_layers:
        return False
    groups = ProcessGroupCollection.current()
    if layout is None:
        return groups.is_last_stage
    stage = next((index for index, text in enumerate(parse_layout(layout)) if "m" in text), None)
    chunk, rank = (None, None) if stage is None else divmod(stage, groups.pp.size())
    return rank == groups.pp.rank() and (ignore_virtual or chunk == (vp_stage or 0))


def is_layer_window_attention(
    window_size: tuple[int, int] | None, window_attn_skip_freq: int | list[int] | None, layer_number: int
) -> bool:
    """Return whether a layer, counted from 1, has a sliding window: all without a frequency, else all but every
    n-th."""
    if not window_size:
        return False
    if window_attn_skip_freq is None:
        return True
    if isinstance(window_attn_skip_freq, int):
        return layer_number % window_attn_skip_freq != 0
    return bool(window_attn_skip_freq[layer_number - 1])


def topk_routing_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
    fused: bool = False,
    router_replay: RouterReplay | None = None,
    dense_output: bool = False,
    precomputed_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The experts of each token. logits: [T, E] of T tokens and E experts.

    Returns (weights [T, E], 0 where an expert is not chosen; map [T, E] bool), or with dense_output (weights [T, k],
    numbers of experts [T, k]). expert_bias: [E], added to scores for the choice. fused: no other way exists here.
    precomputed_indices: [T, k], the choice. router_replay: gives the choice, or records it. Raises ConfigError for a
    router_replay of another class than RouterReplay.
    """
    if not isinstance(router_replay, RouterReplay | None):
        raise ConfigError("router_replay must be a RouterReplay of megatron.core.transformer.moe.router_replay")
    given = precomputed_indices
    if given is None and router_replay is not None:
        given = router_replay.take(len(logits), topk)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        num_moe_experts=logits.shape[-1],
        moe_router_topk=topk,
        moe_router_pre_softmax=use_pre_softmax,
        moe_router_num_groups=num_groups,
        moe_router_group_topk=group_topk,
        moe_router_topk_scaling_factor=scaling_factor,
        moe_router_score_function=score_function,  # type: ignore[arg-type]
    )
    routing = choose_experts(logits, config, expert_bias, given)
    if router_replay is not None:
        router_replay.note(routing.experts)
    if dense_output:
        return routing.weights, routing.experts
    weights = torch.zeros_like(logits, dtype=routing.weights.dtype).scatter(1, routing.experts, routing.weights)
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, routing.experts, True)
    return weights.to(logits.dtype), chosen


class VocabUtility:
    """Rows of the vocabulary that a tensor-parallel rank has: [first, last)."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """From the number of rows of each rank."""
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        """From the number of all rows, which the ranks share evenly."""
        assert global_vocab_size % world_size == 0, f"{global_vocab_size} rows cannot be shared by {world_size} ranks"
        return VocabUtility.vocab_range_from_per_partition_vocab_size(global_vocab_size // world_size, rank, world_size)
