# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of tokens and entropies, from logits whose vocabulary tensor-parallel ranks may share.

    log p_k = x_k - L        L = log(sum_v exp(x_v))        H = L - sum_v p_v x_v

    d log p_k / d x_v = [v = k] - p_v                       d H / d x_v = -p_v (log p_v + H)

x are the logits over the temperature. Each rank sums over its slice, and one small all-reduce joins the sums. Logits
are left as they are; forward keeps them and two numbers per token, and backward computes the probabilities again.
Arithmetic is in float32, in float64 for such logits, on blocks of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.core.collectives import all_reduce
from megatron.core.process_groups_config import Group

BLOCK_ELEMENTS = 2**24
"""Logits that are converted to float32 at a time: 64 MiB."""


def compute_log_probs(
    logits: Tensor, tokens: Tensor, tp_group: Group, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of some tokens at each place, and the entropies of the places, in nats; float32.

    logits: [..., v / tp]. tokens: int64 [..., k], numbers in the whole vocabulary. temperature: that the logits are
    divided by. Returns [..., k] and [...]; entropies have gradients, too.
    """
    found: tuple[Tensor, Tensor] = _LogProbs.apply(logits, tokens, temperature, tp_group)
    return found


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float, group: Group) -> Any:
        rows = logits.detach().reshape(-1, logits.shape[-1])  # [tokens, v / tp]
        local = tokens.reshape(rows.shape[0], -1) - group.rank() * rows.shape[-1]
        is_local = (local >= 0) & (local < rows.shape[-1])
        local = local.clamp(0, rows.shape[-1] - 1)  # what other ranks have counts as zero
        asked = widen(rows.gather(-1, local)).masked_fill(~is_local, 0.0) / temperature
        log_sum, mean = asked.new_empty(rows.shape[0], 1), asked.new_empty(rows.shape[0], 1)
        for block in split_rows(rows):
            scaled = widen(rows[block]) / temperature
            log_sum[block] = scaled.logsumexp(-1, keepdim=True)
            # A logit of -inf has no probability, and adds nothing.
            weights = (scaled - log_sum[block]).exp()
            mean[block] = (weights * scaled.masked_fill(weights == 0, 0.0)).sum(-1, keepdim=True)
        if group.size() > 1:
            # log(sum of exp over all ranks) = max + log(sum over ranks of exp(local - max)); means likewise.
            largest = log_sum.clone()
            all_reduce(largest, group, op="max")
            share = (log_sum - largest).exp_()
            joined = torch.cat([share, share * mean, asked], dim=1)
            all_reduce(joined, group)
            log_sum = largest + joined[:, :1].log()
            mean, asked = joined[:, 1:2] / joined[:, :1], joined[:, 2:]
        entropy = log_sum - mean
        ctx.save_for_backward(logits, local, is_local, log_sum, entropy)
        ctx.temperature = temperature
        return (asked - log_sum).view(tokens.shape), entropy.view(logits.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> Any:
        logits, local, is_local, log_sum, entropy = ctx.saved_tensors
        rows = logits.detach().reshape(-1, logits.shape[-1])
        gradient = torch.empty_like(rows)
        of_tokens, of_entropy = grad_log_probs.reshape(local.shape), grad_entropy.reshape(-1, 1)
        total = of_tokens.sum(-1, keepdim=True)
        for block in split_rows(rows):
            found = widen(rows[block]).div(ctx.temperature).sub_(log_sum[block])  # log p
            probabilities = found.exp()
            found.masked_fill_(probabilities == 0, 0.0)  # 0 times -inf
            found.add_(entropy[block]).mul_(of_entropy[block]).add_(total[block]).mul_(probabilities).neg_()
            found.scatter_add_(-1, local[block], of_tokens[block] * is_local[block])
            gradient[block] = found / ctx.temperature
        return gradient.view(logits.shape), None, None, None


def widen(x: Tensor) -> Tensor:
    """Return x in float32, or as it is where it has float64."""
    return x if x.dtype == torch.float64 else x.float()


def split_rows(rows: Tensor) -> Iterator[slice]:
    """Slices of tokens of at most BLOCK_ELEMENTS logits each; rows [tokens, v / tp]."""
    step = max(1, BLOCK_ELEMENTS // rows.shape[-1])
    return (slice(start, start + step) for start in range(0, rows.shape[0], step))
