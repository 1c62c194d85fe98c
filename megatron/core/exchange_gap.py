# SPDX-License-Identifier: Apache-2.0
"""Work of a rank while tokens travel to experts on other ranks, where the layer itself has nothing to compute.

The layer that begins an exchange calls the gap before it waits for the end, in forward and in backward. The executor
puts something there: the computation of another micro-batch, or weight gradients that wait (side_by_side.py of
pipeline_parallel). Without it the call does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


class ExchangeGap:
    """The time between the beginning and the end of a module's exchanges. The module keeps it as `exchange_gap`."""

    def __init__(self) -> None:
        self.fill: Callable[[], None] | None = None

    def __call__(self) -> None:
        """Do what the executor wants done now."""
        if self.fill is not None:
            self.fill()


def find_exchange_gaps(models: Iterable[torch.nn.Module]) -> list[ExchangeGap]:
    """The gaps of all modules inside the models that exchange tokens."""
    found = (getattr(module, "exchange_gap", None) for model in models for module in model.modules())
    return [gap for gap in found if isinstance(gap, ExchangeGap)]
