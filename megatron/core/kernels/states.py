# SPDX-License-Identifier: Apache-2.0
"""States of linear attention from chunk to chunk, in one kernel each way; megatron/core/ssm/state_passing.py has the
formulas.

A program takes one head and some columns of its state, which stay in registers from the first chunk to the last: it
reads and writes each chunk's tensors once. A state of more than 64 channels is two tensors, for a product of more at a
time would not find room. Products are made of three of TF32 each, with the digits of float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels import launching
from megatron.core.kernels.launching import choose_block

_COLUMNS = 32
"""Columns of a state in a program; half as many where it is two tensors."""
_BLOCK = 64
"""Channels of a product; a key has twice as many at most."""


@triton.jit
def _multiply(left, right):
    return tl.dot(left, right, input_precision="tf32x3")


@triton.jit
def _load_state(x, place, channels, columns, CHANNELS: tl.constexpr, WIDTH: tl.constexpr):
    inside = (channels < CHANNELS)[:, None] & (columns < WIDTH)[None, :]
    return tl.load(x + place * CHANNELS * WIDTH + channels[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _store_state(x, values, place, channels, columns, CHANNELS: tl.constexpr, WIDTH: tl.constexpr):
    inside = (channels < CHANNELS)[:, None] & (columns < WIDTH)[None, :]
    tl.store(x + place * CHANNELS * WIDTH + channels[:, None] * WIDTH + columns[None, :], values, mask=inside)


@triton.jit
def _load_keys(x, place, rows, channels, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    places = place * ROWS * CHANNELS + rows[:, None] * CHANNELS + channels[None, :]
    return tl.load(x + places, mask=(channels < CHANNELS)[None, :], other=0.0)


@triton.jit
def _load_factor(keep, place, channels, CHANNELS: tl.constexpr, KEPT: tl.constexpr):
    return tl.load(keep + place * KEPT + channels % KEPT, mask=channels < CHANNELS, other=0.0)[:, None]


@triton.jit
def pass_forward(
    values, causes, solved, leaving, keep, state, states, written, last, chunks,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    head, heads = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    rows, first = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    second = first + BLOCK
    columns = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    places, inside = rows[:, None] * WIDTH + columns[None, :], (columns < WIDTH)[None, :]
    one = _load_state(state, head, first, columns, CHANNELS, WIDTH)
    other = _load_state(state, head, second, columns, CHANNELS, WIDTH) if CHANNELS > BLOCK else one
    for chunk in range(chunks):
        place = chunk * heads + head
        _store_state(states, one, place, first, columns, CHANNELS, WIDTH)
        if CHANNELS > BLOCK:
            _store_state(states, other, place, second, columns, CHANNELS, WIDTH)
        update = tl.load(values + place * ROWS * WIDTH + places, mask=inside, other=0.0)
        if causes is not None:
            update -= _multiply(_load_keys(causes, place, rows, first, ROWS, CHANNELS), one)
            if CHANNELS > BLOCK:
                update -= _multiply(_load_keys(causes, place, rows, second, ROWS, CHANNELS), other)
            update = _multiply(_load_keys(solved, place, rows, rows, ROWS, ROWS), update)
            tl.store(written + place * ROWS * WIDTH + places, update, mask=inside)
        one = _load_factor(keep, place, first, CHANNELS, KEPT) * one
        one += _multiply(tl.trans(_load_keys(leaving, place, rows, first, ROWS, CHANNELS)), update)
        if CHANNELS > BLOCK:
            other = _load_factor(keep, place, second, CHANNELS, KEPT) * other
            other += _multiply(tl.trans(_load_keys(leaving, place, rows, second, ROWS, CHANNELS)), update)
    _store_state(last, one, head, first, columns, CHANNELS, WIDTH)
    if CHANNELS > BLOCK:
        _store_state(last, other, head, second, columns, CHANNELS, WIDTH)


@triton.jit
def pass_backward(
    causes, solved, leaving, keep, of_states, of_written, of_last, of_values, after, of_first, chunks,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    head, heads = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    rows, first = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    second = first + BLOCK
    columns = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    places, inside = rows[:, None] * WIDTH + columns[None, :], (columns < WIDTH)[None, :]
    one = _load_state(of_last, head, first, columns, CHANNELS, WIDTH)
    other = _load_state(of_last, head, second, columns, CHANNELS, WIDTH) if CHANNELS > BLOCK else one
    for step in range(chunks):
        place = (chunks - 1 - step) * heads + head
        _store_state(after, one, place, first, columns, CHANNELS, WIDTH)
        grad = tl.load(of_written + place * ROWS * WIDTH + places, mask=inside, other=0.0)
        grad += _multiply(_load_keys(leaving, place, rows, first, ROWS, CHANNELS), one)
        if CHANNELS > BLOCK:
            _store_state(after, other, place, second, columns, CHANNELS, WIDTH)
            grad += _multiply(_load_keys(leaving, place, rows, second, ROWS, CHANNELS), other)
        if causes is not None:
            grad = _multiply(tl.trans(_load_keys(solved, place, rows, rows, ROWS, ROWS)), grad)
        tl.store(of_values + place * ROWS * WIDTH + places, grad, mask=inside)
        one = _load_factor(keep, place, first, CHANNELS, KEPT) * one
        one += _load_state(of_states, place, first, columns, CHANNELS, WIDTH)
        if causes is not None:
            one -= _multiply(tl.trans(_load_keys(causes, place, rows, first, ROWS, CHANNELS)), grad)
        if CHANNELS > BLOCK:
            other = _load_factor(keep, place, second, CHANNELS, KEPT) * other
            other += _load_state(of_states, place, second, columns, CHANNELS, WIDTH)
            if causes is not None:
                other -= _multiply(tl.trans(_load_keys(causes, place, rows, second, ROWS, CHANNELS)), grad)
    _store_state(of_first, one, head, first, columns, CHANNELS, WIDTH)
    if CHANNELS > BLOCK:
        _store_state(of_first, other, head, second, columns, CHANNELS, WIDTH)


def pass_states(
    values: Tensor, causes: Tensor | None, solved: Tensor | None, leaving: Tensor, keep: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See megatron/core/ssm/state_passing.py; all contiguous, float32."""
    states, last = values.new_empty(len(values), *state.shape), torch.empty_like(state)
    written = values if causes is None else torch.empty_like(values)
    _launch(
        pass_forward, values, keep, state,
        (values, causes, solved, leaving, keep, state, states, written, last, len(values)),
    )  # fmt: skip
    return states, written, last


def pass_states_backward(
    causes: Tensor | None,
    solved: Tensor | None,
    leaving: Tensor,
    keep: Tensor,
    of_states: Tensor,
    of_written: Tensor,
    of_last: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """See megatron/core/ssm/state_passing.py; all contiguous, float32."""
    of_values, after, of_first = (torch.empty_like(x) for x in (of_written, of_states, of_last))
    _launch(
        pass_backward, of_written, keep, of_last,
        (causes, solved, leaving, keep, of_states, of_written, of_last, of_values, after, of_first, len(of_written)),
    )  # fmt: skip
    return of_values, after, of_first


def _launch(kernel: object, values: Tensor, keep: Tensor, state: Tensor, arguments: tuple[object, ...]) -> None:
    channels, width = state.shape[-2:]
    columns = choose_block(width, _COLUMNS if channels <= _BLOCK else _COLUMNS // 2)
    launching.launch(
        kernel, (state[..., 0, 0].numel(), triton.cdiv(width, columns)), *arguments, ROWS=values.shape[-2],
        CHANNELS=channels, WIDTH=width, KEPT=keep.shape[-2], BLOCK=choose_block(channels, _BLOCK), COLUMNS=columns,
    )  # fmt: skip
