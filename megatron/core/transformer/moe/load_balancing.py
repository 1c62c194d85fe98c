# SPDX-License-Identifier: Apache-2.0
"""Losses that keep experts busy alike and the router's logits small.

    balance   c E / (k T^2) sum_e (tokens that chose e) (sum over tokens of e's affinity)      Fedus et al., 2021, eq. 4
    z         c / T sum over tokens of log(sum_e exp(logit))^2                                 Zoph et al., 2022, eq. 5

Each process computes its tokens' share: it sums its local affinities, but the counts are over all processes. The shares
of the processes that divide a microbatch add up to the loss of the microbatch, whatever the layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.tensor_parallel.products import at_least_float32


def mark_choices(affinities: Tensor, k: int) -> Tensor:
    """One where an expert is among a token's k best by affinity, [T, E] float32: without bias, groups or capacity,
    which change where a token goes, but not what its affinities say."""
    with torch.no_grad():
        chosen = torch.zeros(affinities.shape, dtype=torch.float32, device=affinities.device)
        return chosen.scatter_(1, affinities.topk(k, dim=-1).indices, 1.0)


def compute_balance_loss(affinities: Tensor, tokens_per_expert: Tensor, tokens: float | Tensor, k: int) -> Tensor:
    """This process's share of the loss, a scalar.

    affinities: [T, E], or [T, b, E] for a loss of each of b sequences, whose mean is taken.
    tokens_per_expert: [E] or [b, E], how many chose each expert, over all processes. tokens: how many chose; where the
    counts are means over several microbatches, in one of them.
    """
    # Counts have no gradient. The loss falls when the affinities to experts with many tokens do.
    sums = affinities.sum(dim=0)  # [E] or [b, E]
    sequences = 1 if sums.dim() == 1 else sums.shape[0]
    # Divided by tokens^2: both factors grow with the tokens, and the loss is not to depend on their number.
    return (sums * tokens_per_expert).sum() * (sums.shape[-1] / (k * sequences)) / tokens**2


def compute_z_loss(logits: Tensor, tokens: int) -> Tensor:
    """This process's share of the loss, a scalar; tokens: of the microbatch over all processes."""
    return at_least_float32(logits).logsumexp(dim=-1).square().sum() / tokens
