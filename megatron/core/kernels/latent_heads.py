# SPDX-License-Identifier: Apache-2.0
"""Queries, keys and values of latent attention put together, one kernel each way; the definition is
`join_latent_heads` in megatron/core/transformer/rotary.py.

A head has d plain channels, which follow only from the latent vector, and after them p channels with the position; for
keys they are computed once for each token, and all n heads share them.

    query     [s, b, n, d + p]     plain | position           the position is rotated in place
    expanded  [s, b, n, d + dv]    plain of key | value       divided
    positions [s, b, 1, p]         position of all keys       rotated, and copied to each head

    key       [s, b, n, d + p]     plain of expanded | rotated positions
    value     [s, b, n, dv]

Backward goes the same way back: the rotation's gradient is the rotation by the opposite angle, and the gradient of
`positions` the sum over the heads. In the kernels PLAIN is d, SHARED is p and VALUE is dv; each is padded to a block, a
power of two (PLAIN_BLOCK, VALUE_BLOCK; PAIRS is p / 2 padded, because channels are rotated in pairs).

The grid has a program for each token, s * b of them. It takes all heads of its token, LINES at a time, so that the sum
over the heads stays inside of it: float32, and the same every time. Everything is read once and written once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels import launching
from megatron.core.kernels.launching import choose_block
from megatron.core.kernels.rotary import Angles, _load_angles, _load_pairs, _store_pairs

_CHANNELS = 2048  # of the widest block: so many lines, each one head, are a tile


@triton.jit
def _copy(source, target, inside, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """COUNT channels of each line from one place to another; source, target: pointers to the lines [LINES, 1]."""
    columns = tl.arange(0, BLOCK)[None, :]
    mask = inside & (columns < COUNT)
    tl.store(target + columns, tl.load(source + columns, mask=mask, other=0.0), mask=mask)


@triton.jit
def join_heads(
    query, expanded, positions, key, value, cos, sin, batch, positions_s, positions_b,
    HEADS: tl.constexpr, PLAIN: tl.constexpr, SHARED: tl.constexpr, VALUE: tl.constexpr, INTERLEAVED: tl.constexpr,
    LINES: tl.constexpr, PLAIN_BLOCK: tl.constexpr, PAIRS: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place = token // batch
    every = tl.full((1, 1), 1, tl.int1)
    c, s = _load_angles(cos, sin, place, every, SHARED, PAIRS)
    # One line, which is a tile of one line: a part of a wider tensor, and of any strides.
    shared = positions + place * positions_s + (token % batch) * positions_b + tl.zeros((1, 1), tl.int64)
    k1, k2 = _load_pairs(shared, every, SHARED, INTERLEAVED, 1, PAIRS)
    k1, k2 = k1 * c - k2 * s, k2 * c + k1 * s
    for first in range(0, HEADS, LINES):
        head = first + tl.arange(0, LINES)[:, None]
        inside = head < HEADS
        line = token * HEADS + head
        own = query + line * (PLAIN + SHARED) + PLAIN
        q1, q2 = _load_pairs(own, inside, SHARED, INTERLEAVED, LINES, PAIRS)
        _store_pairs(own, q1 * c - q2 * s, q2 * c + q1 * s, inside, SHARED, INTERLEAVED, LINES, PAIRS)
        source = expanded + line * (PLAIN + VALUE)
        target = key + line * (PLAIN + SHARED)
        _copy(source, target, inside, PLAIN, PLAIN_BLOCK)
        _copy(source + PLAIN, value + line * VALUE, inside, VALUE, VALUE_BLOCK)
        # The same line for every head.
        zeros = tl.zeros((LINES, PAIRS), tl.float32)
        _store_pairs(target + PLAIN, k1 + zeros, k2 + zeros, inside, SHARED, INTERLEAVED, LINES, PAIRS)


@triton.jit
def separate_heads(
    grad_query, grad_key, grad_value, query, expanded, positions, cos, sin, batch,
    query_s, query_b, query_n, key_s, key_b, key_n, value_s, value_b, value_n,
    HEADS: tl.constexpr, PLAIN: tl.constexpr, SHARED: tl.constexpr, VALUE: tl.constexpr, INTERLEAVED: tl.constexpr,
    LINES: tl.constexpr, PLAIN_BLOCK: tl.constexpr, PAIRS: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place = token // batch
    sequence = token % batch
    every = tl.full((1, 1), 1, tl.int1)
    c, s = _load_angles(cos, sin, place, every, SHARED, PAIRS)
    # Attention's gradients come with any strides; what is written is contiguous.
    grad_query += place * query_s + sequence * query_b
    grad_key += place * key_s + sequence * key_b
    grad_value += place * value_s + sequence * value_b
    # Of the rotated key channels, for each place in the tile; added up at the end, and rotated back only then.
    total1 = tl.zeros((LINES, PAIRS), tl.float32)
    total2 = tl.zeros((LINES, PAIRS), tl.float32)
    for first in range(0, HEADS, LINES):
        head = first + tl.arange(0, LINES)[:, None].to(tl.int64)
        inside = head < HEADS
        line = token * HEADS + head
        source = grad_query + head * query_n
        target = query + line * (PLAIN + SHARED)
        _copy(source, target, inside, PLAIN, PLAIN_BLOCK)
        q1, q2 = _load_pairs(source + PLAIN, inside, SHARED, INTERLEAVED, LINES, PAIRS)
        _store_pairs(target + PLAIN, q1 * c + q2 * s, q2 * c - q1 * s, inside, SHARED, INTERLEAVED, LINES, PAIRS)
        source = grad_key + head * key_n
        target = expanded + line * (PLAIN + VALUE)
        _copy(source, target, inside, PLAIN, PLAIN_BLOCK)
        _copy(grad_value + head * value_n, target + PLAIN, inside, VALUE, VALUE_BLOCK)
        k1, k2 = _load_pairs(source + PLAIN, inside, SHARED, INTERLEAVED, LINES, PAIRS)
        total1 += k1
        total2 += k2
    k1 = tl.sum(total1, axis=0, keep_dims=True)
    k2 = tl.sum(total2, axis=0, keep_dims=True)
    target = positions + token * SHARED + tl.zeros((1, 1), tl.int64)
    _store_pairs(target, k1 * c + k2 * s, k2 * c - k1 * s, every, SHARED, INTERLEAVED, 1, PAIRS)


def _constants(heads: int, plain: int, shared: int, value: int, interleaved: bool) -> dict[str, Any]:
    """Of both kernels. shared: p."""
    blocks = [choose_block(count, 1 << 30) for count in (plain, shared // 2, value)]
    lines = min(choose_block(heads, 1 << 30), max(1, _CHANNELS // max(blocks)))
    return {
        "HEADS": heads, "PLAIN": plain, "SHARED": shared, "VALUE": value, "INTERLEAVED": interleaved, "LINES": lines,
        "PLAIN_BLOCK": blocks[0], "PAIRS": blocks[1], "VALUE_BLOCK": blocks[2],
    }  # fmt: skip


def rotate_and_join(
    query: Tensor, expanded: Tensor, positions: Tensor, rotation: Angles
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query [s, b, n, d + p], whose last p channels are rotated in place, keys [s, b, n, d + p] and values
    [s, b, n, dv]; expanded [s, b, n, d + dv], positions [s, b, 1, p]."""
    result: tuple[Tensor, Tensor, Tensor] = _RotateByKernel.apply(query, expanded, positions, rotation)
    return result


class _RotateByKernel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, expanded: Tensor, positions: Tensor, rotation: Angles
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.shared, ctx.rotation = positions.shape[-1], rotation
        # Rotated in place although autograd knows the tensor: a matrix product does not keep its output for backward.
        query = query.detach()
        positions = positions if positions.stride(-1) == 1 else positions.contiguous()
        length, batch, heads, width = query.shape
        plain = width - positions.shape[-1]
        key = torch.empty_like(query)
        value = query.new_empty(length, batch, heads, expanded.shape[-1] - plain)
        launching.launch(
            join_heads, (length * batch,), query, expanded, positions, key, value, rotation.cos.contiguous(),
            rotation.sin.contiguous(), batch, *positions.stride()[:2],
            **_constants(heads, plain, positions.shape[-1], value.shape[-1], rotation.interleaved),
        )  # fmt: skip
        torch.autograd.graph.increment_version(query)
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # The gradients of query, key and value may have any strides.
        parts = [part if part.stride(-1) == 1 else part.contiguous() for part in grads]
        query, value = grads[0], grads[2]
        length, batch, heads, width = query.shape
        rotation, plain = ctx.rotation, width - ctx.shared
        grad_query = query.new_empty(query.shape)
        grad_expanded = query.new_empty(length, batch, heads, plain + value.shape[-1])
        grad_positions = query.new_empty(length, batch, 1, ctx.shared)
        launching.launch(
            separate_heads, (length * batch,), *parts, grad_query, grad_expanded, grad_positions,
            rotation.cos.contiguous(), rotation.sin.contiguous(), batch,
            *(stride for part in parts for stride in part.stride()[:3]),
            **_constants(heads, plain, ctx.shared, value.shape[-1], rotation.interleaved),
        )  # fmt: skip
        return grad_query, grad_expanded, grad_positions, None
