"""The MLP's activation with its bias or gate as one operation that keeps only its input.

    plain   y = act(x + b)                     gated   y = act(gate + b_g) * (up + b_u),   x = (gate | up)
    gated, with clamp c and offset o           y = act(min(gate + b_g, c)) * (max(-c, min(up + b_u, c)) + o)

Backward writes the gradient into the memory of the saved input, which nothing needs any more: no temporary of the MLP's
inner width outlives its use. References: `activation_reference`, `gated_activation_reference`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.activations import Activation


def activation_reference(x: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """act(x + b); x [..., f], bias [f] or None."""
    return activation.forward(x if bias is None else x + bias)


def gated_activation_reference(x: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """act(gate) * up of x + b = (gate | up), clamped and offset as the activation says; x [..., 2 f] -> [..., f]."""
    gate, up = (x if bias is None else x + bias).chunk(2, dim=-1)
    gate, up = _clamped(gate, up, activation.clamp_value)
    return activation.forward(gate) * _offset(up, activation.linear_offset)


def _clamped(gate: Tensor, up: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    """The gate bounded above, up on both sides; [..., f] each."""
    return (gate, up) if limit is None else (gate.clamp(max=limit), up.clamp(-limit, limit))


def _offset(up: Tensor, offset: float) -> Tensor:
    return up + offset if offset else up


class _BiasActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
        if bias is not None:
            x = x.detach().add_(bias)
        ctx.save_for_backward(x)
        ctx.activation = activation
        return activation.forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        grad_x = ctx.activation.backward_(grad, x.detach())
        return grad_x, _bias_gradient(ctx, grad_x), None


class _GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
        if bias is not None:
            x = x.detach().add_(bias)
        ctx.save_for_backward(x)
        ctx.activation = activation
        gate, up = x.chunk(2, dim=-1)  # [..., 2 f] -> 2 x [..., f]
        gate, up = _clamped(gate, up, activation.clamp_value)
        return activation.forward(gate).mul_(_offset(up, activation.linear_offset))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach()
        gate, up = x.chunk(2, dim=-1)  # [..., 2 f] -> 2 x [..., f]
        limit = ctx.activation.clamp_value
        beyond = None
        if limit is not None:
            beyond = (gate > limit, up.abs() > limit)  # no gradient there
            gate.clamp_(max=limit)
            up.clamp_(-limit, limit)
        grad_act = grad * _offset(up, ctx.activation.linear_offset)
        torch.mul(grad, ctx.activation.forward(gate), out=up)  # up now holds its gradient
        ctx.activation.backward_(grad_act, gate)  # gate now holds its gradient
        if beyond is not None:
            gate.masked_fill_(beyond[0], 0.0)
            up.masked_fill_(beyond[1], 0.0)
        return x, _bias_gradient(ctx, x), None


def _bias_gradient(ctx: Any, grad_x: Tensor) -> Tensor | None:
    return grad_x.reshape(-1, grad_x.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None


def bias_activation(x: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """act(x + b). Overwrites x [..., f]: hand it over only when nothing else needs it."""
    result: Tensor = _BiasActivation.apply(x, bias, activation)
    return result


def bias_gated_activation(x: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """act(gate) * up of x + b = (gate | up), [..., 2 f] -> [..., f]. Overwrites x as `bias_activation` does."""
    result: Tensor = _GatedActivation.apply(x, bias, activation)
    return result
