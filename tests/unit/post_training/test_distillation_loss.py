# SPDX-License-Identifier: Apache-2.0
"""The divergence from a teacher's likeliest tokens: of the whole vocabulary exact, of fewer tokens a bound."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div

from megatron.core.post_training.distillation_loss import compute_kept_divergence, drop_unlikely, find_likeliest
from megatron.core.post_training.log_probs import compute_log_probs
from megatron.core.process_groups_config import SingleRankGroup

ALONE = SingleRankGroup()


def measure(teacher: Tensor, student: Tensor, k: int, top_p: float = 1.0) -> Tensor:
    tokens, values = find_likeliest(teacher, k, teacher.shape[-1], ALONE)
    values = drop_unlikely(values, top_p, 1)
    return compute_kept_divergence(values, compute_log_probs(student, tokens, ALONE)[0])


def test_the_divergence_is_exact_or_a_bound() -> None:
    draws = torch.Generator().manual_seed(0)
    teacher, start = (2 * torch.randn(3, 4, 12, generator=draws, dtype=torch.float64) for _ in range(2))
    exact, found = (start.clone().requires_grad_() for _ in range(2))
    of_all = kl_div(exact.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(measure(teacher, found, 12), of_all, rtol=1e-9, atol=1e-9)
    of_all.sum().backward()
    measure(teacher, found, 12).sum().backward()
    torch.testing.assert_close(found.grad, exact.grad, rtol=1e-9, atol=1e-9)
    # All others as one token: a coarser distribution, whose divergence is smaller.
    p, q = teacher.softmax(-1), start.softmax(-1)
    best = p.topk(5, -1).indices
    coarse = [torch.cat([x.gather(-1, best), 1 - x.gather(-1, best).sum(-1, keepdim=True)], -1) for x in (p, q)]
    expected = (coarse[0] * (coarse[0] / coarse[1]).log()).sum(-1)
    torch.testing.assert_close(measure(teacher, start, 5), expected, rtol=1e-9, atol=1e-9)
    assert (expected < of_all).all() and (expected > 0).all()


def test_fewer_tokens_where_the_teacher_is_sure() -> None:
    log_probs = torch.tensor([[0.7, 0.2, 0.08], [0.4, 0.3, 0.2]]).log()
    kept = drop_unlikely(log_probs, 0.69, 1)
    assert (kept > -torch.inf).tolist() == [[True, False, False], [True, True, False]]
    assert (drop_unlikely(log_probs, 0.1, 2) > -torch.inf).sum(-1).tolist() == [2, 2]
    student = torch.tensor([[0.5, 0.1, 0.1], [0.5, 0.2, 0.1]]).log().requires_grad_()
    found = compute_kept_divergence(kept, student)
    expected = 0.7 * math.log(0.7 / 0.5) + 0.3 * math.log(0.3 / 0.5)
    assert float(found[0].detach()) == pytest.approx(expected, rel=1e-5)
    found.sum().backward()
    assert student.grad is not None and student.grad.isfinite().all() and float(student.grad[0, 1]) == 0
    none = compute_kept_divergence(torch.full((2, 3), -torch.inf), student.detach())
    assert none.tolist() == [0, 0]


def test_rows_that_pad_the_vocabulary_are_never_kept() -> None:
    logits = torch.tensor([[1.0, 2.0, 9.0, 9.0]])
    tokens, values = find_likeliest(logits, 4, 2, ALONE)
    assert tokens[0, :2].tolist() == [1, 0] and float(values.exp().sum()) == pytest.approx(1)
