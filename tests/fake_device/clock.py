# SPDX-License-Identifier: Apache-2.0
"""Seconds that the fake device takes, by the planner's row of an H200: of products by their operations, of everything
else by the bytes that it touches, of copies between host and device by those of the bus.

Memory that the host gives back is taken by its next kernel, so that the order of the host is that of the computation's
stream. What it may not give back before a moment has come, it asks by Event.query, which this clock answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megatron.planner.devices import DEVICES

ROW = DEVICES["h200"]
_PRODUCTS = {"mm": 0, "bmm": 0, "_scaled_mm": 0, "addmm": 1, "baddbmm": 1, "baddbmm_": 1}
"""Which of its tensors are the factors."""


def estimate_seconds(name: str, args: Sequence[Any], touched: Sequence[Tensor], direction: str | None) -> float:
    """Of an operation of torch. touched: the tensors that it reads and writes. direction: of a copy between host and
    device."""
    if direction is not None:
        return sum(tensor.nbytes for tensor in touched) / ROW.host_bandwidth
    seconds = count_seconds(touched)
    if name in _PRODUCTS:
        a, b = [tensor for tensor in args if isinstance(tensor, Tensor)][_PRODUCTS[name] :][:2]
        seconds = max(seconds, 2 * a.numel() * b.shape[-1] / (ROW.peak_flops * ROW.product_share))
    elif name.endswith(("_attention", "_attention_backward")):
        # Causal, in forward two products and in backward five.
        query, key = [tensor for tensor in args if isinstance(tensor, Tensor)][name.endswith("_backward") :][:2]
        flops = (5 if name.endswith("_backward") else 2) * query.numel() * key.shape[-2]
        seconds = max(seconds, flops / (ROW.peak_flops * ROW.attention_share))
    return seconds


def count_seconds(touched: Sequence[Tensor]) -> float:
    """Of a kernel that reads or writes each of these tensors once."""
    return sum({id(t): t.nbytes for t in touched}.values()) / (ROW.memory_bandwidth * ROW.memory_share)
