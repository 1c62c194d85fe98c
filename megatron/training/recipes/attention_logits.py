# SPDX-License-Identifier: Apache-2.0
"""--qk-clip and --log-max-attention-logit: what is done about the largest attention scores of a step.

QK-clip (Kimi Team, 2025, Kimi K2, section 2.1, MuonClip): where the largest score S of a head was above the threshold,
gamma = threshold / S, and after the update

    query weights of the head      *= gamma^alpha
    key weights of its group       *= gamma^(1 - alpha), with the smallest gamma of the group's heads

In latent attention these are the weights of the channels without position. All heads share the rotated key channels,
so that the query weights of those channels get all of it, gamma.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.collectives import all_gather_into_tensor, all_gather_object, all_reduce
from megatron.core.errors import ConfigError
from megatron.core.optimizer.megatron_optimizer import MegatronOptimizer
from megatron.core.placement import Placement, get_placement
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.core_attention.dot_product_attention import DotProductAttention
from megatron.core.transformer.core_attention.max_logits import MaxLogits
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class _Layer:
    attention: SelfAttention | MLASelfAttention
    logits: MaxLogits


class AttentionLogits:
    """Called by the optimizer after each update and before the network gets its parameters; every rank takes part.

    Raises ConfigError for a model whose attention is not ours.
    """

    def __init__(
        self,
        config: TransformerConfig,
        model: Sequence[nn.Module],
        optimizer: MegatronOptimizer,
        groups: ProcessGroupCollection,
    ) -> None:
        self.config, self.optimizer, self.groups = config, optimizer, groups
        self.layers = [layer for chunk in model for layer in find_measured_layers(chunk)]
        # A stage may hold no attention of ours (only an embedding): only the full pipeline can be refused.
        if not any(all_gather_object(len(self.layers), groups.pp)):
            raise ConfigError(
                "--qk-clip and --log-max-attention-logit know the scores of this system's attention, and the model has "
                "none; leave them out"
            )
        self.largest = torch.tensor(-torch.inf)
        """Score of the last step over all layers and ranks; a scalar on the device."""

    def __call__(self, found_inf: Tensor) -> None:
        largest = torch.full((), -torch.inf, device=found_inf.device)
        for layer in self.layers:
            of_all_heads = self._take(layer)
            largest = torch.maximum(largest, of_all_heads.max())
            if self.config.qk_clip:
                self._clip(layer, of_all_heads, found_inf)
        # Heads are already gathered over tp, samples over dp and cp; stages hold the other layers.
        all_reduce(largest, self.groups.pp, op="max")
        self.largest = largest

    def _take(self, layer: _Layer) -> Tensor:
        """Return the largest score of each head of the model in this step, [heads], and reset it."""
        own = layer.logits.largest
        assert own is not None, "the layer has not run in this step"
        # The layer keeps the maximum over its microbatches, so it must be reset in each step.
        layer.logits.largest = None
        all_reduce(own, self.groups.dp_cp, op="max")
        of_all_heads = own.new_empty(self.groups.tp.size() * len(own))
        all_gather_into_tensor(of_all_heads, own, self.groups.tp)
        return of_all_heads

    def _clip(self, layer: _Layer, of_all_heads: Tensor, found_inf: Tensor) -> None:
        threshold = self.config.qk_clip_threshold
        # Nothing is done where a score is no number, nor after an update that was skipped.
        is_above = (of_all_heads > threshold) & of_all_heads.isfinite() & (found_inf == 0)
        gamma = torch.where(is_above, threshold / of_all_heads, torch.ones_like(of_all_heads))
        for linear, factors in _list_row_factors(layer.attention, gamma, self.config):
            for param in (linear.weight, linear.bias):
                if param is not None:
                    placement = get_placement(param, "a projection to heads")
                    rows = dataclasses.replace(placement, full_shape=placement.full_shape[:1])
                    self.optimizer.scale_rows(placement.name, rows.take(factors))


def find_measured_layers(module: nn.Module) -> list[_Layer]:
    """Find every self-attention of a module whose backend measures its scores."""
    found = []
    for part in module.modules():
        if not isinstance(part, SelfAttention | MLASelfAttention) or not isinstance(
            part.core_attention, DotProductAttention
        ):
            continue
        if isinstance(part.core_attention.backend, MaxLogits):
            found.append(_Layer(part, part.core_attention.backend))
    return found


def _list_row_factors(
    attention: SelfAttention | MLASelfAttention, gamma: Tensor, config: TransformerConfig
) -> list[tuple[Any, Tensor]]:
    """The linear layers that are clipped, each with the factor of every row of the whole; gamma: of every head."""
    if isinstance(attention, MLASelfAttention):
        queries, keys = compute_latent_row_factors(gamma, config)
        project = attention.linear_q_proj if config.q_lora_rank is None else attention.linear_q_up_proj
        return [(project, queries), (attention.linear_kv_up_proj, keys)]
    placement = get_placement(attention.linear_qkv.weight, "linear_qkv")
    return [(attention.linear_qkv, compute_row_factors(gamma, placement, config))]


def compute_latent_row_factors(gamma: Tensor, config: TransformerConfig) -> tuple[Tensor, Tensor]:
    """gamma of every head of the model, [heads] -> the factors of the rows of the projections from latent vectors to
    queries, and to keys and values."""
    alpha, of_head = config.qk_clip_alpha, gamma.unsqueeze(1)  # [heads, 1]
    plain, rotated = config.qk_head_dim, config.qk_pos_emb_head_dim
    queries = torch.cat(((of_head**alpha).expand(-1, plain), of_head.expand(-1, rotated)), dim=1)
    keys = (of_head ** (1.0 - alpha)).expand(-1, plain)
    values = torch.ones_like(of_head).expand(-1, config.v_head_dim)
    return queries.flatten(), torch.cat((keys, values), dim=1).flatten()


def compute_row_factors(gamma: Tensor, placement: Placement, config: TransformerConfig) -> Tensor:
    """gamma of every query head of the model, [heads] -> the factor of every row of linear_qkv, [rows] of the whole.

    placement: of its weight or bias; its parts are each query group's queries, key and value.
    """
    alpha, by_group = config.qk_clip_alpha, gamma.view(config.num_query_groups, -1)
    # Heads of a group share one key: the smallest gamma brings the worst of them below the threshold.
    of_heads = {"query": by_group**alpha, "key": by_group.amin(1, keepdim=True) ** (1.0 - alpha)}
    rows = {part: iter(heads.repeat_interleave(config.kv_channels, dim=1)) for part, heads in of_heads.items()}
    parts = [(part, length) for part, _, length in placement.named_parts()]
    return torch.cat([next(rows[part]) if part in rows else gamma.new_ones(length) for part, length in parts])
