# SPDX-License-Identifier: Apache-2.0
"""A matrix in 8 bits with one scale: its amax, its cast and its transpose by one kernel.

The values equal megatron/core/fp8.py's bit for bit: the scale is divided as IEEE 754 has it, values beyond the
format's greatest one become that, and NaN stays NaN. A product along the rows wants the transpose of what a product
along the columns reads, so that both are written while the matrix is read once.

With delayed scaling the scale is known before, and a matrix is read once. Otherwise each program finds the greatest
value of its tiles, waits for all others, and reads its tiles again, most of them from the cache. All programs must
therefore run at once: the launch is cooperative, which fails rather than wait for ever.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.device import count_processors, is_cpu
from megatron.core.kernels import launching

_TILE = 64
PROGRAMS_OF_A_PROCESSOR = 4
"""That its registers and shared memory have room for."""


@triton.jit
def _place_tile(tile, rows, columns, TILE: tl.constexpr):
    """Rows, columns, and which of them there are."""
    in_a_row = tl.cdiv(columns, TILE)
    row = (tile // in_a_row).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = (tile % in_a_row).to(tl.int64) * TILE + tl.arange(0, TILE)
    return row, column, (row[:, None] < rows) & (column[None, :] < columns)


@triton.jit
def _find_largest(value):
    """By its bits: without their sign they are ordered as the values, with infinity and NaN behind."""
    return tl.max(tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1), axis=0)


@triton.jit
def _cast_tile(
    x, values, turned, scale, tile, rows, columns, LARGEST: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    row, column, mask = _place_tile(tile, rows, columns, TILE)
    value = tl.load(x + row[:, None] * columns + column[None, :], mask=mask, other=0.0).to(tl.float32)
    scaled = value * scale
    bounded = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    bounded = tl.where(scaled == scaled, bounded, scaled)
    rounded = bounded.to(values.dtype.element_ty)
    tl.store(values + row[:, None] * columns + column[None, :], rounded, mask=mask)
    if turned is not None:
        # The columns of the tile become rows: neighbours in memory are written by neighbouring threads again.
        tl.store(turned + column[:, None] * rows + row[None, :], tl.trans(rounded), mask=tl.trans(mask))
    return _find_largest(value)


@triton.jit
def _divide(found, inverse, LARGEST: tl.constexpr, MARGIN: tl.constexpr):
    """The scale of this amax; the first program writes what undoes it."""
    scale = tl.math.div_rn(LARGEST, found) / MARGIN
    scale = tl.minimum(scale, 3.4028234663852886e38)
    # NaN is not less than anything.
    scale = tl.where((found > 0.0) & (found < float("inf")), scale, 1.0)
    if tl.program_id(0) == 0:
        tl.store(inverse, tl.math.div_rn(1.0, scale))
    return scale


@triton.jit
def cast_matrix(
    x, earlier, state, noted, values, turned, inverse, rows, columns, tiles,
    FACTOR: tl.constexpr, LARGEST: tl.constexpr, MARGIN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    programs = tl.num_programs(0)
    found = 0.0
    if earlier is not None:
        found = tl.load(earlier) * FACTOR
    largest = tl.zeros((), dtype=tl.int32)
    if found == 0.0:
        for tile in range(first, tiles, programs):
            row, column, mask = _place_tile(tile, rows, columns, TILE)
            value = tl.load(x + row[:, None] * columns + column[None, :], mask=mask, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, _find_largest(value))
        tl.atomic_max(state, largest)
        arrived = tl.atomic_add(state + 1, 1) + 1
        while arrived < programs:
            arrived = tl.atomic_add(state + 1, 0)
        found = tl.atomic_max(state, 0).to(tl.float32, bitcast=True)
    scale = _divide(found, inverse, LARGEST, MARGIN)
    for tile in range(first, tiles, programs):
        largest = tl.maximum(largest, _cast_tile(x, values, turned, scale, tile, rows, columns, LARGEST, TILE))
    if noted is not None:
        tl.atomic_max(noted, largest)


@triton.jit
def turn_matrix(values, turned, rows, columns, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = (row[:, None] < rows) & (column[None, :] < columns)
    value = tl.load(values + row[:, None] * columns + column[None, :], mask=mask, other=0)
    tl.store(turned + column[:, None] * rows + row[None, :], tl.trans(value), mask=tl.trans(mask))


class LaunchStates:
    """Memory that each launch finds zero, without a kernel each time that makes it so."""

    def __init__(self) -> None:
        self._left: list[Tensor] = []

    def take(self, device: torch.device) -> Tensor:
        """int32 [2], zeros that nobody else has."""
        if not self._left:
            self._left = [*torch.zeros(256, 2, dtype=torch.int32, device=device).unbind()]
        return self._left.pop()


def quantise_matrix(
    x: Tensor,
    dtype: torch.dtype,
    state: Tensor,
    earlier: Tensor | None = None,
    *,
    factor: float = 1.0,
    margin: int = 0,
    noted: Tensor | None = None,
    turns: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Values of a contiguous matrix [rows, columns] by the scale of its amax, or of `earlier`, a float32 scalar, times
    a factor, where that is not 0; the same [columns, rows] where `turns`; and what undoes the scale.

    state: of LaunchStates. noted: int32 scalar, which becomes the bits of amax where those are greater.
    """
    rows, columns = x.shape
    values = torch.empty_like(x, dtype=dtype)
    turned = torch.empty(columns, rows, dtype=dtype, device=x.device) if turns else None
    # Of no elements no kernel is launched that would write it.
    inverse = (torch.empty if x.numel() else torch.ones)((), dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(rows, _TILE) * triton.cdiv(columns, _TILE)
    # Triton's interpreter runs programs one after the other.
    programs = 1 if is_cpu(x) else PROGRAMS_OF_A_PROCESSOR * count_processors(x.device)
    launching.launch(
        cast_matrix, (min(tiles, programs),), x, earlier, state, noted,
        values, turned, inverse, rows, columns, tiles, cooperative=True,
        FACTOR=factor, LARGEST=torch.finfo(dtype).max, MARGIN=2.0**margin, TILE=_TILE,
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
