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
from torch.utils.flop_counter import flop_registry

from megatron.planner.devices import DEVICES

ROW = DEVICES["h200"]


def estimate_seconds(
    func: Any, args: Any, kwargs: Any, result: Any, touched: Sequence[Tensor], direction: str | None
) -> float:
    """Of an operation of torch. touched: the tensors that it reads and writes. direction: of a copy between host and
    device."""
    if direction is not None:
        return sum(tensor.nbytes for tensor in touched) / ROW.host_bandwidth
    count = flop_registry.get(func.overloadpacket)
    flops = 0.0 if count is None else count(*args, **kwargs, out_val=result)
    return max(flops / (ROW.peak_flops * ROW.product_share), count_seconds(touched))


def count_seconds(touched: Sequence[Tensor]) -> float:
    """Of a kernel that reads or writes each of these tensors once."""
    return sum({id(t): t.nbytes for t in touched}.values()) / (ROW.memory_bandwidth * ROW.memory_share)
