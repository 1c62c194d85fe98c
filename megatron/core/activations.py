"""Activation functions of the MLP, each with the derivative that the fused operations call.

| name         | y(x)                         | source                                   |
|--------------|------------------------------|------------------------------------------|
| gelu         | x * Phi(x)                   | Hendrycks & Gimpel, 2016                 |
| gelu_tanh    | its tanh approximation       | same; OpenAI's GPT-2                     |
| silu         | x * sigmoid(x)               | Elfwing et al., 2017; the gate of SwiGLU |
| quick_gelu   | x * sigmoid(1.702 x)         | Hendrycks & Gimpel, 2016                 |
| squared_relu | max(x, 0)^2                  | So et al., 2021                          |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.errors import ConfigError

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
        Activation("squared_relu", squared_relu, _squared_relu_backward_),
    )
}
_BY_FUNCTION = {activation.forward: activation for activation in _ACTIVATIONS.values()}


def find_activation(activation_func: str | Callable[..., Any]) -> Activation:
    """The Activation of a name or of a function on tensors; a function we do not know has no `backward_`.

    Raises ConfigError for an unknown name.
    """
    if callable(activation_func):
        name = getattr(activation_func, "__name__", "custom")
        return _BY_FUNCTION.get(activation_func) or Activation(name, activation_func)
    if activation_func not in _ACTIVATIONS:
        raise ConfigError(
            f"activation_func {activation_func!r} is not known; use one of {', '.join(_ACTIVATIONS)} or a function"
        )
    return _ACTIVATIONS[activation_func]
