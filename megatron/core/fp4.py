# SPDX-License-Identifier: Apache-2.0
"""Matrices in 4-bit floating point: NVFP4, on any device.

    x ~ value * block scale * tensor scale      E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
                                                E4M3, one for each 16 values along the sum, of weights for 16 x 16
                                                float32, one for the matrix: amax / (6 * 448)

A block's scale is its amax / 6, in units of the tensor scale, rounded to E4M3. What is divided by both is rounded to
the nearest E2M1 value, to even between two, and what is greater than 6 becomes 6. Output gradients are rounded at
random instead, up as often as down so that the mean is right; the operands of weight gradients are turned before by a
random Hadamard transform over 16 tokens, which spreads outliers and cancels in their product.

Source: NVIDIA, "Pretraining Large Language Models with NVFP4", 2025 (arXiv 2509.25149), sections 3 and 4, appendix C.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.fp8 import (
    E4M3,
    Operand,
    find_amax,
    find_block_amax,
    is_turned,
    join_blocks,
    split_into_blocks,
    spread_over_blocks,
    widen,
)

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
    # The step between neighbours is half of the power of two below a value, of 1 for values below that.
    power = x.abs().clamp_(1.0, LARGEST)
    power.view(torch.int32).bitwise_and_(0x7F800000)
    # Values become whole numbers of steps, of which those with an even code are even. 0x7F800000 minus the bits of 2^n
    # gives the bits of 2^(1 - n).
    per_step = (0x7F800000 - power.view(torch.int32)).view(torch.float32)
    step = power.mul_(0.5)
    if fractions is None:
        return x.clamp(-LARGEST, LARGEST).mul_(per_step).round_().mul_(step)
    steps = x.abs().clamp_(max=LARGEST).mul_(per_step).add_(fractions).floor_()
    return steps.mul_(step).copysign_(x)


def quantise_nvfp4(x: Tensor, block: tuple[int, int], *, at_random: bool = False) -> Operand:
    """A matrix [rows, columns], or a stack of them, in NVFP4 with a scale for each block of rows and columns.

    The E2M1 values are kept in E4M3, which has all of them. at_random: see round_to_e2m1; what is added is a function
    only of place and amax, so that a step that is repeated gives the same numbers.
    """
    turned = is_turned(x)
    x, block = (x.transpose(-2, -1), (block[1], block[0])) if turned else (x, block)
    amax = find_amax(x)
    # Where nothing, or nothing finite, was found, the scale is 1; of values too small for it, the largest there is.
    largest = torch.full_like(amax, LARGEST * torch.finfo(E4M3).max)
    scale = torch.where((amax > 0) & amax.isfinite(), largest / amax, torch.ones_like(amax))
    factor = 1.0 / scale.clamp(max=torch.finfo(torch.float32).max)
    blocks = split_into_blocks(x, block)  # [..., rows / block, block rows, columns / block, block columns]
    of_blocks = find_block_amax(blocks)
    # Infinities are cut off, NaN must stay: their block's scale is NaN.
    stored = widen((of_blocks / LARGEST / factor).clamp_(max=torch.finfo(E4M3).max).to(E4M3))
    # The inverse of a tiny block scale is beyond float32, and infinity would make NaN of the zeros in its block.
    encode = (1.0 / (stored * factor)).clamp_(max=torch.finfo(torch.float32).max)
    encode = torch.where(stored == 0, torch.zeros_like(stored), encode)
    fractions = _draw_fractions(blocks, amax, turned=turned) if at_random else None
    encode = spread_over_blocks(encode)
    scaled = blocks * encode if blocks.dtype == torch.float32 else blocks.float().mul_(encode)
    rounded = Operand(join_blocks(round_to_e2m1(scaled, fractions).to(E4M3), x.shape), stored, block, factor)
    return rounded.transposed if turned else rounded


def _draw_fractions(blocks: Tensor, seed: Tensor, *, turned: bool = False) -> Tensor:
    """Numbers in [0, 1) for every place of [..., rows, block rows, columns, block columns], from a seed: a float32
    scalar on its device. turned: the same place has the same number as in the transpose of the matrix."""
    dims = range(blocks.dim())
    order = [*dims[:-4], *dims[-2:], *dims[-4:-2]] if turned else [*dims]
    *outer, length = (blocks.shape[dim] for dim in order)
    mixed = seed.view(torch.int32)
    for size in outer:
        mixed = _mix(mixed.unsqueeze(-1) ^ torch.arange(size, dtype=torch.int32, device=blocks.device))
    places = torch.arange(length, dtype=torch.int32, device=blocks.device)
    if not turned:
        bits = mixed.unsqueeze(-1) ^ places
    else:
        # In the order in memory of what they are added to; exchanged twice, dimensions are where they were.
        bits = mixed.unsqueeze(-1).permute(order).contiguous() ^ places.view(-1, 1, 1)
    return _mix(bits).bitwise_and_(0xFFFFFF).float().mul_(2.0**-24)


def _mix(bits: Tensor) -> Tensor:
    """Change, in place, half of the bits of int32 numbers for any bit that changes (the last steps of MurmurHash3)."""
    # The shifts of signed numbers fill with the sign, which the masks take away; products keep their last 32 bits.
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(0x85EBCA6B - 2**32)
    bits.bitwise_xor_((bits >> 13).bitwise_and_(0x7FFFF)).mul_(0xC2B2AE35 - 2**32)
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))


def transform(x: Tensor) -> Tensor:
    """The random Hadamard transform of each 16 values of the last dimension, in float32; zeros fill the last 16.

    It is orthogonal: a product over that dimension is the same after both operands are transformed.
    """
    if is_turned(x):
        return _transform_rows(x.transpose(-2, -1)).transpose(-2, -1)
    # Along the rows, sums are over full vectors.
    return _transform_rows(x.transpose(-2, -1).contiguous()).transpose(-2, -1)


def _transform_rows(x: Tensor) -> Tensor:
    """[..., n, columns] transformed over n."""
    signs = torch.tensor(_SIGNS, dtype=torch.float32, device=x.device).unsqueeze(-1)
    missing = -x.shape[-2] % BLOCK
    parts = (F.pad(x, (0, 0, 0, missing)) if missing else x).float().unflatten(-2, (-1, BLOCK)) * signs
    results = torch.empty_like(parts)
    # Sums and differences of pairs, four times over: the same sums on every device, which a matrix product is not.
    for width in (1, 2, 4, 8):
        (left, right), (total, difference) = (
            tensor.unflatten(-2, (-1, 2, width)).unbind(-3) for tensor in (parts, results)
        )
        torch.add(left, right, out=total)
        torch.sub(left, right, out=difference)
        parts, results = results, parts
    return parts.flatten(-3, -2).mul_(BLOCK**-0.5)


# ---- in bytes


def pack(operand: Operand) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors to keep of an operand in NVFP4 [rows, columns]: two values in a byte, block scales in E4M3, and the
    tensor scale."""
    assert operand.factor is not None, "no operand in NVFP4"
    # Two bytes at a time. E4M3 has the exponent bias 7 and E2M1 the bias 1, so that from 1 on the lowest bit of the
    # code is bit 2 of the byte, the next one bit 3, the third bit 6; 0.5 is 0x30. The sign is bit 7.
    bits = operand.values.contiguous().view(torch.int16)
    half = (bits >> 5).bitwise_and_((bits >> 3).bitwise_not_()).bitwise_and_(0x0101)
    codes = (bits >> 2).bitwise_and_(0x0303).bitwise_or_((bits >> 4).bitwise_and_(0x0C0C)).bitwise_or_(half)
    packed = (codes | (codes >> 4)).bitwise_and_(0xFF).to(torch.uint8)
    return packed, operand.inverse.to(E4M3), operand.factor


def unpack(kept: tuple[Tensor, ...], block: tuple[int, int]) -> Operand:
    """The operand that `pack` made tensors of. A block's NaN are found in its scale."""
    packed, scales, factor = kept
    # The two values of every byte that there is.
    of_bytes = torch.arange(256, dtype=torch.uint8, device=packed.device)
    of_codes = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=packed.device).to(E4M3).view(torch.uint8)
    pairs = of_codes[torch.stack((of_bytes & 15, of_bytes >> 4), dim=-1).int()].view(torch.int16).flatten()
    values = pairs.index_select(0, packed.flatten().int()).view(packed.shape).view(E4M3)
    return Operand(values, widen(scales), block, factor)
