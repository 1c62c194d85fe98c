# SPDX-License-Identifier: Apache-2.0
"""Losses in addition to the language model's, which a layer adds where they arise: balancing losses of experts.

Such a loss is never returned. It hangs on a tensor that the layer passes on, and gets its gradient when backward comes
through there, also on pipeline stages that never see the main loss. Its gradient must be scaled as the main loss's is:
divided by the microbatches of a step, multiplied by the loss scale. The executor tells it how at each step's beginning.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class AuxiliaryLossScale:
    """Factor on the gradient of a module's auxiliary losses in this step. The module keeps it as
    `auxiliary_loss_scale`."""

    def __init__(self) -> None:
        self.value: Tensor | float = 1.0
        self._fixed: Tensor | None = None
        self.step = 0
        """Steps begun so far, by which a module knows that what it summed up belongs to an earlier one."""

    def begin_step(self, value: Tensor | float) -> None:
        """A step's first microbatch comes."""
        if self._fixed is None:
            self.value = value
        elif isinstance(value, Tensor):
            self._fixed.copy_(value)
        else:
            self._fixed.fill_(value)
        self.step += 1

    def keep_address(self, device: torch.device) -> None:
        """From now on keep the value in one place on the device, where a recorded backward reads it."""
        # Rounding it to a loss's dtype gives the same value as rounding the number itself.
        self._fixed = torch.ones((), dtype=torch.float64, device=device)
        self.value = self._fixed


def find_auxiliary_loss_scales(models: Iterable[torch.nn.Module]) -> list[AuxiliaryLossScale]:
    """The loss scales of all modules in the models that add an auxiliary loss, such as routers."""
    found = (getattr(module, "auxiliary_loss_scale", None) for model in models for module in model.modules())
    return [scale for scale in found if isinstance(scale, AuxiliaryLossScale)]


def is_recomputing() -> bool:
    """Return whether this forward runs inside a backward pass, to recompute activations that were not saved: what it
    counts has been counted before."""
    # torch numbers the backward passes that are running; -1 is none. It has no public question for that.
    return torch._C._current_graph_task_id() != -1


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: AuxiliaryLossScale) -> Tensor:
        # An empty tensor remembers device and dtype without keeping the loss.
        ctx.scale, ctx.like = scale, loss.new_empty(0)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        # x's gradient passes as it came; the loss is another root of the graph, whose gradient starts here.
        value = ctx.scale.value
        # A number is filled in by the device; made a tensor on the host, it would have to be waited for.
        start = value.to(ctx.like) if isinstance(value, Tensor) else ctx.like.new_full((), value)
        return grad, start, None


def attach_auxiliary_loss(x: Tensor, loss: Tensor, scale: AuxiliaryLossScale) -> Tensor:
    """x, whose backward also is the backward of the scalar `loss` times the scale of that moment."""
    result: Tensor = _WithLoss.apply(x, loss, scale)
    return result
