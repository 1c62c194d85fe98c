# SPDX-License-Identifier: Apache-2.0
"""Activations of the MLP, plain and gated, with bias, clamp, offset and a weight for each row, in one kernel each way.

The formulas, and the meaning of a row's weight, are in megatron/core/activations.py. Forward reads its input once and
writes the product; backward reads input and gradient once and writes the input's gradient over the input. A program
takes one row, so that the gradient of the row's weight is a sum inside the program: float32, and the same every time.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels import launching
from megatron.core.kernels.launching import choose_block

_BLOCK = 1024  # eight 16-bit numbers, 16 bytes, for each of 128 threads


class Form(Protocol):
    """Description of an activation for the kernels; it has the fields of megatron.core.activations.Activation."""

    @property
    def name(self) -> str:
        """gelu, gelu_tanh, silu, quick_gelu or squared_relu."""

    @property
    def clamp_value(self) -> float | None:
        """Bound of gate and up."""

    @property
    def linear_offset(self) -> float:
        """Offset added to up."""

    @property
    def interleave_size(self) -> int | None:
        """Channels of a gate's block, where gate and up take turns."""


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _at_least(x, bound):
    # Triton's default prefers numbers to NaN, which would hide that a run has diverged.
    return tl.maximum(x, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _at_most(x, bound):
    return tl.minimum(x, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _activate(x, NAME: tl.constexpr):
    if NAME == "silu":
        y = x * _sigmoid(x)
    elif NAME == "quick_gelu":
        y = x * _sigmoid(1.702 * x)
    elif NAME == "squared_relu":
        y = _at_least(x, 0.0) * _at_least(x, 0.0)
    elif NAME == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # 0.5 (1 + tanh(z)) is the logistic function of 2 z.
        y = x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return y


@triton.jit
def _derivative(x, NAME: tl.constexpr):
    if NAME == "silu":
        s = _sigmoid(x)
        y = s * (1.0 + x * (1.0 - s))
    elif NAME == "quick_gelu":
        s = _sigmoid(1.702 * x)
        y = s * (1.0 + 1.702 * x * (1.0 - s))
    elif NAME == "squared_relu":
        y = 2.0 * _at_least(x, 0.0)
    elif NAME == "gelu":
        density = tl.exp(-0.5 * x * x) * 0.3989422804014327
        y = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * density
    else:
        s = _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        y = s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    return y


@triton.jit
def _find_gate(columns, WIDTH: tl.constexpr, INTERLEAVE: tl.constexpr):
    """Return the position of each output's gate in a row of x; its up is INTERLEAVE, or WIDTH, after it."""
    if INTERLEAVE is None:
        places = columns
    else:
        places = columns // INTERLEAVE * (2 * INTERLEAVE) + columns % INTERLEAVE
    return places


@triton.jit
def _read(x, bias, columns, mask):
    """A part of a row in float32, with its bias."""
    value = tl.load(x + columns, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def activation_forward(
    x, bias, weights, y,
    WIDTH: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVE: tl.constexpr,
    CLAMP: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    STEP: tl.constexpr = WIDTH if INTERLEAVE is None else INTERLEAVE
    row = tl.program_id(0).to(tl.int64)
    y += row * WIDTH
    if GATED:
        x += row * (2 * WIDTH)
    else:
        x += row * WIDTH
    weight = 1.0
    if weights is not None:
        weight = tl.load(weights + row).to(tl.float32)
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < WIDTH
        if GATED:
            places = _find_gate(columns, WIDTH, INTERLEAVE)
            gate = _read(x, bias, places, mask)
            up = _read(x, bias, places + STEP, mask)
            if CLAMP is not None:
                gate = _at_most(gate, CLAMP)
                up = _at_most(_at_least(up, -CLAMP), CLAMP)
            value = _activate(gate, NAME) * (up + OFFSET)
        else:
            value = _activate(_read(x, bias, columns, mask), NAME)
        if weights is not None:
            value *= weight
        tl.store(y + columns, value, mask=mask)


@triton.jit
def activation_backward(
    grad, x, bias, weights, grad_weights,
    WIDTH: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVE: tl.constexpr,
    CLAMP: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    STEP: tl.constexpr = WIDTH if INTERLEAVE is None else INTERLEAVE
    row = tl.program_id(0).to(tl.int64)
    grad += row * WIDTH
    if GATED:
        x += row * (2 * WIDTH)
    else:
        x += row * WIDTH
    weight = 1.0
    if weights is not None:
        weight = tl.load(weights + row).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < WIDTH
        grad_y = tl.load(grad + columns, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            places = _find_gate(columns, WIDTH, INTERLEAVE)
            gate = _read(x, bias, places, mask)
            up = _read(x, bias, places + STEP, mask)
            inside_gate = mask
            inside_up = mask
            if CLAMP is not None:
                # No gradient beyond the bounds.
                inside_gate = gate <= CLAMP
                inside_up = tl.abs(up) <= CLAMP
                gate = _at_most(gate, CLAMP)
                up = _at_most(_at_least(up, -CLAMP), CLAMP)
            up += OFFSET
            activated = _activate(gate, NAME)
            total += grad_y * activated * up
            grad_y *= weight
            grad_gate = grad_y * up * _derivative(gate, NAME)
            grad_up = grad_y * activated
            if CLAMP is not None:
                grad_gate = tl.where(inside_gate, grad_gate, 0.0)
                grad_up = tl.where(inside_up, grad_up, 0.0)
            tl.store(x + places, grad_gate, mask=mask)
            tl.store(x + places + STEP, grad_up, mask=mask)
        else:
            value = _read(x, bias, columns, mask)
            total += grad_y * _activate(value, NAME)
            tl.store(x + columns, grad_y * weight * _derivative(value, NAME), mask=mask)
    if grad_weights is not None:
        tl.store(grad_weights + row, tl.sum(total, axis=0))


def _constants(activation: Form, is_gated: bool, width: int) -> dict[str, Any]:
    return {
        "WIDTH": width,
        "NAME": activation.name,
        "GATED": is_gated,
        "INTERLEAVE": activation.interleave_size if is_gated else None,
        "CLAMP": activation.clamp_value if is_gated else None,
        "OFFSET": activation.linear_offset if is_gated else 0.0,
        "BLOCK": choose_block(width, _BLOCK),
    }


def activate(x: Tensor, bias: Tensor | None, weights: Tensor | None, activation: Form, is_gated: bool) -> Tensor:
    """The activation of x [..., f], gated [..., 2 f], times each row's weight: -> [..., f] in x's dtype.

    bias: [f] or [2 f], added to x. weights: one number for each row. All contiguous. Backward overwrites x.
    """
    result: Tensor = _Activate.apply(x, bias, weights, activation, is_gated)
    return result


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, weights: Tensor | None, activation: Form, is_gated: bool
    ) -> Tensor:
        ctx.activation, ctx.is_gated = activation, is_gated
        ctx.save_for_backward(x, bias, weights)
        width = x.shape[-1] // 2 if is_gated else x.shape[-1]
        y = x.new_empty(*x.shape[:-1], width)
        weights = None if weights is None else weights.contiguous()
        constants = _constants(activation, is_gated, width)
        launching.launch(activation_forward, (y.numel() // width,), x, bias, weights, y, **constants)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, bias, weights = ctx.saved_tensors
        grad, width = grad.contiguous(), grad.shape[-1]
        rows = None if weights is None else weights.contiguous()
        grad_rows = None if rows is None else torch.empty_like(rows, dtype=torch.float32)
        launching.launch(
            activation_backward, (grad.numel() // width,), grad, x, bias, rows, grad_rows,
            **_constants(ctx.activation, ctx.is_gated, width),
        )  # fmt: skip
        # As torch's in-place operations do: autograd then refuses to run through the same graph again.
        torch.autograd.graph.increment_version(x)
        x = x.detach()
        grad_bias = x.reshape(-1, x.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        return x, grad_bias, None if grad_rows is None else grad_rows.to(weights.dtype), None, None
