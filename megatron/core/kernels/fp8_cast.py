# SPDX-License-Identifier: Apache-2.0
"""A matrix in 8 bits with one scale: amax in one pass, and the cast with its transpose in another.

The values equal those that megatron/core/fp8.py computes bit for bit: the scale is divided as IEEE 754 has it, values
beyond the format's greatest value become it, and NaN stays NaN. A product along the rows wants the transpose of what a
product along the columns reads, so that both are written while the matrix is read once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels import launching
from megatron.core.kernels.launching import choose_block

_BLOCK = 4096
_TILE = 64


@triton.jit
def largest_bits(x, amax, count, BLOCK: tl.constexpr):
    """The greatest absolute value, by its bits: they are ordered as the values, with infinity and NaN behind."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + places, mask=places < count, other=0.0).to(tl.float32)
    tl.atomic_max(amax, tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0))


@triton.jit
def cast_matrix(
    x, amax, values, turned, inverse, rows, columns,
    LARGEST: tl.constexpr, MARGIN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    found = tl.load(amax)
    scale = tl.math.div_rn(LARGEST, found) / MARGIN
    scale = tl.minimum(scale, 3.4028234663852886e38)
    # NaN is not less than anything.
    scale = tl.where((found > 0.0) & (found < float("inf")), scale, 1.0)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(inverse, tl.math.div_rn(1.0, scale))
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = (row[:, None] < rows) & (column[None, :] < columns)
    value = tl.load(x + row[:, None] * columns + column[None, :], mask=mask, other=0.0).to(tl.float32) * scale
    bounded = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
    bounded = tl.where(value == value, bounded, value)
    rounded = bounded.to(values.dtype.element_ty)
    tl.store(values + row[:, None] * columns + column[None, :], rounded, mask=mask)
    if turned is not None:
        # The columns of the tile become rows: neighbours in memory are written by neighbouring threads again.
        tl.store(turned + column[:, None] * rows + row[None, :], tl.trans(rounded), mask=tl.trans(mask))


@triton.jit
def turn_matrix(values, turned, rows, columns, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = (row[:, None] < rows) & (column[None, :] < columns)
    value = tl.load(values + row[:, None] * columns + column[None, :], mask=mask, other=0)
    tl.store(turned + column[:, None] * rows + row[None, :], tl.trans(value), mask=tl.trans(mask))


def find_amax(x: Tensor) -> Tensor:
    """The greatest absolute value of a contiguous tensor, float32 scalar; NaN where there is one."""
    bits = torch.zeros((), dtype=torch.int32, device=x.device)
    count = x.numel()
    block = choose_block(max(count, 1), _BLOCK)
    launching.launch(largest_bits, (triton.cdiv(count, block),), x, bits, count, BLOCK=block)
    return bits.view(torch.float32)


def quantise_matrix(
    x: Tensor, dtype: torch.dtype, amax: Tensor, *, margin: int = 0, turns: bool = False
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Values of a contiguous matrix [rows, columns] by the scale of `amax`, a float32 scalar; the same [columns, rows]
    where `turns`; and what undoes the scale."""
    rows, columns = x.shape
    values = torch.empty_like(x, dtype=dtype)
    turned = torch.empty(columns, rows, dtype=dtype, device=x.device) if turns else None
    # Of no elements no kernel is launched that would write it.
    inverse = torch.empty_like(amax) if x.numel() else torch.ones_like(amax)
    launching.launch(
        cast_matrix, (triton.cdiv(rows, _TILE), triton.cdiv(columns, _TILE)), x, amax, values, turned, inverse,
        rows, columns, LARGEST=torch.finfo(dtype).max, MARGIN=2.0**margin, TILE=_TILE,
    )  # fmt: skip
    return values, turned, inverse


def turn(values: Tensor) -> Tensor:
    """Contiguous 8-bit values [rows, columns] -> contiguous [columns, rows]."""
    rows, columns = values.shape
    turned = torch.empty(columns, rows, dtype=values.dtype, device=values.device)
    launching.launch(
        turn_matrix, (triton.cdiv(rows, 2 * _TILE), triton.cdiv(columns, 2 * _TILE)), values.view(torch.uint8),
        turned.view(torch.uint8), rows, columns, TILE=2 * _TILE,
    )  # fmt: skip
    return turned
