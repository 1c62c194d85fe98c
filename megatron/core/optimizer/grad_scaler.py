# SPDX-License-Identifier: Apache-2.0
"""Loss scaling for float16 (Micikevicius et al., 2018, section 3.2).

Gradients below 2^-24 are zero in float16. So the loss is multiplied by a scale before backward, which shifts all
gradients up, and the update divides by it again. The dynamic scale is as large as the gradients let it be:

    `hysteresis` steps whose gradients overflowed     scale / 2, and again at each further one, not below `min_scale`
    `window` steps in a row that did not              scale x 2, and the overflows are counted from 0

A step whose gradients overflowed is skipped: neither parameters, optimizer state nor learning rate change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.core.optimizer.optimizer_config import OptimizerConfig

GROWTH, BACKOFF = 2.0, 0.5


class GradScaler(Protocol):
    """Factor that the loss is multiplied by, and the gradients are divided by."""

    scale: Tensor
    """A float32 scalar on the device."""

    @property
    def value(self) -> float:
        """The same for logs, without waiting for the device."""
        ...

    def update(self, *, overflowed: bool) -> bool:
        """Learn from a step; False where its overflow leaves nothing to be tried."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps; plain numbers."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        ...


class ConstantGradScaler:
    """A loss scale that never changes (--loss-scale)."""

    def __init__(self, scale: float, device: torch.device) -> None:
        self.value = scale
        self.scale = torch.tensor(scale, dtype=torch.float32, device=device)

    def update(self, *, overflowed: bool) -> bool:
        """False after an overflow: with the same scale it would come again."""
        return not overflowed

    def state_dict(self) -> dict[str, Any]:
        """Empty, because the command line gives the scale."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Ignore what was saved: the scale of the command line holds."""


class DynamicGradScaler:
    """The largest scale that gradients of late have allowed; see the module's rule."""

    def __init__(
        self, initial_scale: float, min_scale: float, window: int, hysteresis: int, device: torch.device
    ) -> None:
        self.value = initial_scale
        self.min_scale = min_scale
        self.window = window
        self.hysteresis = hysteresis
        self.good_steps = 0
        """Steps without overflow since the last overflow or growth."""
        self.patience = hysteresis
        """Overflows until the scale falls; 0: it falls at each."""
        self.scale = torch.tensor(initial_scale, dtype=torch.float32, device=device)

    def update(self, *, overflowed: bool) -> bool:
        """Lower or raise the scale; False where it would have to fall below the minimum."""
        if not overflowed:
            self.good_steps += 1
            # Overflows a full window apart are single bad steps, not a scale that is too large; so the count starts
            # again.
            if self.good_steps == self.window:
                self.good_steps = 0
                self.patience = self.hysteresis
                self._set(self.value * GROWTH)
            return True
        self.good_steps = 0
        # It stays 0 until the scale grows: a scale far too high, such as 2^32 at the start, then falls in every step.
        self.patience = max(0, self.patience - 1)
        if self.patience > 0:
            return True
        # Asked before the scale falls: the step that brings it down to the minimum leaves that minimum to be tried.
        was_lowest = self.value <= self.min_scale
        self._set(max(self.value * BACKOFF, self.min_scale))
        return not was_lowest

    def state_dict(self) -> dict[str, Any]:
        """The scale and both counts, as plain numbers."""
        return {"scale": self.value, "good_steps": self.good_steps, "patience": self.patience}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from saved scale and counts; a checkpoint of a run without dynamic scaling changes nothing."""
        if state:
            self.good_steps, self.patience = state["good_steps"], state["patience"]
            self._set(state["scale"])

    def _set(self, value: float) -> None:
        # Half of the largest float32, so that no later growth makes it infinite.
        self.value = min(value, torch.finfo(torch.float32).max / 2)
        self.scale.fill_(self.value)


def make_grad_scaler(config: OptimizerConfig, device: torch.device) -> GradScaler | None:
    """The scaler of a float16 run; None for the others."""
    if not config.fp16:
        return None
    if config.loss_scale is not None:
        return ConstantGradScaler(config.loss_scale, device)
    return DynamicGradScaler(
        config.initial_loss_scale, config.min_loss_scale, int(config.loss_scale_window), config.hysteresis, device
    )
