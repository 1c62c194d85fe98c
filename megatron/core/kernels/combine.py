# SPDX-License-Identifier: Apache-2.0
"""Tokens copied to their experts' rows, and each token's rows added up in the order of its slots; each is the gradient
of the other. See megatron/core/transformer/moe/permutation.py.

Everything is read once and written once, sums in float32 between; nothing is added atomically.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels import launching
from megatron.core.kernels.launching import choose_block

_BLOCK = 1024


@triton.jit
def copy_to_slots(x, order, rows, tokens, WIDTH: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(order + row) // SLOTS
    # An empty slot has the number of a token after the last.
    is_token = tl.full((BLOCK,), token, tl.int64) < tokens
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < WIDTH
        values = tl.load(x + token * WIDTH + columns, mask=mask & is_token, other=0.0)
        tl.store(rows + row * WIDTH + columns, values, mask=mask)


@triton.jit
def invert_order(order, places, count, BLOCK: tl.constexpr):
    """places[order[i]] = i."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    tl.store(places + tl.load(order + index, mask=mask), index, mask=mask)


@triton.jit
def sum_slots(rows, places, sums, WIDTH: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < WIDTH
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for slot in tl.static_range(SLOTS):
            place = tl.load(places + token * SLOTS + slot).to(tl.int64)
            # A slot whose token was dropped has no row.
            has_row = tl.full((BLOCK,), place, tl.int64) >= 0
            total += tl.load(rows + place * WIDTH + columns, mask=mask & has_row, other=0.0).to(tl.float32)
        tl.store(sums + token * WIDTH + columns, total, mask=mask)


def copy_tokens_to_rows(x: Tensor, order: Tensor, slots_per_token: int, padded: bool) -> Tensor:
    """Tokens [T, h] -> rows [n, h]; the transpose of `sum_rows_of_tokens`, whose arguments these are."""
    tokens, width = x.shape
    rows = x.new_empty(order.numel(), width)
    launching.launch(
        copy_to_slots, (order.numel(),), x, order.contiguous(), rows, tokens,
        WIDTH=width, SLOTS=slots_per_token, BLOCK=choose_block(width, _BLOCK),
    )  # fmt: skip
    return rows


def sum_rows_of_tokens(rows: Tensor, order: Tensor, tokens: int, slots_per_token: int, padded: bool = False) -> Tensor:
    """Rows [n, h], of which row i belongs to slot order[i], -> [tokens, h].

    order: int64 [n]; token t has the slots from t * slots_per_token on, each with one row at most. padded: some
    rows have the number after the last slot, and belong to none.
    """
    width, slots = rows.shape[1], tokens * slots_per_token
    if not padded and order.shape[0] == slots:  # every slot has a row
        places = torch.empty(slots, dtype=torch.int32, device=rows.device)
    else:
        places = torch.full((slots + 1,), -1, dtype=torch.int32, device=rows.device)
    grid = (triton.cdiv(order.numel(), _BLOCK),)
    launching.launch(invert_order, grid, order.contiguous(), places, order.numel(), BLOCK=_BLOCK)
    sums = rows.new_empty(tokens, width)
    launching.launch(
        sum_slots, (tokens,), rows, places, sums, WIDTH=width, SLOTS=slots_per_token, BLOCK=choose_block(width, _BLOCK)
    )
    return sums
