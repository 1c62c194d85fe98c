# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and LayerNorm, with the sum before them and the residual stream around them, in one kernel each way; the
formulas are in megatron/core/transformer/norms.py.

Forward may add a bias and a residual first, and writes the sum beside what it makes of it. Backward takes the gradients
of both, so that autograd need not add them. Gradients of the weights are summed in two kernels, the same way each time:
of every so many tokens, and of these sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels import launching
from megatron.core.kernels.launching import choose_block

_TILE = 2048  # elements of narrow lines that a program takes at a time
_PER_THREAD = 16
_PROGRAMS = 264  # of backward: two for each multiprocessor of an H200; the same for all GPUs, so that sums are, too


@triton.jit
def norm_forward(
    x, bias, residual, weight, offset, sums, y, means, factors, lines, eps,
    WIDTH: tl.constexpr, ZERO_CENTERED: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (line < lines) & (column < WIDTH)
    places = line * WIDTH + column
    value = tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + places, mask=mask, other=0.0).to(tl.float32)
        # What is normalised is what backward will read.
        rounded = value.to(sums.dtype.element_ty)
        tl.store(sums + places, rounded, mask=mask)
        value = rounded.to(tl.float32)
    if means is not None:
        mean = tl.sum(value, axis=1, keep_dims=True) / WIDTH
        tl.store(means + line, mean, mask=line < lines)
        value = tl.where(column < WIDTH, value - mean, 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(value * value, axis=1, keep_dims=True) / WIDTH + eps)
    tl.store(factors + line, factor, mask=line < lines)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        scale += 1.0
    value = value * factor * scale
    if offset is not None:
        value += tl.load(offset + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(y + places, value, mask=mask)


@triton.jit
def norm_backward(
    grad, grad_sums, x, weight, means, factors, grad_x, rounded_grad_x, parts, lines,
    WIDTH: tl.constexpr, ZERO_CENTERED: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        scale += 1.0
    of_weight = tl.zeros((LINES, BLOCK), dtype=tl.float32)
    of_offset = tl.zeros((LINES, BLOCK), dtype=tl.float32)
    for start in range(first * LINES, lines, tl.num_programs(0) * LINES):
        line = start + tl.arange(0, LINES)[:, None].to(tl.int64)
        mask = (line < lines) & (column < WIDTH)
        places = line * WIDTH + column
        value = tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
        change = tl.load(grad + places, mask=mask, other=0.0).to(tl.float32)
        factor = tl.load(factors + line, mask=line < lines, other=0.0)
        if means is not None:
            value -= tl.load(means + line, mask=line < lines, other=0.0)
            of_offset += change
        value *= factor
        of_weight += change * value
        change *= scale
        along = value * (tl.sum(change * value, axis=1, keep_dims=True) / WIDTH)
        if means is not None:
            along += tl.sum(change, axis=1, keep_dims=True) / WIDTH
        change = (change - along) * factor
        if grad_sums is not None:
            change += tl.load(grad_sums + places, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_x + places, change, mask=mask)
        if rounded_grad_x is not None:
            tl.store(rounded_grad_x + places, change, mask=mask)
    if parts is not None:
        column = tl.arange(0, BLOCK)
        parts += first * WIDTH
        tl.store(parts + column, tl.sum(of_weight, axis=0), mask=column < WIDTH)
        if means is not None:
            # After the parts that all programs wrote for the weight.
            parts += tl.num_programs(0).to(tl.int64) * WIDTH
            tl.store(parts + column, tl.sum(of_offset, axis=0), mask=column < WIDTH)


@triton.jit
def sum_parts(parts, sums, count, ADDS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """[kinds, count, WIDTH] -> [kinds, WIDTH]; ADDS: to what is there."""
    kind = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)[:, None].to(tl.int64)
        mask = (row < count) & (column < WIDTH)[None, :]
        total += tl.load(parts + (kind * count + row) * WIDTH + column[None, :], mask=mask, other=0.0)
    found = tl.sum(total, axis=0)
    if ADDS:
        found += tl.load(sums + kind * WIDTH + column, mask=column < WIDTH, other=0.0)
    tl.store(sums + kind * WIDTH + column, found, mask=column < WIDTH)


class Statistics(NamedTuple):
    """Statistics that backward needs in addition to the norm's input."""

    means: Tensor | None
    """[tokens] float32; None of RMSNorm."""
    factors: Tensor
    """[tokens] float32, 1 / sqrt(variance + eps)."""


def _constants(width: int, zero_centered: bool) -> dict[str, Any]:
    block = choose_block(width, 1 << 30)
    lines = max(1, _TILE // block)
    warps = max(1, block * lines // (32 * _PER_THREAD))
    return {"WIDTH": width, "ZERO_CENTERED": zero_centered, "LINES": lines, "BLOCK": block, "num_warps": warps}


def normalise(
    x: Tensor, weight: Tensor, offset: Tensor | None, eps: float, zero_centered: bool, *,
    bias: Tensor | None = None, residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Statistics]:  # fmt: skip
    """The norm of x, or of x + bias + residual, [..., h] in the weight's format; that sum; and what backward needs.

    weight, offset, bias: [h]; with an offset it is LayerNorm, without RMSNorm. The sum is written over x where it has
    x's dtype, else it has the residual's. All contiguous.
    """
    width = x.shape[-1]
    sums = x if residual is None or residual.dtype == x.dtype else torch.empty_like(residual)
    y = torch.empty_like(x, dtype=weight.dtype)
    factors = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    means = None if offset is None else torch.empty_like(factors)
    constants = _constants(width, zero_centered)
    launching.launch(
        norm_forward, (triton.cdiv(factors.numel(), constants["LINES"]),), x, bias, residual, weight, offset, sums, y,
        means, factors, factors.numel(), eps, **constants,
    )  # fmt: skip
    if residual is not None and sums is x:
        torch.autograd.graph.increment_version(x)
    return y, sums, Statistics(means, factors)


def find_gradients(
    grad: Tensor, grad_sums: Tensor | None, x: Tensor, weight: Tensor, statistics: Statistics, zero_centered: bool, *,
    rounds_to: torch.dtype, with_weights: bool = True, into: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of the normalised x, [..., h], in its format and in `rounds_to`, and of weight and offset, [kinds, h].

    grad, grad_sums: of the norm's output, and of x that went around it; None where nobody used that. into: float32 [h],
    to which the gradient of a weight without an offset is added.
    """
    lines, width = statistics.factors.numel(), x.shape[-1]
    constants = _constants(width, zero_centered)
    programs = min(triton.cdiv(lines, constants["LINES"]), _PROGRAMS)
    kinds = 1 if statistics.means is None else 2
    grad_x = torch.empty_like(x)
    rounded = grad_x if rounds_to == x.dtype else torch.empty_like(x, dtype=rounds_to)
    parts = torch.empty(kinds, programs, width, dtype=torch.float32, device=x.device) if with_weights else None
    launching.launch(
        norm_backward, (programs,), grad.contiguous(), None if grad_sums is None else grad_sums.contiguous(), x, weight,
        statistics.means, statistics.factors, grad_x, None if rounded is grad_x else rounded, parts, lines, **constants,
    )  # fmt: skip
    if parts is None:
        return grad_x, rounded, None
    assert into is None or kinds == 1, "an offset has a gradient, too"
    sums = weight.new_empty(kinds, width) if into is None else into
    # Without rows there are no parts, and the sums are zeros.
    if programs == 0:
        return grad_x, rounded, sums.zero_() if into is None else sums
    launching.launch(
        sum_parts, (triton.cdiv(width, 64), kinds), parts, sums, programs, ADDS=into is not None, WIDTH=width, ROWS=32,
        BLOCK=64,
    )  # fmt: skip
    return grad_x, rounded, sums
