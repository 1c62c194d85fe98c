# SPDX-License-Identifier: Apache-2.0
"""Attention written out: scores, mask, softmax, dropout, weighted sum. The reference for every other backend.

Query-key layer scaling (for float16): scores are divided by the layer number before they are stored and multiplied by
it again inside the float32 softmax, so that deep layers' scores stay below the largest float16. A bound on the scores
(soft-capping) and sinks are applied there too, in elementary operations.

Scale, mask and softmax are one operation that keeps only its output for backward, or plain ones
(--no-masked-softmax-fusion):

    p = softmax(scale * scores, masked positions = MASKED_SCORE)      dscores = scale * p * (dp - sum(dp * p))
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.tensor_parallel.products import at_least_float32
from megatron.core.transformer.core_attention.interface import AttentionBackend, AttentionInputs, AttentionOptions

MASKED_SCORE = -10000.0
"""Stands for minus infinity: its exponential is zero, and a row without any visible position stays finite."""


class LocalAttention(AttentionBackend):
    """softmax(scale * Q K^T) V in plain operations; memory grows with s * t."""

    def __init__(self, options: AttentionOptions) -> None:
        self.options = options
        # Divided out of the scores here, and multiplied back inside the float32 softmax.
        layer_scaling = float(options.layer_number) if options.query_key_layer_scaling else 1.0
        self.score_scale = options.scale / layer_scaling
        self.softmax_scale = layer_scaling
        # Float32 from the product on, unless layer scaling is there to make the narrow format do.
        self.has_float32_scores = options.softmax_in_fp32 and not options.query_key_layer_scaling
        self.softmax = scaled_masked_softmax if options.masked_softmax_fusion else scaled_masked_softmax_reference
        self.name = "local reference, " + ("fused" if options.masked_softmax_fusion else "plain") + " softmax"

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """See CoreAttention."""
        query, key, value, sinks = inputs.query, inputs.key, inputs.value, inputs.sinks
        heads_per_group = query.shape[2] // key.shape[2]
        if heads_per_group > 1:
            key = key.repeat_interleave(heads_per_group, dim=2)  # [t, b, g, d] -> [t, b, n, d]
            value = value.repeat_interleave(heads_per_group, dim=2)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [s, b, n, d] -> [b, n, s, d]
        scores = self._scores(q, k)  # [b, n, s, t]
        if sinks is None and self.options.softcap is None:
            probabilities = self.softmax(scores, inputs.build_mask(), self.softmax_scale, self.options.softmax_in_fp32)
        else:
            probabilities = scaled_masked_softmax_reference(
                scores,
                inputs.build_mask(),
                self.softmax_scale,
                self.options.softmax_in_fp32,
                self.options.softcap,
                sinks,
            )
        # After the softmax: the probabilities that remain, scaled up, add up to one only on average over the draws.
        probabilities = F.dropout(probabilities.to(v.dtype), p=self.options.dropout, training=inputs.training)
        context = torch.matmul(probabilities, v)  # [b, n, s, dv]
        return context.permute(2, 0, 1, 3).flatten(2)  # [b, n, s, dv] -> [s, b, n * dv]

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        """score_scale * Q K^T, [b, n, s, d] x [b, n, t, d] -> [b, n, s, t], scaled before it is rounded."""
        if self.has_float32_scores:
            q, k = at_least_float32(q), at_least_float32(k)
        batch = q.shape[:2]
        q, k = q.flatten(0, 1), k.flatten(0, 1)  # [b, n, s, d] -> [b * n, s, d]
        # Scaled inside the product: scores scaled afterwards could exceed float16 before they are.
        nothing = q.new_empty((1, 1, 1))
        scores = torch.baddbmm(nothing, q, k.transpose(1, 2), beta=0, alpha=self.score_scale)
        return scores.unflatten(0, batch)


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
    wide = at_least_float32(scores) if softmax_in_fp32 else scores
    if scale != 1.0:
        wide = wide * scale
    if softcap is not None:
        wide = softcap * torch.tanh(wide / softcap)
    if mask is not None:
        # After the bound: the tanh would bring a masked score back into the visible range.
        wide = wide.masked_fill(mask, MASKED_SCORE)
    if sinks is None:
        return torch.softmax(wide, dim=-1).to(scores.dtype)
    # The further key takes its share of the sum and has no value: its column is cut off again.
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
