# SPDX-License-Identifier: Apache-2.0
"""Weight gradients of all experts, G_e += dY_e^T X_e, summed and added in float32: grouped_mm rounds each microbatch's
to 16 bits and needs memory for them in addition to the gradients.

A program computes one tile of one expert's gradient. How many rows an expert has is read on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels import launching
from megatron.core.kernels.launching import choose_block

_TILE, _ROWS = (128, 128), 64
"""Outputs and inputs of a tile, and rows that are multiplied at a time."""
_WARPS = 8


@triton.jit
def add_expert_weight_grads(
    grads, x, ends, main_grads,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr, TILE_INPUTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    expert = tl.program_id(1).to(tl.int64)
    in_a_row: tl.constexpr = (INPUTS + TILE_INPUTS - 1) // TILE_INPUTS
    outputs = tile // in_a_row * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    inputs = tile % in_a_row * TILE_INPUTS + tl.arange(0, TILE_INPUTS)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    stop = tl.load(ends + expert)
    total = tl.zeros((TILE_OUTPUTS, TILE_INPUTS), dtype=tl.float32)
    for first in range(start, stop, ROWS):
        rows = (first + tl.arange(0, ROWS)).to(tl.int64)
        is_row = (rows < stop)[:, None]
        of_grads = grads + rows[:, None] * OUTPUTS + outputs[None, :]
        of_x = x + rows[:, None] * INPUTS + inputs[None, :]
        left = tl.load(of_grads, mask=is_row & (outputs < OUTPUTS)[None, :], other=0.0)
        right = tl.load(of_x, mask=is_row & (inputs < INPUTS)[None, :], other=0.0)
        total = tl.dot(tl.trans(left), right, total)
    places = main_grads + expert * (OUTPUTS * INPUTS) + outputs[:, None].to(tl.int64) * INPUTS + inputs[None, :]
    # Nothing is written for an expert that no token chose.
    if stop > start:
        mask = (outputs < OUTPUTS)[:, None] & (inputs < INPUTS)[None, :]
        tl.store(places, tl.load(places, mask=mask, other=0.0) + total, mask=mask)


def add_weight_grads(grad: Tensor, x: Tensor, ends: Tensor, main_grad: Tensor) -> None:
    """main_grad [experts, out, in] += the experts' products of output gradients [n, out] and inputs [n, in].

    ends: int32 [experts], where each expert's rows end.
    """
    experts, outputs, inputs = main_grad.shape
    tile_outputs, tile_inputs = choose_block(outputs, _TILE[0]), choose_block(inputs, _TILE[1])
    tiles = triton.cdiv(outputs, tile_outputs) * triton.cdiv(inputs, tile_inputs)
    launching.launch(
        add_expert_weight_grads, (tiles, experts), grad, x, ends, main_grad, num_warps=_WARPS,
        OUTPUTS=outputs, INPUTS=inputs, TILE_OUTPUTS=tile_outputs, TILE_INPUTS=tile_inputs, ROWS=_ROWS,
    )  # fmt: skip
