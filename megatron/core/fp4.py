# SPDX-License-Identifier: Apache-2.0
"""Matrices in 4-bit floating point: NVFP4, on any device.

    x ~ value * block scale * tensor scale      E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
                                                E4M3, one for each 16 values along the sum, of weights for 16 x 16
                                                float32, one for the matrix: amax / (6 * 448)

A block's scale is its own amax / 6, in units of the tensor scale, rounded to E4M3. What is divided by both is rounded
to the nearest E2M1 value, to even between two, and what is greater than 6 becomes 6. Output gradients are rounded at
random instead, up as often as down so that the mean is right; the operands of weight gradients are turned before by a
random Hadamard transform over 16 tokens, which spreads outliers and cancels in their product.

Source: NVIDIA, "Pretraining Large Language Models with NVFP4", 2025 (arXiv 2509.25149), sections 3 and 4, appendix C.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.fp8 import E4M3, Operand, find_amax, split_into_blocks

BLOCK = 16
"""Values along the sum that share a scale; tokens that are transformed together."""
LARGEST = 6.0
_SIGNS = (1, 1, -1, 1, -1, -1, 1, 1, 1, -1, 1, -1, -1, -1, 1, -1)
"""Of the 16 tokens before their transform: drawn once, and the same for both operands and in every step."""
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def round_to_e2m1(x: Tensor, fractions: Tensor | None = None) -> Tensor:
    """The nearest E2M1 values, to even between two, in float32; beyond 6 it is 6, infinity too. NaN stays NaN.

    fractions: in [0, 1), shaped as x; with them a value is rounded up where its distance to the lower neighbour, in
    steps, and its fraction make 1 together: at random, where fractions are.
    """
    size = x.abs().clamp_(max=LARGEST)
    # Steps between neighbours, so that values are whole numbers of steps: even ones are those with an even last bit.
    half, one = torch.full_like(size, 0.5), torch.ones_like(size)
    step = torch.where(size < 2, half, torch.where(size < 4, one, 2 * one))
    steps = size / step
    rounded = steps.round() if fractions is None else (steps + fractions).floor_()
    return torch.copysign(rounded.mul_(step), x)


def quantise_nvfp4(x: Tensor, block: tuple[int, int], *, at_random: bool = False) -> Operand:
    """A matrix [rows, columns], or a stack of them, in NVFP4 with a scale for each block of rows and columns.

    The E2M1 values are kept in E4M3, which has all of them. at_random: see round_to_e2m1; what is added is a function
    of place and amax alone, so that a step that is repeated gives the same numbers.
    """
    amax = find_amax(x)
    # Where nothing, or nothing finite, was found, the scale is 1; of values too small for it, the largest there is.
    largest = torch.full_like(amax, LARGEST * torch.finfo(E4M3).max)
    scale = torch.where((amax > 0) & amax.isfinite(), largest / amax, torch.ones_like(amax))
    factor = 1.0 / scale.clamp(max=torch.finfo(torch.float32).max)
    blocks = split_into_blocks(x.float(), block)  # [..., rows / block, block rows, columns / block, block columns]
    of_blocks = blocks.abs().amax((-3, -1)) if blocks.numel() else blocks.sum((-3, -1))
    # Infinities are cut off, NaN must stay: their block's scale is NaN.
    stored = (of_blocks / LARGEST / factor).clamp_(max=torch.finfo(E4M3).max).to(E4M3).float()
    encode = torch.where(stored == 0, torch.zeros_like(stored), 1.0 / (stored * factor))
    fractions = _draw_fractions(blocks, amax) if at_random else None
    values = round_to_e2m1(blocks.mul_(encode.unsqueeze(-1).unsqueeze(-3)), fractions).to(E4M3)
    values = values.flatten(-4, -3).flatten(-2)[..., : x.shape[-2], : x.shape[-1]]
    return Operand(values, stored, block, factor)


def _draw_fractions(like: Tensor, seed: Tensor) -> Tensor:
    """Numbers in [0, 1) for every place of a tensor, from a seed: a float32 scalar on its device."""
    mixed = seed.view(torch.int32)
    for length in like.shape:
        place = torch.arange(length, dtype=torch.int32, device=like.device)
        mixed = _mix(mixed.unsqueeze(-1) ^ place)
    return (mixed & 0xFFFFFF).float().mul_(2.0**-24)


def _mix(bits: Tensor) -> Tensor:
    """Change half of the bits of int32 numbers for any bit that changes (the last steps of MurmurHash3)."""
    # The shifts of signed numbers fill with the sign, which the masks take away; products keep their last 32 bits.
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * (0x85EBCA6B - 2**32)
    bits = (bits ^ ((bits >> 13) & 0x7FFFF)) * (0xC2B2AE35 - 2**32)
    return bits ^ ((bits >> 16) & 0xFFFF)


def transform(x: Tensor) -> Tensor:
    """The random Hadamard transform of each 16 values of the last dimension, in float32; zeros fill the last 16.

    It is orthogonal: a product over that dimension is the same after both operands are transformed.
    """
    missing = -x.shape[-1] % BLOCK
    parts = F.pad(x.float(), (0, missing)).unflatten(-1, (-1, BLOCK))
    parts = parts * torch.tensor(_SIGNS, dtype=torch.float32, device=x.device)
    # Sums and differences of pairs, four times over: the same sums on every device, which a matrix product is not.
    for width in (1, 2, 4, 8):
        left, right = parts.unflatten(-1, (-1, 2, width)).unbind(-2)
        parts = torch.stack((left + right, left - right), dim=-2).flatten(-3)
    return parts.flatten(-2).mul_(BLOCK**-0.5)


# ---- in bytes


def pack(operand: Operand) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors to keep of an operand in NVFP4 [rows, columns]: two values in a byte, block scales in E4M3, and the
    tensor scale."""
    assert operand.factor is not None, "no operand in NVFP4"
    bits = operand.values.view(torch.uint8)
    # E4M3 has the exponent bias 7 and E2M1 the bias 1: the same bits from 1 on, 6 exponents apart.
    size = bits & 0x7F
    code = torch.where(size >= 0x38, ((size - 0x30) >> 2) & 7, (size == 0x30).to(torch.uint8))
    code = code | ((bits >> 4) & 8)
    return code[..., 0::2] | (code[..., 1::2] << 4), operand.inverse.to(E4M3), operand.factor


def unpack(kept: tuple[Tensor, ...], block: tuple[int, int]) -> Operand:
    """The operand that `pack` made tensors of. A block's NaN are found in its scale."""
    packed, scales, factor = kept
    code = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    table = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=packed.device).to(E4M3)
    values = table.view(torch.uint8)[code.int()].view(E4M3)
    return Operand(values, scales.float(), block, factor)
