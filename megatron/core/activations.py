# SPDX-License-Identifier: Apache-2.0
"""Activation functions of the MLP, and the activation with its bias or gate as one operation.

| name         | y(x)                         | source                                   |
|--------------|------------------------------|------------------------------------------|
| gelu         | x * Phi(x)                   | Hendrycks & Gimpel, 2016                 |
| gelu_tanh    | its tanh approximation       | same; OpenAI's GPT-2                     |
| silu         | x * sigmoid(x)               | Elfwing et al., 2017; the gate of SwiGLU |
| quick_gelu   | x * sigmoid(1.702 x)         | Hendrycks & Gimpel, 2016                 |
| relu         | max(x, 0)                    | OPT (Zhang et al., 2022)                 |
| squared_relu | max(x, 0)^2                  | So et al., 2021                          |

    plain   y = act(x + b)                     gated   y = act(gate + b_g) * (up + b_u),   x = (gate | up)
    gated, with clamp c and offset o           y = act(min(gate + b_g, c)) * (max(-c, min(up + b_u, c)) + o)
    gated, in blocks of n                      x = (n of gate | n of up | the next n of gate | ...)
    of experts, with weight w of the row       the same times w, in the format of x

The fused operations keep only their input. Backward writes the gradient into that input's memory, which nothing needs
any more: no temporary of the MLP's inner width outlives its use. On a GPU each is one kernel
(megatron/core/kernels/activation.py). References: `activation_reference`, `gated_activation_reference`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.errors import ConfigError
from megatron.core.kernels import launching

_QUICK_GELU_SLOPE = 1.702


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2."""
    return torch.square(F.relu(x))


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x)."""
    return x * torch.sigmoid(_QUICK_GELU_SLOPE * x)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation."""
    return F.gelu(x, approximate="tanh")


@dataclass(frozen=True)
class Activation:
    """An activation and, when we know it, its derivative."""

    name: str
    forward: Callable[[Tensor], Tensor]
    backward_: Callable[[Tensor, Tensor], Tensor] | None = None
    """`backward_(grad, x)`: overwrite x with grad * y'(x) and return it."""
    clamp_value: float | None = None
    """c of the gated form: min(gate, c) and max(-c, min(up, c)) take part; unbounded when None (gpt-oss has 7)."""
    linear_offset: float = 0.0
    """o of the gated form: act(gate) * (up + o) (gpt-oss has 1)."""
    interleave_size: int | None = None
    """n of the gated form: gate and up take turns in blocks of n channels; one after the other when None."""


def _silu_backward_(grad: Tensor, x: Tensor) -> Tensor:
    result: Tensor = torch.ops.aten.silu_backward.grad_input(grad, x, grad_input=x)
    return result


def _gelu_backward_(grad: Tensor, x: Tensor) -> Tensor:
    result: Tensor = torch.ops.aten.gelu_backward.grad_input(grad, x, approximate="none", grad_input=x)
    return result


def _gelu_tanh_backward_(grad: Tensor, x: Tensor) -> Tensor:
    result: Tensor = torch.ops.aten.gelu_backward.grad_input(grad, x, approximate="tanh", grad_input=x)
    return result


def _squared_relu_backward_(grad: Tensor, x: Tensor) -> Tensor:
    # y' = 2 max(x, 0)
    return x.relu_().mul_(2).mul_(grad)


def _quick_gelu_backward_(grad: Tensor, x: Tensor) -> Tensor:
    # y = silu(a x) / a, so y' = silu'(a x).
    return _silu_backward_(grad, x.mul_(_QUICK_GELU_SLOPE))


_ACTIVATIONS = {
    activation.name: activation
    for activation in (
        Activation("gelu", F.gelu, _gelu_backward_),
        Activation("gelu_tanh", gelu_tanh, _gelu_tanh_backward_),
        Activation("silu", F.silu, _silu_backward_),
        Activation("quick_gelu", quick_gelu, _quick_gelu_backward_),
        # Without a kernel, like a function that a user passes.
        Activation("relu", F.relu),
        Activation("squared_relu", squared_relu, _squared_relu_backward_),
    )
}
_BY_FUNCTION = {activation.forward: activation for activation in _ACTIVATIONS.values()}


def find_activation(activation_func: str | Callable[..., Any]) -> Activation:
    """The Activation of a name or of a function on tensors; a function we do not know has no `backward_`.

    Raises ConfigError for an unknown name.
    """
    # Upstream's configs name activations by function (F.gelu), command lines by word.
    if callable(activation_func):
        name = getattr(activation_func, "__name__", "custom")
        return _BY_FUNCTION.get(activation_func) or Activation(name, activation_func)
    if activation_func not in _ACTIVATIONS:
        raise ConfigError(
            f"activation_func {activation_func!r} is not known; use one of {', '.join(_ACTIVATIONS)} or a function"
        )
    return _ACTIVATIONS[activation_func]


# ---- with bias and gate


def activation_reference(x: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """act(x + b); x [..., f], bias [f] or None."""
    return activation.forward(x if bias is None else x + bias)


def gated_activation_reference(x: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """act(gate) * up of x + b = (gate | up), clamped and offset as the activation says; x [..., 2 f] -> [..., f]."""
    gate, up = _take_apart(x if bias is None else x + bias, activation.interleave_size)
    gate, up = _clamped(gate, up, activation.clamp_value)
    return _join_blocks(activation.forward(gate) * _offset(up, activation.linear_offset), activation.interleave_size)


def _take_apart(x: Tensor, interleave_size: int | None) -> tuple[Tensor, Tensor]:
    """Views of gate and up in x [..., 2 f]: [..., f] each, in blocks [..., f / n, n]."""
    if interleave_size is None:
        gate, up = x.chunk(2, dim=-1)
        return gate, up
    blocks = x.unflatten(-1, (-1, 2, interleave_size))
    return blocks[..., 0, :], blocks[..., 1, :]


def _join_blocks(y: Tensor, interleave_size: int | None) -> Tensor:
    """[..., f / n, n] -> [..., f]."""
    return y if interleave_size is None else y.flatten(-2)


def _clamped(gate: Tensor, up: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    """The gate bounded above, up on both sides; [..., f] each."""
    return (gate, up) if limit is None else (gate.clamp(max=limit), up.clamp(-limit, limit))


def _offset(up: Tensor, offset: float) -> Tensor:
    return up + offset if offset else up


def adds_bias_in_place(x: Tensor, bias: Tensor | None) -> bool:
    """Return whether a fused activation leaves x + bias in x's memory: not where it is a kernel, which reads the bias
    each time. The caller that computes it again from x needs to know."""
    return not launching.uses_kernels(x, bias)


class _FusedActivation(torch.autograd.Function):
    """Plain or gated, of x + bias, times the weight of each row."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, weights: Tensor | None, activation: Activation, is_gated: bool
    ) -> Tensor:
        ctx.activation, ctx.is_gated = activation, is_gated
        # In x's memory, which is the fresh output of a product: with the bias in it, one tensor is all that is kept.
        if bias is not None:
            x = x.detach().add_(bias)
        ctx.save_for_backward(x, weights)
        return _activate_by_torch(x, weights, activation, is_gated)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weights = ctx.saved_tensors
        # Detached: autograd would take the overwriting of a saved tensor for a mistake.
        x = x.detach()
        grad, grad_weights = _weigh_gradient(grad, x, weights, ctx.activation, ctx.is_gated)
        (_gated_backward_ if ctx.is_gated else _plain_backward_)(grad, x, ctx.activation)
        if grad_weights is not None:
            grad_weights = grad_weights.to(weights.dtype)
        grad_bias = x.reshape(-1, x.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        return x, grad_bias, grad_weights, None, None


def _multiply_by_gate(x: Tensor, activation: Activation) -> Tensor:
    """The gated activation of x [..., 2 f], in new memory: [..., f]."""
    gate, up = _take_apart(x, activation.interleave_size)
    gate, up = _clamped(gate, up, activation.clamp_value)
    product = activation.forward(gate).mul_(_offset(up, activation.linear_offset))
    return _join_blocks(product, activation.interleave_size)


def _weigh_gradient(
    grad: Tensor, x: Tensor, weights: Tensor | None, activation: Activation, is_gated: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the unweighted output, [..., f], and of the weights, [..., 1]; x: as yet the input."""
    if weights is None:
        return grad, None
    y = _multiply_by_gate(x, activation) if is_gated else activation.forward(x)
    wide = grad.to(torch.promote_types(grad.dtype, weights.dtype))
    return (wide * weights).to(x.dtype), (wide * y).sum(-1, keepdim=True)


def _plain_backward_(grad: Tensor, x: Tensor, activation: Activation) -> None:
    """Overwrite x with its gradient; grad [..., f]."""
    assert activation.backward_ is not None, f"{activation.name} has no derivative"
    activation.backward_(grad, x)


def _gated_backward_(grad: Tensor, x: Tensor, activation: Activation) -> None:
    """Overwrite x [..., 2 f] with its gradient; grad [..., f]."""
    assert activation.backward_ is not None, f"{activation.name} has no derivative"
    gate, up = _take_apart(x, activation.interleave_size)
    grad = grad.reshape(gate.shape)
    limit = activation.clamp_value
    beyond = None
    if limit is not None:
        beyond = (gate > limit, up.abs() > limit)  # no gradient there
        gate.clamp_(max=limit)
        up.clamp_(-limit, limit)
    # Each half of x is read for the last time before its gradient is written over it.
    grad_act = grad * _offset(up, activation.linear_offset)
    torch.mul(grad, activation.forward(gate), out=up)  # up now holds its gradient
    activation.backward_(grad_act, gate)  # gate now holds its gradient
    if beyond is not None:
        gate.masked_fill_(beyond[0], 0.0)
        up.masked_fill_(beyond[1], 0.0)


class _WeightedSquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights)
        return (squared_relu(x) * weights).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weights = ctx.saved_tensors
        positive = x.detach().relu_()
        grad_weights = None
        if ctx.needs_input_grad[1]:
            grad_weights = (grad * torch.square(positive)).sum(-1, keepdim=True).to(weights.dtype)
        return positive.mul_(2).mul_((grad * weights).to(x.dtype)), grad_weights


@launching.by_kernel("megatron.core.kernels.activation:activate", "x", "bias")
def _activate(x: Tensor, bias: Tensor | None, weights: Tensor | None, activation: Activation, is_gated: bool) -> Tensor:
    # In inference mode there is no backward to keep anything for.
    if torch.is_inference_mode_enabled():
        return _activate_by_torch(x if bias is None else x.add_(bias), weights, activation, is_gated)
    result: Tensor = _FusedActivation.apply(x, bias, weights, activation, is_gated)
    return result


def _activate_by_torch(x: Tensor, weights: Tensor | None, activation: Activation, is_gated: bool) -> Tensor:
    y = _multiply_by_gate(x, activation) if is_gated else activation.forward(x)
    # Computed in the wider of the two formats, without a copy in it.
    return y if weights is None else y.mul_(weights)


def bias_activation(x: Tensor, bias: Tensor | None, activation: Activation, weights: Tensor | None = None) -> Tensor:
    """act(x + b), times the weight of each row, [..., 1], if there are weights: in x's dtype, [..., f].

    Overwrites x: hand it over only when nothing else needs it.
    """
    return _activate(x, bias, weights, activation, False)


def bias_gated_activation(
    x: Tensor, bias: Tensor | None, activation: Activation, weights: Tensor | None = None
) -> Tensor:
    """act(gate) * up of x + b = (gate | up), [..., 2 f] -> [..., f]; weights and memory as in `bias_activation`."""
    return _activate(x, bias, weights, activation, True)


def weighted_squared_relu(x: Tensor, weights: Tensor) -> Tensor:
    """max(x, 0)^2 times the weight of its row, in x's dtype; x [n, f], weights [n, 1]. Overwrites x as
    `bias_activation` does, and keeps neither the square nor the product."""
    if not adds_bias_in_place(x, None):
        return bias_activation(x, None, _ACTIVATIONS["squared_relu"], weights)
    result: Tensor = _WeightedSquaredReLU.apply(x, weights)
    return result
