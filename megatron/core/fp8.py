# SPDX-License-Identifier: Apache-2.0
"""Matrices in 8-bit floating point: rounding, scales, and their products, on any device.

    values = saturate(x * scale) in e4m3 or e5m2          x ~ values / scale

| recipe     | elements that share a scale                      | scale                                                |
|------------|--------------------------------------------------|------------------------------------------------------|
| delayed    | the whole matrix                                 | largest / amax of earlier steps / 2^margin           |
| tensorwise | the whole matrix                                 | largest / amax                                       |
| blockwise  | 128 along the sum; of weights, blocks 128 x 128  | largest / amax, rounded down to a power of two       |
| mxfp8      | 32 along the sum                                 | the same, in E8M0                                    |

amax is the greatest absolute value of those elements, and `largest` the greatest value of the format: 448 of e4m3,
57344 of e5m2. Where amax is 0 or infinite the scale is 1. "Along the sum" is the dimension that a product adds up,
the last one of both operands here.

Sources: Micikevicius et al., "FP8 formats for deep learning", 2022 (formats, delayed scales); DeepSeek-AI, DeepSeek-V3,
2024, section 3.3 (blocks of 128, powers of two); Open Compute Project, Microscaling Formats specification 1.0, 2023,
and Mishra et al., "Recipes for pre-training LLMs with MXFP8", 2025 (scales rounded up instead of down).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.device import is_cpu
from megatron.core.kernels import launching

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MX_BLOCK, SCALED_BLOCK = 32, 128
_SMALLEST_EXPONENT = -127
"""Of a scale in E8M0, which has 8 bits of exponent and nothing else."""
_NOT_A_NUMBER = 255
"""In E8M0."""


@dataclass(frozen=True)
class Operand:
    """A matrix [rows, k], or a stack [matrices, rows, k], in 8 bits with the factors that undo its scales."""

    values: Tensor
    inverse: Tensor
    """float32: a scalar, or [..., rows / block rows, k / block columns], rounded up."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale; all when None."""
    factor: Tensor | None = None
    """float32 scalar: a second factor of all values, where `inverse` has low precision."""
    turned: Tensor | None = None
    """The values with their last two dimensions exchanged in memory, where a kernel has written them, too."""

    @property
    def transposed(self) -> Operand:
        """The same with its last two dimensions exchanged, to sum over the other one."""
        if self.block is None:
            turned = self.values.transpose(-2, -1) if self.turned is None else self.turned
            return dataclasses.replace(self, values=turned, turned=None if self.turned is None else self.values)
        block = (self.block[1], self.block[0])
        return Operand(self.values.transpose(-2, -1), self.inverse.transpose(-2, -1), block, self.factor)

    def select_matrix(self, index: int) -> Operand:
        """One matrix of a stack."""
        inverse = self.inverse if self.block is None else self.inverse[index]
        return Operand(self.values[index], inverse, self.block, self.factor)

    def pack(self) -> tuple[Tensor, ...]:
        """The tensors to keep: values, and inverse scales, of blocks in E8M0, which holds powers of two."""
        if self.turned is not None:  # in the order in which a sum over the rows reads them
            return self.turned.transpose(-2, -1), self.inverse
        # A part of padded blocks would keep the memory of all of them.
        is_part = self.values.untyped_storage().nbytes() > self.values.numel()
        values = self.values.clone() if is_part else self.values
        return values, self.inverse if self.block is None else self.inverse.to(torch.float8_e8m0fnu)

    @staticmethod
    def unpack(kept: Sequence[Tensor], block: tuple[int, int] | None) -> Operand:
        """The operand that pack made tensors of."""
        values, inverse = kept
        return Operand(values, inverse.float(), block)

    def dequantise(self) -> Tensor:
        """The values that are meant, in float32 and the shape of `values`."""
        return self.apply_inverse() if self.factor is None else self.apply_inverse().mul_(self.factor)

    def apply_inverse(self) -> Tensor:
        """All but the second factor."""
        if is_turned(self.values):
            return self.transposed.apply_inverse().transpose(-2, -1)
        wide = widen(self.values)
        if self.block is None:
            return wide.mul_(self.inverse)
        blocks = split_into_blocks(wide, self.block).mul_(spread_over_blocks(self.inverse))
        return join_blocks(blocks, wide.shape)


def round_to(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x * scale, computed in float32 and rounded to the nearest value of an 8-bit format; what is greater than its
    greatest value becomes that, infinity too. NaN stays NaN."""
    largest = torch.finfo(dtype).max
    wide = x * scale if x.dtype == torch.float32 else x.float().mul_(scale)
    return wide.clamp_(-largest, largest).to(dtype)


def find_amax(x: Tensor) -> Tensor:
    """The greatest absolute value of all elements, float32 scalar; 0 of none."""
    # One pass without a temporary, which abs() would make.
    if not x.numel():
        return x.new_zeros((), dtype=torch.float32)
    low, high = torch.aminmax(x.detach())
    return torch.maximum(-low, high).float()


def compute_scale(amax: Tensor, dtype: torch.dtype, *, power_of_two: bool = False, margin: int = 0) -> Tensor:
    """The scale that brings amax to the format's greatest value, or with a margin to 2^-margin of it.

    amax: float32, of any shape. power_of_two: round the scale down to one.
    """
    # Divided by tensors: torch turns a division of or by a Python number into a product, which rounds twice.
    scale = torch.full_like(amax, torch.finfo(dtype).max).div_(amax)
    if margin:
        scale.div_(2.0**margin)
    # Of values so small that their scale is no float32, the greatest one that is.
    scale.clamp_(max=torch.finfo(torch.float32).max)
    if power_of_two:
        # Its mantissa without its last 23 bits; the sign is 0.
        scale.view(torch.int32).bitwise_right_shift_(23).bitwise_left_shift_(23)
    return torch.where((amax > 0) & (amax < torch.inf), scale, 1.0)


def compute_mx_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The power of two by which values are multiplied in the microscaling format; its inverse is what E8M0 stores."""
    # The exponent of amax / largest, rounded up: rounded down, as the specification has it, greatest values saturate.
    of_largest, largest_exponent = math.frexp(torch.finfo(dtype).max)  # 0.875 of 448 and of 57344, times 2^9 and 2^16
    # A greater mantissa (the 23 bits after the exponent) than the largest value's carries into the exponent.
    carry = 0x7FFFFF - int((2 * of_largest - 1) * 2**23)
    bits = amax.view(torch.int32).add(carry).bitwise_right_shift_(23)  # the exponent + 127, rounded up
    bits = bits.neg_().add_(2 * 127 + largest_exponent - 1).clamp_(max=127 - _SMALLEST_EXPONENT)
    scale = bits.bitwise_left_shift_(23).view(torch.float32)
    return torch.where((amax > 0) & (amax < torch.inf), scale, 1.0)


def quantise_tensor(x: Tensor, dtype: torch.dtype, scale: Tensor) -> Operand:
    """The whole matrix by one scale, a float32 scalar."""
    return Operand(round_to(x, scale, dtype), 1.0 / scale)


def quantise_blocks(x: Tensor, dtype: torch.dtype, block: tuple[int, int], *, mx: bool = False) -> Operand:
    """Each block of rows and columns by a separate scale; blocks at the end may be smaller. mx: see compute_mx_scale;
    otherwise powers of two of compute_scale."""
    if is_turned(x):
        return quantise_blocks(x.transpose(-2, -1), dtype, (block[1], block[0]), mx=mx).transposed
    blocks = split_into_blocks(x.float() if x.dtype == torch.float16 else x, block)
    amax = find_block_amax(blocks)
    scale = compute_mx_scale(amax, dtype) if mx else compute_scale(amax, dtype, power_of_two=True)
    # By powers of two bfloat16 is multiplied exactly: what falls below its range becomes 0 in 8 bits anyway.
    scaled = blocks * spread_over_blocks(scale.to(blocks.dtype))
    largest = torch.finfo(dtype).max
    return Operand(join_blocks(scaled.clamp_(-largest, largest).to(dtype), x.shape), 1.0 / scale, block)


def is_turned(x: Tensor) -> bool:
    """Return whether the last two dimensions are exchanged in memory, where it is faster to work on the transpose."""
    return x.dim() > 1 and x.stride(-1) != 1 and x.stride(-2) == 1


def split_into_blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    """[..., rows, columns] -> [..., rows / block, block rows, columns / block, block columns]: a view, or a copy with
    zeros where the last blocks are not full."""
    rows, columns = (-size % length for size, length in zip(x.shape[-2:], block, strict=True))
    x = F.pad(x, (0, columns, 0, rows)) if rows or columns else x
    return x.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))


def join_blocks(blocks: Tensor, shape: Sequence[int]) -> Tensor:
    """The matrices of this shape that split_into_blocks made blocks of."""
    return blocks.flatten(-4, -3).flatten(-2)[..., : shape[-2], : shape[-1]]


def spread_over_blocks(scales: Tensor) -> Tensor:
    """Scales [..., rows / block, columns / block] in a shape that multiplies blocks."""
    return scales.unsqueeze(-1).unsqueeze(-3)


def find_block_amax(blocks: Tensor) -> Tensor:
    """The greatest absolute value of each block that split_into_blocks has made: float32 [..., rows, columns]."""
    if not blocks.numel():
        return blocks.sum((-3, -1), dtype=torch.float32)
    if blocks.dtype == torch.bfloat16:
        # Without their sign, bits are ordered as the values, with infinity and NaN behind; comparing them is faster.
        return (blocks.view(torch.int16) & 0x7FFF).amax((-3, -1)).view(torch.bfloat16).float()
    # Of zeros either may be negative.
    return torch.maximum(-blocks.amin((-3, -1)), blocks.amax((-3, -1))).float().abs_()


# ---- rows that travel


def pack_rows(rows: Tensor) -> Tensor:
    """Rows [n, c] in the microscaling format, as bytes [n, c + c / 32]: values in e4m3, then their blocks' scales in
    E8M0. c: a multiple of 32."""
    operand = quantise_blocks(rows, E4M3, (1, MX_BLOCK), mx=True)
    _, exponent = torch.frexp(operand.inverse)  # of a power of two the mantissa is 0.5
    scales = (exponent - 1 - _SMALLEST_EXPONENT).to(torch.uint8)
    # What is not finite must not become a number on its way.
    is_finite = rows.isfinite().unflatten(-1, (-1, MX_BLOCK)).all(-1)
    scales = scales.masked_fill(~is_finite, _NOT_A_NUMBER)
    return torch.cat((operand.values.view(torch.uint8), scales), dim=-1)


def unpack_rows(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows [n, c] that pack_rows made bytes of; a block with infinities or NaN is NaN."""
    blocks = packed.shape[-1] // (MX_BLOCK + 1)
    values, scales = packed.split((blocks * MX_BLOCK, blocks), dim=-1)
    inverse = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() + _SMALLEST_EXPONENT)
    inverse = inverse.masked_fill(scales == _NOT_A_NUMBER, torch.nan)
    return Operand(values.contiguous().view(E4M3), inverse, (1, MX_BLOCK)).dequantise().to(dtype)


# ---- products


def multiply_emulated(a: Operand, b: Operand) -> Tensor:
    """a [m, k] times b [n, k] transposed -> [m, n] in float32, on any device."""
    # Products of 8-bit values are exact in float32, so that scales of whole matrices act on the finished sum, as tensor
    # cores have it.
    if a.block is None and b.block is None:
        return _multiply_wide(widen(a.values), widen(b.values).t()).mul_(a.inverse * b.inverse)
    product = _multiply_wide(a.apply_inverse(), b.apply_inverse().t())
    return product if a.factor is None or b.factor is None else product.mul_(a.factor * b.factor)


def _multiply_wide(a: Tensor, b: Tensor) -> Tensor:
    """The product of two float32 matrices whose values bfloat16 has, too: 8-bit values times powers of two, and 4-bit
    values times scales in E4M3."""
    # A CPU with products in bfloat16 may thus use them; it still sums in float32. PyTorch has the switch since 2.9.
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    if matmul is None:
        return a @ b
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        return a @ b
    finally:
        matmul.fp32_precision = before


def multiply_natively(a: Operand, b: Operand, out_dtype: torch.dtype, *, sums_fast: bool = False) -> Tensor:
    """The same by the device's 8-bit product, which takes matrices with one scale each and sizes that are multiples of
    16. sums_fast: accumulate in the tensor cores, with fewer bits than float32, from beginning to end."""
    assert a.block is None and b.block is None, f"blocks {a.block} and {b.block}"
    # Only what is summed may need padding: rows of a microbatch, or of an expert, in a weight gradient.
    missing = -a.values.shape[1] % 16
    left, right = (_pad_columns(operand.values, missing) for operand in (a, b))
    scaled_mm: Any = torch._scaled_mm
    result: Tensor = scaled_mm(
        left, right.t(), scale_a=a.inverse, scale_b=b.inverse, out_dtype=out_dtype, use_fast_accum=sums_fast
    )
    return result


def _pad_columns(values: Tensor, missing: int) -> Tensor:
    if not missing:
        return values if values.is_contiguous() else make_rows_contiguous(values).contiguous()
    # Padding has no kernel for 8-bit floats; as bytes, zeros are zeros.
    return F.pad(values.contiguous().view(torch.uint8), (0, missing)).view(values.dtype)


def make_rows_contiguous(values: Tensor) -> Tensor:
    """8-bit values [rows, columns] whose rows are each in one piece."""
    if values.t().is_contiguous() and launching.kernels_work(values.device):
        from megatron.core.kernels import fp8_cast

        return fp8_cast.turn(values.t())
    return values if values.stride(1) == 1 else values.contiguous()


def widen(values: Tensor) -> Tensor:
    """8-bit values in float32, exactly; in new memory."""
    if not is_cpu(values):
        return values.float()
    if is_turned(values):
        return widen(values.transpose(-2, -1)).transpose(-2, -1)
    # The CPU's conversion takes up to ten times as long as float16's, which has the bits of either format in it: e5m2
    # is its first byte.
    bits = values.contiguous().view(torch.int8).to(torch.int16)
    if values.dtype == E5M2:
        return bits.mul_(256).view(torch.float16).float()
    # e4m3 has one bit of exponent less, and a bias smaller by 8: behind the sign goes a 0, or a 1 to NaN (all ones).
    # Bit 7, a copy of the sign, is what this exchanges.
    bits.bitwise_xor_((bits + 1).bitwise_and_(0x80))
    return bits.mul_(128).view(torch.float16).float().mul_(256.0)
