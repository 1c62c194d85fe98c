"""RMSNorm that keeps its input and one number per token, and the norms written out in elementary operations.

    RMSNorm    y = x * r * w,               r = 1 / sqrt(mean(x^2) + eps)         Zhang & Sennrich, 2019
    LayerNorm  y = (x - m) * r * w + b,     r = 1 / sqrt(mean((x - m)^2) + eps)   Ba et al., 2016

Backward of RMSNorm with g = dy * w:  dx = r * (g - x * r^2 * mean(g * x)),  dw = sum over tokens of dy * x * r.
That is LayerNorm's backward at m = 0 plus the term r * mean(g) which LayerNorm subtracts, so torch's one-pass kernel
does the work on the CPU, where torch has no RMSNorm kernel of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        width = x.shape[-1]
        rows = x.reshape(-1, width)  # [..., h] -> [tokens, h]
        rstd = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        rstd.square_().div_(width).add_(eps).rsqrt_()
        ctx.save_for_backward(rows, weight, rstd)
        # _unsafe_view: a fresh tensor, not a view, so that the caller may go on in place.
        return torch.ops.aten._unsafe_view(torch.mul(rows, rstd).mul_(weight), x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, weight, rstd = ctx.saved_tensors
        width = rows.shape[-1]
        grad_rows = grad.reshape(-1, width)  # [..., h] -> [tokens, h]
        mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], False]
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad_rows, rows, [width], torch.zeros_like(rstd), rstd, weight, None, mask
        )
        if grad_x is not None:
            mean_g = (grad_rows @ weight).unsqueeze(-1).div_(width)  # [tokens, 1]
            grad_x = grad_x.add_(mean_g.mul_(rstd)).view(grad.shape)
        return grad_x, grad_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension; x [..., h], weight [h]. Computes in float32, returns x's format."""
    if x.is_cpu and x.dtype == torch.float32:
        result: Tensor = _RMSNorm.apply(x, weight, eps)
        return result
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm from elementary operations."""
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normalised.to(x.dtype) * weight


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last dimension by torch's fused operator; x [..., h], weight and bias [h]."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm from elementary operations."""
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    normalised = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return normalised.to(x.dtype) * weight + bias
