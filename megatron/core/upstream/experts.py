# SPDX-License-Identifier: Apache-2.0
"""Upstream's functions of a router: [T, E], T tokens and E experts."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.errors import ConfigError
from megatron.core.transformer.moe.load_balancing import mark_choices
from megatron.core.transformer.moe.routing import choose_best, compute_affinities


def group_limited_topk(
    scores: Tensor, topk: int, num_tokens: int, num_experts: int, num_groups: int, group_topk: int
) -> tuple[Tensor, Tensor]:
    """The k best scores of each token and their experts, [T, k] each, from its `group_topk` best groups only."""
    chosen = choose_best(scores.view(num_tokens, num_experts), topk, num_groups, group_topk)
    return scores.gather(1, chosen), chosen


def compute_routing_scores_for_aux_loss(
    logits: Tensor, topk: int, score_function: str, fused: bool = False, padding_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(map [T, E] bool of each token's k best experts, scores [T, E] that add up to one): what balancing losses are
    of. fused: no other result. Raises ConfigError for a padding_mask."""
    if padding_mask is not None:
        raise ConfigError("compute_routing_scores_for_aux_loss() has no padding_mask; leave padding tokens out")
    scores = compute_affinities(logits, score_function)
    return mark_choices(scores, topk).bool(), scores


def apply_router_token_dropping(
    routing_probs: Tensor,
    routing_map: Tensor,
    router_topk: int,
    capacity_factor: float,
    drop_policy: str = "probs",
    pad_to_capacity: bool = False,
) -> tuple[Tensor, Tensor]:
    """(weights [T, E], map [T, E] bool) without what full experts drop: each takes its best by weight ("probs") or its
    first ("position"), up to capacity_factor times its even share. pad_to_capacity: it takes so many in any case."""
    tokens, experts = routing_map.shape
    capacity = min(tokens, math.ceil(tokens * router_topk / experts * capacity_factor))
    if drop_policy not in ("probs", "position"):
        raise ConfigError(f"drop_policy={drop_policy!r} is not known; use probs or position")
    order = routing_probs if drop_policy == "probs" else routing_map.to(torch.int)
    best = order.argsort(dim=0, descending=True, stable=True)[:capacity]
    kept = torch.zeros_like(routing_map, dtype=torch.bool).scatter(0, best, True)
    kept = kept if pad_to_capacity else kept & routing_map.bool()
    return routing_probs * kept, kept


def apply_random_logits(logits: Tensor) -> Tensor:
    """Random numbers, [T, E], with the gradient of the given logits: experts are chosen only by chance."""
    return torch.randn_like(logits) + (logits - logits.detach())


class RouterGatingLinearFunction:
    """The router's product in a separate dtype."""

    @staticmethod
    def apply(
        input_: Tensor, weight: Tensor, bias: Tensor | None = None, router_dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Input [..., h], weight [E, h], bias [E] or None -> logits [..., E] in the router's format."""
        wide: Any = None if bias is None else bias.to(router_dtype)
        return F.linear(input_.to(router_dtype), weight.to(router_dtype), wide)
