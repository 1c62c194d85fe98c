"""Scale, mask and softmax of attention scores as one operation that keeps only its output.

p = softmax(scale * scores, masked positions = MASKED_SCORE)      dscores = scale * p * (dp - sum(dp * p))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MASKED_SCORE = -10000.0
"""Stands for minus infinity: its exponential is zero, and a row without any visible position stays finite."""


def scaled_masked_softmax_reference(
    scores: Tensor,
    mask: Tensor | None,
    scale: float,
    softmax_in_fp32: bool,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Probabilities from scores [b, heads, sq, sk]; mask is True where a position may not be seen, broadcastable.

    softcap: bound on the scaled scores, by tanh. sinks: [heads], score of a further key whose probability is left out.
    """
    wide = scores.float() if softmax_in_fp32 else scores
    if scale != 1.0:
        wide = wide * scale
    if softcap is not None:
        wide = softcap * torch.tanh(wide / softcap)
    if mask is not None:
        wide = wide.masked_fill(mask, MASKED_SCORE)
    if sinks is None:
        return torch.softmax(wide, dim=-1).to(scores.dtype)
    sink = sinks.to(wide.dtype).view(-1, 1, 1).expand(*wide.shape[:-1], 1)
    return torch.softmax(torch.cat((wide, sink), dim=-1), dim=-1)[..., :-1].to(scores.dtype)


class _ScaledMaskedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor | None, scale: float, softmax_in_fp32: bool) -> Tensor:
        probabilities = scaled_masked_softmax_reference(scores, mask, scale, softmax_in_fp32)
        ctx.save_for_backward(probabilities)
        ctx.scale = scale
        return probabilities

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (probabilities,) = ctx.saved_tensors
        grad_scores = torch.ops.aten._softmax_backward_data(grad, probabilities, -1, probabilities.dtype)
        return grad_scores.mul_(ctx.scale), None, None, None


def scaled_masked_softmax(scores: Tensor, mask: Tensor | None, scale: float, softmax_in_fp32: bool) -> Tensor:
    """As `scaled_masked_softmax_reference`, keeping only the probabilities for backward."""
    result: Tensor = _ScaledMaskedSoftmax.apply(scores, mask, scale, softmax_in_fp32)
    return result
