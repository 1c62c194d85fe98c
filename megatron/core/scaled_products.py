# SPDX-License-Identifier: Apache-2.0
"""Products of 8-bit and 4-bit matrices whose scales belong to rows or blocks, by the tensor cores.

Each function takes what `fp8.multiply_emulated` does and has the same result up to the order of sums: operands a [m, k]
and b [n, k], and the dtype of a b^T. What differs is how torch.nn.functional.scaled_mm wants the scales:

| scales of           | dtype   | layout                                                                         |
|---------------------|---------|--------------------------------------------------------------------------------|
| rows                | float32 | [m, 1] and [1, n]                                                              |
| 1 x 128 (Hopper)    | float32 | [m, k / 128], neighbouring rows next to each other in memory                   |
| 128 x 128 (Hopper)  | float32 | [k / 128, n / 128], k next to each other, k / 128 rounded up to 4              |
| 1 x 32 (Blackwell)  | E8M0    | tiles of 128 rows and 4 scales: rows 32 apart next to each other, see `_tile`  |
| 1 x 16 (Blackwell)  | E4M3    | the same, and one float32 scale for the matrix                                 |

What is no multiple of the kernels' blocks is filled with zeros, and cut off. (cuBLAS 12.9 and later, "Narrow precision
data types usage".) Not yet run on a GPU: tests read the arguments as this table says and multiply them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core import fp4
from megatron.core.fp8 import MX_BLOCK, SCALED_BLOCK, Operand, make_rows_contiguous, multiply_natively

_LEAST = 16
"""What rows and columns of operands must be multiples of."""


def multiply_rows(a: Operand, b: Operand, out_dtype: torch.dtype, *, sums_fast: bool = False) -> Tensor:
    """Operands with one scale for each row."""
    of_a, of_b = a.inverse.reshape(-1, 1).contiguous(), b.inverse.reshape(1, -1).contiguous()
    if out_dtype == torch.float32:
        # The kernel rounds to 16 bits. By powers of two finished sums are multiplied exactly.
        one = torch.ones((), dtype=torch.float32, device=a.values.device)
        sums = multiply_natively(Operand(a.values, one), Operand(b.values, one), out_dtype, sums_fast=sums_fast)
        return sums.mul_(of_a).mul_(of_b)
    left, right = (_fill(operand.values, columns=_LEAST) for operand in (a, b))
    kind = F.ScalingType.RowWise  # type: ignore[attr-defined]
    return F.scaled_mm(left, right.t(), of_a, kind, of_b, kind, output_dtype=out_dtype, use_fast_accum=sums_fast)  # type: ignore[attr-defined,no-any-return]


def multiply_blocks(a: Operand, b: Operand, out_dtype: torch.dtype, *, sums_fast: bool = False) -> Tensor:
    """Operands with scales of 1 x 128; b may have them of 128 x 128."""
    assert a.block == (1, SCALED_BLOCK), f"blocks of {a.block}"
    is_square = b.block == (SCALED_BLOCK, SCALED_BLOCK)
    left = _fill(a.values, rows=_LEAST, columns=SCALED_BLOCK)
    right = _fill(b.values, rows=SCALED_BLOCK if is_square else _LEAST, columns=SCALED_BLOCK)
    if is_square:
        of_b = F.pad(b.inverse, (0, -b.inverse.shape[1] % 4), value=1.0).contiguous().t()
    else:
        of_b = _exchange(b.inverse, len(right))
    kinds = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128  # type: ignore[attr-defined]
    product: Tensor = F.scaled_mm(  # type: ignore[attr-defined]
        left, right.t(), _exchange(a.inverse, len(left)), kinds[0], of_b, kinds[is_square], output_dtype=out_dtype
    )
    return _cut(product, a, b)


def multiply_mxfp8(a: Operand, b: Operand, out_dtype: torch.dtype, *, sums_fast: bool = False) -> Tensor:
    """Operands with scales of 1 x 32, powers of two."""
    left, right = (_fill(operand.values, columns=MX_BLOCK) for operand in (a, b))
    scales = [_tile(operand.inverse.to(torch.float8_e8m0fnu)) for operand in (a, b)]
    kind, order = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4  # type: ignore[attr-defined]
    return F.scaled_mm(left, right.t(), scales[0], kind, scales[1], kind, order, order, output_dtype=out_dtype)  # type: ignore[attr-defined,no-any-return]


def multiply_nvfp4(a: Operand, b: Operand, out_dtype: torch.dtype, *, sums_fast: bool = False) -> Tensor:
    """Operands in NVFP4, values of which are stored in E4M3, with scales of 1 x 16; b may have them of 16 x 16."""
    values, scales = [], []
    for operand in (a, b):
        assert operand.factor is not None and operand.block is not None, "no operand in NVFP4"
        codes, of_blocks, factor = fp4.pack(operand)
        # The kernel has a scale for each row, 32 values at a time.
        of_rows = of_blocks.view(torch.uint8).repeat_interleave(operand.block[0], 0)[: len(codes)]
        values.append(F.pad(codes, (0, -codes.shape[1] % _LEAST)).view(torch.float4_e2m1fn_x2))
        scales.append([_tile(of_rows.view(of_blocks.dtype)), factor])
    kinds = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]  # type: ignore[attr-defined]
    orders = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]  # type: ignore[attr-defined]
    return F.scaled_mm(  # type: ignore[attr-defined,no-any-return]
        values[0], values[1].t(), scales[0], kinds, scales[1], kinds, orders, orders, output_dtype=out_dtype
    )


def _fill(values: Tensor, *, rows: int = 1, columns: int) -> Tensor:
    """8-bit values [m, k] in contiguous rows, with zeros up to multiples of `rows` and `columns`."""
    missing = (0, -values.shape[1] % columns, 0, -values.shape[0] % rows)
    if not any(missing):
        return make_rows_contiguous(values).contiguous()
    # Padding has no kernel for 8-bit floats; as bytes, zeros are zeros.
    return F.pad(values.contiguous().view(torch.uint8), missing).view(values.dtype)


def _exchange(inverse: Tensor, rows: int) -> Tensor:
    """Scales [m, blocks] as [rows, blocks] whose columns are contiguous; of added rows they are 1."""
    return F.pad(inverse.t(), (0, rows - inverse.shape[0]), value=1.0).contiguous().t()


def _tile(scales: Tensor) -> Tensor:
    """Scales [m, blocks] of 8 bits in the order of the kernel: [tiles * 512], a tile of 128 rows and 4 blocks as 32
    times 4 rows that are 32 apart, each with its 4 scales. Added ones are 0."""
    padded = F.pad(scales.contiguous().view(torch.uint8), (0, -scales.shape[1] % 4, 0, -scales.shape[0] % 128))
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(scales.dtype)


def _cut(product: Tensor, a: Operand, b: Operand) -> Tensor:
    rows, columns = a.values.shape[0], b.values.shape[0]
    return product if product.shape == (rows, columns) else product[:rows, :columns].contiguous()
