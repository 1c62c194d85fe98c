# SPDX-License-Identifier: Apache-2.0
"""Distillation by a teacher's likeliest tokens: which they are, and how far a student is from them.

    KL(t || s) >= sum over the kept tokens of t (log t - log s), and (1 - sum t) (log(1 - sum t) - log(1 - sum s))

The last term is the teacher's mass outside of the kept tokens, taken as one token: without it a student would not be
told how likely all others are together. With the whole vocabulary kept it is 0, and the bound is the divergence.

Source: Hinton et al., "Distilling the Knowledge in a Neural Network", 2015.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.collectives import all_gather_into_tensor
from megatron.core.post_training.log_probs import compute_log_probs, widen
from megatron.core.process_groups_config import Group

_LEAST_REST = 1e-6
"""Mass outside of the kept tokens that is taken for rounding."""


def compute_kept_divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """The bound above of each place, in nats.

    teacher, student: log-probabilities of the same tokens, float32 [..., k]; -inf in the teacher's where it kept fewer.
    Returns [...]; 0 where it kept none.
    """
    kept = teacher > -torch.inf
    mass = teacher.exp()
    # Zeros before the product, or its gradient would be NaN where the teacher's is -inf.
    ahead = torch.where(kept, teacher, 0) - torch.where(kept, student, 0)
    rest = 1 - mass.sum(-1)
    of_student = (1 - torch.where(kept, student.exp(), 0).sum(-1)).clamp(min=_LEAST_REST)
    has_rest = (rest > _LEAST_REST) & kept.any(-1)
    of_rest = torch.where(has_rest, rest * (rest.clamp(min=_LEAST_REST).log() - of_student.log()), 0)
    return (mass * ahead).sum(-1) + of_rest


@torch.no_grad()
def find_likeliest(logits: Tensor, k: int, vocab_size: int, tp_group: Group) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens of each place, int64 [..., k], and their log-probabilities, float32, likeliest first.

    logits: [..., v / tp]. vocab_size: tokens from this one on only pad the vocabulary, and have no probability.
    """
    local = logits.shape[-1]
    first = tp_group.rank() * local
    rows = widen(logits).reshape(-1, local)
    rows = rows.masked_fill(torch.arange(first, first + local, device=rows.device) >= vocab_size, -torch.inf)
    values, tokens = rows.topk(min(k, local, vocab_size), sorted=True)
    if tp_group.size() > 1:
        values, tokens = (_gather_columns(part, tp_group) for part in (values, tokens + first))
        values, places = values.topk(min(k, vocab_size), sorted=True)
        tokens = tokens.gather(1, places)
    shape = (*logits.shape[:-1], tokens.shape[1])
    tokens = tokens.view(shape)
    return tokens, compute_log_probs(rows.view(*logits.shape[:-1], local), tokens, tp_group)[0]


def drop_unlikely(log_probs: Tensor, top_p: float, least: int) -> Tensor:
    """-inf for tokens beyond the first ones that have the mass top_p together, and beyond `least`; [..., k], likeliest
    first."""
    mass = log_probs.exp()
    before = mass.cumsum(-1) - mass
    places = torch.arange(log_probs.shape[-1], device=log_probs.device)
    return torch.where((before < top_p) | (places < least), log_probs, -torch.inf)


def _gather_columns(part: Tensor, group: Group) -> Tensor:
    """[n, k] of each rank -> [n, k * ranks]."""
    joined = part.new_empty(group.size() * part.shape[0], part.shape[1])
    all_gather_into_tensor(joined, part.contiguous(), group)
    return joined.view(group.size(), *part.shape).transpose(0, 1).flatten(1)
