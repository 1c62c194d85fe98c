# SPDX-License-Identifier: Apache-2.0
"""A weight gradient in 8 bits, G += dY^T X, summed and added in float32 where it lies: torch's product would write one
in float32 first, four times as large as the weight in 8 bits, which another kernel would add.

A program computes one tile. Tensor cores sum 128 tokens at a time in their own way, and those sums are added in
float32, as cuBLAS does without fast accumulation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels import launching
from megatron.core.kernels.launching import choose_block

_TILE, _TOKENS = 128, 128
"""Outputs or inputs of a tile, and tokens that are multiplied at a time."""
_WARPS = 8
_GROUP = 8
"""Rows of tiles that are computed together, so that they find each other's operands in the cache."""


@triton.jit
def add_weight_grad(
    grads, x, inverse_of_grads, inverse_of_x, main_grad, outputs, inputs, tokens, grads_stride, x_stride,
    TILE_OUTPUTS: tl.constexpr, TILE_INPUTS: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(outputs, TILE_OUTPUTS), tl.cdiv(inputs, TILE_INPUTS)
    first_row = tl.program_id(0) // (GROUP * across) * GROUP
    within, height = tl.program_id(0) % (GROUP * across), min(down - first_row, GROUP)
    output = (first_row + within % height).to(tl.int64) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    input = (within // height).to(tl.int64) * TILE_INPUTS + tl.arange(0, TILE_INPUTS)
    total = tl.zeros((TILE_OUTPUTS, TILE_INPUTS), dtype=tl.float32)
    for start in range(0, tokens, TOKENS):
        token = start + tl.arange(0, TOKENS)
        is_left = (output[:, None] < outputs) & (token[None, :] < tokens)
        is_right = (input[:, None] < inputs) & (token[None, :] < tokens)
        left = tl.load(grads + output[:, None] * grads_stride + token[None, :], mask=is_left, other=0.0)
        right = tl.load(x + input[:, None] * x_stride + token[None, :], mask=is_right, other=0.0)
        total = tl.dot(left, tl.trans(right), total, max_num_imprecise_acc=TOKENS)
    total = total * (tl.load(inverse_of_grads) * tl.load(inverse_of_x))
    places = main_grad + output[:, None] * inputs + input[None, :]
    mask = (output[:, None] < outputs) & (input[None, :] < inputs)
    tl.store(places, tl.load(places, mask=mask, other=0.0) + total, mask=mask)


def add_product(left: Tensor, right: Tensor, inverse: tuple[Tensor, Tensor], into: Tensor) -> None:
    """into [out, in], float32, += the product of 8-bit values [out, tokens] and [in, tokens], each row in one piece,
    times both of `inverse`, float32 scalars."""
    (outputs, tokens), inputs = left.shape, right.shape[0]
    tile_outputs, tile_inputs = choose_block(outputs, _TILE), choose_block(inputs, _TILE)
    tiles = triton.cdiv(outputs, tile_outputs) * triton.cdiv(inputs, tile_inputs)
    assert left.stride(1) == right.stride(1) == 1 and into.is_contiguous() and into.dtype == torch.float32
    launching.launch(
        add_weight_grad, (tiles,), left, right, *inverse, into, outputs, inputs, tokens, left.stride(0),
        right.stride(0), num_warps=_WARPS, TILE_OUTPUTS=tile_outputs, TILE_INPUTS=tile_inputs,
        TOKENS=_TOKENS, GROUP=_GROUP,
    )  # fmt: skip
