# SPDX-License-Identifier: Apache-2.0
"""Tokens sorted by where they go, and back.

A token is in as many slots as it has destinations. `order` lists the slots, numbered token * S + choice, that are kept,
sorted by destination:

    permute    x [T, h]  ->  rows [n, h]     row i is the token of slot order[i]
    unpermute    rows      ->  y [T, h]        y[t] is the sum of the rows of t's slots

Rows that belong to no slot may stand between them, so that each destination has a number of rows that does not depend
on the routing (`pad_slots`): zeros, which unpermute leaves out.

Each is the other's transpose. The fused forms write every element once and sum a token's rows in the order of its
slots, so that nothing depends on how threads meet; the references are made of torch's operations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.device import is_cpu
from megatron.core.kernels.launching import by_kernel
from megatron.core.operation_table import Case, OperationWay, choose
from megatron.core.transformer.transformer_config import TransformerConfig


class Sorted(NamedTuple):
    """The slots of all tokens sorted by destination: an expert here, or an expert of another rank."""

    order: Tensor
    """[n] slots, ordered by destination."""
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


def pad_slots(found: Sorted, nowhere: int, *, rows_each: int | None = None, multiple: int = 1) -> Sorted:
    """Put rows without a slot after each destination's rows, until it has `rows_each`, or a multiple of `multiple`.

    found: as `sort_slots` returns it; with `rows_each` its order may go on with slots that go nowhere. nowhere: number
    of slots, which stands for none. The host waits for nothing: with `multiple` there are as many rows as any routing
    may need, and the last destination has those that are left over.
    """
    order, ends = found
    destinations, device = ends.shape[0], order.device
    starts = torch.cat((ends.new_zeros(1), ends))  # the last: of the slots that go nowhere
    if rows_each is not None:
        rows = destinations * rows_each
        padded_ends = torch.arange(rows_each, rows + 1, rows_each, device=device, dtype=ends.dtype)
    else:
        rows = (order.shape[0] + destinations * (multiple - 1)) // multiple * multiple
        counts = (starts.diff() + (multiple - 1)) // multiple * multiple
        padded_ends = counts.cumsum(0, dtype=ends.dtype)
        padded_ends[-1] = rows
    places = torch.arange(order.shape[0], device=device)
    destination = torch.searchsorted(ends, places.to(ends.dtype), right=True)
    padded_starts = torch.cat((ends.new_zeros(1), padded_ends))
    # Slots that go nowhere are written to one row more, which is cut off.
    places = (places - starts[destination] + padded_starts[destination]).masked_fill(destination == destinations, rows)
    padded = order.new_full((rows + 1,), nowhere)
    padded[places] = order
    return Sorted(padded[:rows], padded_ends)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, slots_per_token: int, padded: bool) -> Tensor:
        ctx.save_for_backward(order)
        # Backward needs only where rows came from: the permutation is linear, and no values are kept.
        ctx.sizes = (x.shape[0], slots_per_token, padded)
        return _copy_to_slots(x, order, slots_per_token, padded)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _sum_slots(grad, ctx.saved_tensors[0], *ctx.sizes), None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, tokens: int, slots_per_token: int, padded: bool) -> Tensor:
        ctx.save_for_backward(order)
        ctx.slots_per_token, ctx.padded = slots_per_token, padded
        return _sum_slots(rows, order, tokens, slots_per_token, padded)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _copy_to_slots(grad, ctx.saved_tensors[0], ctx.slots_per_token, ctx.padded), None, None, None, None


def _has_rows(x: Tensor, *_: Any) -> bool:
    """Return whether x is [n, h], and not a number for each row."""
    return x.dim() == 2


@by_kernel("megatron.core.kernels.combine:copy_tokens_to_rows", "x", fits=_has_rows)
def _copy_to_slots(x: Tensor, order: Tensor, slots_per_token: int, padded: bool) -> Tensor:
    tokens = order // slots_per_token
    if not padded:
        return x.index_select(0, tokens)
    if not x.shape[0]:
        return x.new_zeros(len(order), *x.shape[1:])
    # An empty slot has the number of a token after the last.
    rows = x.index_select(0, tokens.clamp(max=x.shape[0] - 1))
    return rows.masked_fill_((tokens == x.shape[0]).view(-1, *[1] * (x.dim() - 1)), 0.0)


@by_kernel("megatron.core.kernels.combine:sum_rows_of_tokens", "rows", fits=_has_rows)
def _sum_slots(rows: Tensor, order: Tensor, tokens: int, slots_per_token: int, padded: bool = False) -> Tensor:
    if padded:
        # One slot more takes the rows of none, and is left out.
        slots = rows.new_zeros(tokens * slots_per_token + 1, *rows.shape[1:])
        slots[order] = rows
        return slots[:-1].unflatten(0, (tokens, slots_per_token)).sum(dim=1)
    # Slots whose token was dropped have no row and must count as zeros.
    is_whole = order.shape[0] == tokens * slots_per_token
    make = rows.new_empty if is_whole else rows.new_zeros
    flat = make(tokens * slots_per_token, *rows.shape[1:])
    flat[order] = rows  # every slot has one row at most: no two writes meet, so the result does not depend on threads
    return flat if slots_per_token == 1 else flat.unflatten(0, (tokens, slots_per_token)).sum(dim=1)


def choose_permutation(config: TransformerConfig, device: torch.device) -> OperationWay:
    """Choose a way of sending tokens to experts and back: fused where asked for, and on a GPU, where the reference
    forms add in an order that changes from run to run. No compiler sees either."""
    is_fused = config.moe_permute_fusion or not is_cpu(device)
    return choose("permutation", Case("fused" if is_fused else "elementary", device)).way


def permute(x: Tensor, order: Tensor, slots_per_token: int, padded: bool = False) -> Tensor:
    """Copy tokens [T, ...] to rows [n, ...], sorted by destination; `order` [n] as `sort_slots` returns it, or
    `pad_slots` where `padded` says so."""
    result: Tensor = _Permute.apply(x, order, slots_per_token, padded)
    return result


def unpermute(rows: Tensor, order: Tensor, tokens: int, slots_per_token: int, padded: bool = False) -> Tensor:
    """Add up each token's rows: rows [n, ...] sorted by destination -> [T, ...]; the transpose of `permute`."""
    result: Tensor = _Unpermute.apply(rows, order, tokens, slots_per_token, padded)
    return result


def permute_reference(x: Tensor, order: Tensor, slots_per_token: int, padded: bool = False) -> Tensor:
    """The same as `permute`, from torch's operations; its gradient adds atomically on a GPU."""
    # Joined, so that the result hangs on x even where x has no rows.
    return (torch.cat((x, x.new_zeros(1, *x.shape[1:]))) if padded else x).index_select(0, order // slots_per_token)


def unpermute_reference(rows: Tensor, order: Tensor, tokens: int, slots_per_token: int, padded: bool = False) -> Tensor:
    """The same as `unpermute`, from torch's operations: on a GPU by atomic additions, in any order."""
    if padded:
        whole = rows.new_zeros(tokens + 1, *rows.shape[1:])
        return whole.index_add(0, order // slots_per_token, rows)[:-1]
    return rows.new_zeros(tokens, *rows.shape[1:]).index_add(0, order // slots_per_token, rows)
