# SPDX-License-Identifier: Apache-2.0
"""Choice of each token's experts and their weights: functions of the router's logits [tokens, experts].

| score function         | scores of all experts   | chosen by        | weights of the chosen                        |
|------------------------|-------------------------|------------------|----------------------------------------------|
| softmax                | logits                  | score            | softmax over the chosen (Jiang et al., 2024) |
| softmax, pre-softmax   | softmax(logits)         | score            | score                                        |
| softmax-share          | softmax(logits)         | score + bias     | score / sum over the chosen (ERNIE 4.5)      |
| sigmoid                | sigmoid(logits)         | score + bias     | score / sum over the chosen (DeepSeek-V3)    |
| sqrtsoftplus           | sqrt(softplus(logits))  | score + bias     | the same                                     |

Scores are float32, or float64 where the logits are. T: tokens, E: experts, k: experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.tensor_parallel.products import at_least_float32
from megatron.core.transformer.config_fields.moe import MoEFields

_SINKHORN_TOLERANCE = 1e-4
_SINKHORN_ROUNDS = 100


class Routing(NamedTuple):
    """The experts that each token goes to, and how much each of their outputs counts."""

    experts: Tensor
    """[T, k] int64, numbers in the whole layer."""
    weights: Tensor
    """[T, k], of the experts' outputs in their sum."""
    kept: Tensor | None = None
    """[T, k] bool, False where a full expert drops the token; None: no token is dropped."""


def score_experts(logits: Tensor, score_function: str) -> Tensor:
    """Scores of all experts for each token: logits [T, E] -> [T, E], float32, or float64 where the logits are."""
    wide = at_least_float32(logits)
    if score_function in ("softmax", "softmax-share"):
        return wide.softmax(dim=-1)
    return wide.sigmoid() if score_function == "sigmoid" else F.softplus(wide).sqrt()


def compute_affinities(logits: Tensor, score_function: str) -> Tensor:
    """Compute scores that add up to one for each token, [T, E] -> [T, E]: what the balancing losses are about."""
    scores = score_experts(logits, score_function)
    return scores if "softmax" in score_function else scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)


def weigh_chosen(scores: Tensor, experts: Tensor, way: str, factor: float | None) -> Tensor:
    """Weights [T, k] of the chosen experts [T, k] out of scores [T, E]: their "softmax", their "share" of the sum over
    the chosen, or the scores "as they are"; times the factor."""
    weights = scores.gather(1, experts)
    if way == "softmax":
        weights = weights.softmax(dim=-1)
    elif way == "share":
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights if factor is None else weights * factor


def choose_experts(
    logits: Tensor,
    config: MoEFields,
    expert_bias: Tensor | None = None,
    given: Tensor | None = None,
    weigh: Callable[[Tensor, Tensor, str, float | None], Tensor] = weigh_chosen,
) -> Routing:
    """Choose the k best experts of each token and their weights: logits [T, E] -> Routing. expert_bias: [E], added to
    scores for the choice. given: [T, k], experts that are chosen already. weigh: `weigh_chosen`, or what it was
    compiled to."""
    function, k = config.moe_router_score_function, config.moe_router_topk
    groups = (config.moe_router_num_groups, config.moe_router_group_topk, config.moe_router_group_score)
    # Softmax keeps the order, so the choice can be made by the logits themselves.
    if function == "softmax" and not config.moe_router_pre_softmax:
        wide = at_least_float32(logits)
        scores = wide
        biased = wide if expert_bias is None else wide + expert_bias
        experts = choose_best(biased, k, *groups) if given is None else given
        way = "softmax"
    else:
        scores = score_experts(logits, function)
        # The bias decides who is chosen, not how much they weigh: it has no gradient.
        biased = scores if expert_bias is None else scores + expert_bias
        experts = choose_best(biased, k, *groups) if given is None else given
        # Softmax scores of all experts stay as they are: they add up to less than one for the chosen.
        way = "share" if function != "softmax" and k > 1 else "as they are"
    return Routing(experts, weigh(scores, experts, way, config.moe_router_topk_scaling_factor))


def score_choice(logits: Tensor, config: MoEFields) -> Tensor:
    """Return what the choice goes by, before a bias: logits [T, E] -> [T, E], as `choose_experts` compares them."""
    if config.moe_router_score_function == "softmax" and not config.moe_router_pre_softmax:
        return at_least_float32(logits)
    return score_experts(logits, config.moe_router_score_function)


@torch.no_grad()
def find_even_bias(scores: Tensor, bias: Tensor, k: int) -> Tensor:
    """Find a bias [E] with which each expert is among the k best of about T k / E tokens, one step on from `bias` [E].

    scores: [T, E] of all tokens. Experts and tokens have prices, the dual variables of the best even assignment (Lewis
    et al., 2021): a token's is what the last expert that it gets is worth to it, an expert's the quantile of its scores
    above the tokens' prices that leaves it its share (Su, 2026, "quantile balancing"). Step by step both settle.
    """
    tokens, experts = scores.shape
    if k >= experts:
        return torch.zeros_like(bias)
    # Between the last that is chosen and the first that is not.
    best = (scores + bias).topk(k + 1, dim=-1).values
    above = scores - best[:, k - 1 :].mean(dim=-1, keepdim=True)
    ordered = above.sort(dim=0, descending=True).values  # [T, E]
    place = min(max(tokens * k / experts - 0.5, 0.0), tokens - 1.0)
    low = int(place)
    price = torch.lerp(ordered[low], ordered[min(low + 1, tokens - 1)], place - low)
    # Only differences count: a common part would wander.
    return (price.mean() - price).to(bias.dtype)


@torch.no_grad()
def choose_best(
    scores: Tensor, k: int, num_groups: int | None = None, group_topk: int | None = None, group_score: str = "sum"
) -> Tensor:
    """The k highest scores of each row, [T, E] -> [T, k] numbers of experts, the best first.

    With groups of neighbouring experts, only experts of the `group_topk` groups are candidates whose k / group_topk
    best scores add up highest (group_score "sum"; DeepSeek-V3, section 2.1.2), whose two best do ("two-best"; the
    published programs of DeepSeek-V3 and GLM 4.5), or whose best one is highest ("best"; DeepSeek-V2, section 2.2.2).
    """
    if num_groups and group_topk:
        # Groups are runs of neighbouring experts, which usually lie on one node: limiting groups limits the nodes of a
        # token.
        by_group = scores.unflatten(1, (num_groups, -1))  # [T, groups, E / groups]
        if group_score == "best":
            strengths = by_group.amax(dim=-1)
        else:
            counted = 2 if group_score == "two-best" else k // group_topk
            strengths = by_group.topk(counted, dim=-1).values.sum(dim=-1)
        admitted = torch.zeros_like(strengths, dtype=torch.bool)
        admitted.scatter_(1, strengths.topk(group_topk, dim=-1).indices, True)
        scores = by_group.masked_fill(~admitted.unsqueeze(-1), float("-inf")).flatten(1)
    return scores.topk(k, dim=-1).indices


def weigh_experts(logits: Tensor, experts: Tensor, config: MoEFields) -> Routing:
    """Weigh the given experts [T, k] by their logits: sigmoid of a single one, else softmax over all E."""
    wide = at_least_float32(logits)
    scores = wide.sigmoid() if config.moe_router_topk == 1 else wide.softmax(dim=-1)
    return Routing(experts, weigh_chosen(scores, experts, "as they are", config.moe_router_topk_scaling_factor))


@torch.no_grad()
def sinkhorn(logits: Tensor) -> Tensor:
    """exp(logits) [T, E] with rows and columns scaled so that every row adds up to 1/T and every column to 1/E
    (Sinkhorn, 1964; Clark et al., 2022, appendix B)."""
    weights = (logits - logits.max()).exp()  # a common factor changes nothing, and keeps exp finite
    rows, columns = weights.new_ones(weights.shape[0]), weights.new_ones(weights.shape[1])
    # Rows and columns in turn; a hundred rounds bound the time where logits are far apart.
    for _ in range(_SINKHORN_ROUNDS):
        rows = 1.0 / (len(rows) * (weights @ columns) + 1e-8)
        before = columns
        columns = 1.0 / (len(columns) * (rows @ weights) + 1e-8)
        if (columns - before).abs().mean() <= _SINKHORN_TOLERANCE:
            break
    return columns * weights * rows.unsqueeze(1)


def compute_capacity(tokens: int, config: MoEFields) -> int:
    """Compute how many choices an expert takes at most of a microbatch of `tokens` tokens; at least 1."""
    assert config.moe_expert_capacity_factor is not None and config.num_moe_experts is not None
    # With perfect balance each expert gets this share; the factor leaves room above it.
    share = tokens * config.moe_router_topk / config.num_moe_experts
    return max(1, math.ceil(share * config.moe_expert_capacity_factor))


def compute_rank_capacity(tokens: int, config: MoEFields) -> int:
    """Compute how many choices the experts of one expert-parallel rank take together at most of a microbatch of
    `tokens` tokens; at least 1."""
    assert config.moe_expert_rank_capacity_factor is not None
    share = tokens * config.moe_router_topk / config.expert_model_parallel_size
    return max(1, math.ceil(share * config.moe_expert_rank_capacity_factor))


def keep_within_capacity(experts: Tensor, weights: Tensor, config: MoEFields) -> Tensor:
    """Return which of the choices [T, k] of a whole microbatch full experts keep, and full ranks of what these keep;
    bool."""
    assert config.num_moe_experts is not None
    tokens, policy = experts.shape[0], config.moe_token_drop_policy
    kept = torch.ones_like(experts, dtype=torch.bool)
    if config.moe_expert_capacity_factor is not None:
        capacity = compute_capacity(tokens, config)
        kept = fit_into_capacity(experts, weights, config.num_moe_experts, capacity, policy)
    if config.moe_expert_rank_capacity_factor is not None:
        ranks = config.expert_model_parallel_size
        # What is dropped is already after the last rank, and takes no place.
        chosen = (experts // (config.num_moe_experts // ranks)).masked_fill(~kept, ranks)
        kept &= fit_into_capacity(chosen, weights, ranks + 1, compute_rank_capacity(tokens, config), policy)
    return kept


@torch.no_grad()
def fit_into_capacity(experts: Tensor, weights: Tensor, num_experts: int, capacity: int, policy: str) -> Tensor:
    """Return which of the choices [T, k] a full expert keeps: by weight ("probs") or the first ("position"); bool [T,
    k]. Just so for ranks in the place of experts.

    experts, weights: of the whole microbatch.
    """
    flat = experts.flatten()
    # A place in an expert's list is a rank among its choices, of which those below the capacity are kept.
    # Two stable sorts: by preference, then by expert, so that each expert's choices follow each other, best first.
    if policy == "probs":
        preferred = weights.flatten().argsort(descending=True, stable=True)
    else:
        preferred = torch.arange(flat.numel(), device=flat.device)
    order = preferred[flat[preferred].argsort(stable=True)]
    sorted_experts = flat[order]
    numbers = torch.arange(num_experts, device=flat.device)
    starts = torch.searchsorted(sorted_experts, numbers)
    places = torch.arange(flat.numel(), device=flat.device) - starts[sorted_experts]
    kept = torch.empty_like(flat, dtype=torch.bool)
    kept[order] = places < capacity
    return kept.view_as(experts)
