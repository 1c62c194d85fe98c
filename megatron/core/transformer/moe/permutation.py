# SPDX-License-Identifier: Apache-2.0
"""Tokens sorted by where they go, and back.

A token is in as many slots as it has destinations. `order` lists the slots, numbered token * S + choice, that are kept,
sorted by destination:

    permute    x [T, h]  ->  rows [n, h]     row i is the token of slot order[i]
    unpermute    rows      ->  y [T, h]        y[t] is the sum of the rows of t's slots

Each is the other's transpose. The fused forms write every element once and sum a token's rows in the order of its
slots, so that nothing depends on how threads meet; the references are made of torch's own operations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Sorted(NamedTuple):
    """The slots of all tokens sorted by destination: an expert here, or an expert of another rank."""

    order: Tensor
    """[n] slots, those of the first destination first."""
    ends: Tensor
    """[destinations] int32, where in `order` each one's slots end."""


def sort_slots(destinations: Tensor, count: int, kept: int | None = None) -> Sorted:
    """Sort slots by their destination.

    destinations: [slots] int64, number of the destination of every slot; numbers from `count` on mark slots that go
    nowhere. count: number of destinations. kept: how many slots go somewhere; all when None. It is given because to
    count them here would make the host wait for the device.
    """
    # Stable: rows of a destination are in the order of their tokens, whatever the device.
    in_order, order = destinations.sort(stable=True)
    numbers = torch.arange(count, device=destinations.device, dtype=destinations.dtype)
    # Counting on the device: bincount would make the host wait for its size. int32 is what grouped_mm takes.
    ends = torch.searchsorted(in_order, numbers, right=True, out_int32=True)
    return Sorted(order if kept is None else order[:kept], ends)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, slots_per_token: int) -> Tensor:
        ctx.save_for_backward(order)
        # Backward needs only where rows came from: the permutation is linear, and no values are kept.
        ctx.sizes = (x.shape[0], slots_per_token)
        return x.index_select(0, order // slots_per_token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _sum_slots(grad, ctx.saved_tensors[0], *ctx.sizes), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, tokens: int, slots_per_token: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.slots_per_token = slots_per_token
        return _sum_slots(rows, order, tokens, slots_per_token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.index_select(0, ctx.saved_tensors[0] // ctx.slots_per_token), None, None, None


def _sum_slots(rows: Tensor, order: Tensor, tokens: int, slots_per_token: int) -> Tensor:
    # Slots whose token was dropped have no row and must count as zeros.
    is_whole = order.shape[0] == tokens * slots_per_token
    make = rows.new_empty if is_whole else rows.new_zeros
    flat = make(tokens * slots_per_token, *rows.shape[1:])
    flat[order] = rows  # every slot has one row at most: no two writes meet, so the result does not depend on threads
    return flat if slots_per_token == 1 else flat.unflatten(0, (tokens, slots_per_token)).sum(dim=1)


def permute(x: Tensor, order: Tensor, slots_per_token: int) -> Tensor:
    """Copy tokens [T, ...] to rows [n, ...], sorted by destination; `order` [n] as `sort_slots` returns it."""
    result: Tensor = _Permute.apply(x, order, slots_per_token)
    return result


def unpermute(rows: Tensor, order: Tensor, tokens: int, slots_per_token: int) -> Tensor:
    """Add up each token's rows: rows [n, ...] sorted by destination -> [T, ...]; the transpose of `permute`."""
    result: Tensor = _Unpermute.apply(rows, order, tokens, slots_per_token)
    return result


def permute_reference(x: Tensor, order: Tensor, slots_per_token: int) -> Tensor:
    """The same as `permute`, from torch's operations; its gradient adds atomically on a GPU."""
    return x.index_select(0, order // slots_per_token)


def unpermute_reference(rows: Tensor, order: Tensor, tokens: int, slots_per_token: int) -> Tensor:
    """The same as `unpermute`, from torch's operations: on a GPU by atomic additions, in any order."""
    return rows.new_zeros(tokens, *rows.shape[1:]).index_add(0, order // slots_per_token, rows)
