# SPDX-License-Identifier: Apache-2.0
"""Rotary positions on the packed projection of queries, keys and values, or on heads that a norm has made, one kernel
each way; the formulas are in megatron/core/transformer/rotary.py.

A line is one head of one token. Forward reads queries and keys once and writes each where attention takes it; backward
reads the three gradients where attention left them and writes the packed one. A program takes several lines, so that
heads of any width fill its threads.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels import launching
from megatron.core.kernels.launching import choose_block

_PAIRS = 2048  # of channels, for each program


@triton.jit
def _load_pairs(
    start, mask, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr
):
    """Both channels of each pair, in float32; start: pointers to the lines [LINES, 1]."""
    if INTERLEAVED:
        columns = tl.arange(0, 2 * BLOCK)[None, :]
        both = tl.load(start + columns, mask=mask & (columns < ROTATED), other=0.0).to(tl.float32)
        x1, x2 = tl.split(tl.reshape(both, (LINES, BLOCK, 2)))
    else:
        columns = tl.arange(0, BLOCK)[None, :]
        mask = mask & (columns < ROTATED // 2)
        x1 = tl.load(start + columns, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(start + ROTATED // 2 + columns, mask=mask, other=0.0).to(tl.float32)
    return x1, x2


@triton.jit
def _store_pairs(
    start, y1, y2, mask,
    ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if INTERLEAVED:
        columns = tl.arange(0, 2 * BLOCK)[None, :]
        both = tl.reshape(tl.join(y1, y2), (LINES, 2 * BLOCK))
        tl.store(start + columns, both, mask=mask & (columns < ROTATED))
    else:
        columns = tl.arange(0, BLOCK)[None, :]
        mask = mask & (columns < ROTATED // 2)
        tl.store(start + columns, y1, mask=mask)
        tl.store(start + ROTATED // 2 + columns, y2, mask=mask)


@triton.jit
def _load_angles(cos, sin, position, mask, ROTATED: tl.constexpr, BLOCK: tl.constexpr):
    """Cosines and sines of each line's position; of no rotation for lines outside of the mask."""
    columns = tl.arange(0, BLOCK)[None, :]
    places = position * (ROTATED // 2) + columns
    mask = mask & (columns < ROTATED // 2)
    return tl.load(cos + places, mask=mask, other=1.0), tl.load(sin + places, mask=mask, other=0.0)


@triton.jit
def rotary_forward(
    packed, query, cos, sin, lines, groups,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    LINES: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    # Of each group the query heads, then its key; `groups` of them at each position.
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)[:, None]
    row = line // (HEADS + 1)
    head = line % (HEADS + 1)
    inside = line < lines
    source = packed + row * ((HEADS + 2) * WIDTH) + head * WIDTH
    x1, x2 = _load_pairs(source, inside, ROTATED, INTERLEAVED, LINES, BLOCK)
    c, s = _load_angles(cos, sin, row // groups, inside, ROTATED, BLOCK)
    y1 = x1 * c - x2 * s
    y2 = x2 * c + x1 * s
    if query is None:
        _store_pairs(source, y1, y2, inside, ROTATED, INTERLEAVED, LINES, BLOCK)
    else:
        is_query = inside & (head < HEADS)
        target = query + (row * HEADS + head) * WIDTH
        _store_pairs(source, y1, y2, inside & (head == HEADS), ROTATED, INTERLEAVED, LINES, BLOCK)
        _store_pairs(target, y1, y2, is_query, ROTATED, INTERLEAVED, LINES, BLOCK)
        if ROTATED < WIDTH:
            columns = ROTATED + tl.arange(0, REST)[None, :]
            mask = is_query & (columns < WIDTH)
            tl.store(target + columns, tl.load(source + columns, mask=mask, other=0.0), mask=mask)


@triton.jit
def _load_one(query, key, value, is_query, is_key, is_value, columns, STOP: tl.constexpr):
    """Columns below STOP of each line, from the one of the three that has it; loads outside of a mask do not happen."""
    found = tl.load(value + columns, mask=is_value & (columns < STOP), other=0.0)
    found = tl.load(key + columns, mask=is_key & (columns < STOP), other=found)
    return tl.load(query + columns, mask=is_query & (columns < STOP), other=found)


@triton.jit
def rotary_backward(
    packed, query, key, value, cos, sin, lines, batch, groups,
    query_s, query_b, query_n, key_s, key_b, key_n, value_s, value_b, value_n,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    LINES: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)[:, None]
    row = line // (HEADS + 2)
    head = line % (HEADS + 2)
    group = row % groups
    sequence = row // groups % batch
    position = row // groups // batch
    inside = line < lines
    is_query = inside & (head < HEADS)
    is_key = inside & (head == HEADS)
    is_value = inside & (head == HEADS + 1)
    query += position * query_s + sequence * query_b + (group * HEADS + head) * query_n
    key += position * key_s + sequence * key_b + group * key_n
    value += position * value_s + sequence * value_b + group * value_n
    if INTERLEAVED:
        columns = tl.arange(0, 2 * BLOCK)[None, :]
        both = _load_one(query, key, value, is_query, is_key, is_value, columns, ROTATED).to(tl.float32)
        g1, g2 = tl.split(tl.reshape(both, (LINES, BLOCK, 2)))
    else:
        columns = tl.arange(0, BLOCK)[None, :]
        g1 = _load_one(query, key, value, is_query, is_key, is_value, columns, ROTATED // 2).to(tl.float32)
        columns += ROTATED // 2
        g2 = _load_one(query, key, value, is_query, is_key, is_value, columns, ROTATED).to(tl.float32)
    c, s = _load_angles(cos, sin, position, is_query | is_key, ROTATED, BLOCK)
    target = packed + line * WIDTH
    _store_pairs(target, g1 * c + g2 * s, g2 * c - g1 * s, inside, ROTATED, INTERLEAVED, LINES, BLOCK)
    if ROTATED < WIDTH:
        columns = ROTATED + tl.arange(0, REST)[None, :]
        copied = _load_one(query, key, value, is_query, is_key, is_value, columns, WIDTH)
        tl.store(target + columns, copied, mask=inside & (columns < WIDTH))


@triton.jit
def rotary_heads(
    x, y, cos, sin, lines, lines_each,
    WIDTH: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, BACK: tl.constexpr,
    LINES: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    # So many lines at each position.
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)[:, None]
    inside = line < lines
    x1, x2 = _load_pairs(x + line * WIDTH, inside, ROTATED, INTERLEAVED, LINES, BLOCK)
    c, s = _load_angles(cos, sin, line // lines_each, inside, ROTATED, BLOCK)
    if BACK:
        s = -s
    target = y + line * WIDTH
    _store_pairs(target, x1 * c - x2 * s, x2 * c + x1 * s, inside, ROTATED, INTERLEAVED, LINES, BLOCK)
    if ROTATED < WIDTH:
        columns = ROTATED + tl.arange(0, REST)[None, :]
        mask = inside & (columns < WIDTH)
        tl.store(target + columns, tl.load(x + line * WIDTH + columns, mask=mask, other=0.0), mask=mask)


def _constants(heads: int, width: int, rotated: int, interleaved: bool) -> dict[str, Any]:
    block = choose_block(rotated // 2, 1 << 30)
    rest = choose_block(width - rotated, 1 << 30)
    return {
        "HEADS": heads, "WIDTH": width, "ROTATED": rotated, "INTERLEAVED": interleaved, "BLOCK": block, "REST": rest,
        "LINES": max(1, _PAIRS // max(block, rest)),
    }  # fmt: skip


class Angles(Protocol):
    """Angles of positions for the kernels; it has the fields of megatron.core.transformer.rotary.Rotation."""

    @property
    def cos(self) -> Tensor:
        """[s, rotated / 2] float32."""

    @property
    def sin(self) -> Tensor:
        """[s, rotated / 2] float32."""

    @property
    def interleaved(self) -> bool:
        """True where neighbouring channels are a pair, False where the halves are."""


def rotate_heads(x: Tensor, rotation: Angles) -> Tensor:
    """Rotate x [s, ..., d], contiguous, into new memory; nothing is saved for backward."""
    result: Tensor = _RotateHeads.apply(x, rotation)
    return result


def split_and_rotate(packed: Tensor, heads_per_group: int, rotation: Angles) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [s, b, heads, d], keys and values [s, b, groups, d] of packed [s, b, groups, heads_per_group + 2, d].

    Keys, and queries where a group has one head, are rotated in packed's memory, of which they and values are views.
    """
    result: tuple[Tensor, Tensor, Tensor] = _SplitByKernel.apply(packed, heads_per_group, rotation)
    return result


class _RotateHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rotation: Angles) -> Tensor:
        ctx.angles = rotation.cos, rotation.sin, rotation.interleaved
        return _rotate_heads(x, *ctx.angles)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _rotate_heads(grad.contiguous(), *ctx.angles, back=True), None


class _SplitByKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, heads_per_group: int, rotation: Angles) -> tuple[Tensor, Tensor, Tensor]:
        ctx.heads_per_group, ctx.rotation = heads_per_group, rotation
        # Rotated in place although autograd knows the tensor: a matrix product does not keep its output for backward.
        packed = packed.detach()
        positions, batch, groups, _, width = packed.shape
        in_place = heads_per_group == 1
        query = None if in_place else packed.new_empty(positions, batch, groups * heads_per_group, width)
        constants = _constants(heads_per_group, width, 2 * rotation.cos.shape[-1], rotation.interleaved)
        lines = positions * batch * groups * (heads_per_group + 1)
        launching.launch(
            rotary_forward, (triton.cdiv(lines, constants["LINES"]),), packed, query, rotation.cos.contiguous(),
            rotation.sin.contiguous(), lines, batch * groups, **constants,
        )  # fmt: skip
        torch.autograd.graph.increment_version(packed)
        return packed[..., 0, :] if query is None else query, packed[..., -2, :], packed[..., -1, :]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # The gradients of query, key and value may lie in any order; the packed one is made of them.
        parts = [part if part.stride(-1) == 1 else part.contiguous() for part in grads]
        positions, batch, groups, width = parts[1].shape
        rotation, heads = ctx.rotation, ctx.heads_per_group
        packed = parts[1].new_empty(positions, batch, groups, heads + 2, width)
        constants = _constants(heads, width, 2 * rotation.cos.shape[-1], rotation.interleaved)
        lines = positions * batch * groups * (heads + 2)
        strides = [stride for part in parts for stride in part.stride()[:3]]
        launching.launch(
            rotary_backward, (triton.cdiv(lines, constants["LINES"]),), packed, *parts, rotation.cos.contiguous(),
            rotation.sin.contiguous(), lines, batch, groups, *strides, **constants,
        )  # fmt: skip
        return packed, None, None


def _rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, back: bool = False) -> Tensor:
    """Rotate x [s, ..., d], contiguous, into new memory; back: by the opposite angle."""
    y = torch.empty_like(x)
    constants = _constants(1, x.shape[-1], 2 * cos.shape[-1], interleaved) | {"BACK": back}
    del constants["HEADS"]
    lines = x.numel() // x.shape[-1]
    launching.launch(
        rotary_heads, (triton.cdiv(lines, constants["LINES"]),), x, y, cos.contiguous(), sin.contiguous(), lines,
        lines // x.shape[0], **constants,
    )  # fmt: skip
    return y
