# SPDX-License-Identifier: Apache-2.0
"""Are the gradients of a run the derivatives of its loss? Tensor by tensor, against differences of the loss in float64.

    (loss(w + t u) - loss(w - t u)) / 2t   against   <gradient, u>        u: a random direction of length 1

A direction of n elements meets the n-th part of a gradient's square, so that a typical slope is |gradient| / sqrt(n):
what differs by more than a small part of that is a mistake somewhere between this tensor and the loss. It makes the
gradients of all tensors before it wrong, too: the first in backward order is the nearest to its cause.

Where the loss bends between the two places (a ReLU, a choice of another expert), a shorter step has both on one side.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.optimizer.megatron_optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.placement import Placement
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.config.container import RunConfig
from megatron.training.recipes.recipe import Recipe
from megatron.training.step import train_step
from megatron.training.verify.loss_function import LossEvaluation, LossFunction
from megatron.training.verify.parity import FirstGradients, list_placed_parameters, list_untrained, open_local_run

DIRECTIONS = 2
"""Of each tensor."""
TOLERANCE = 1e-4
"""Relative to a typical slope."""
_STEPS = (1e-4, 1e-5, 1e-6)
"""Of each element, relative to the root mean square of the tensor's elements; one after the other until one fits."""
_LEAST_SIZE = 1e-2
"""Taken instead of a smaller size: vectors that begin at zero."""
_ROUNDING = 64 * torch.finfo(torch.float64).eps
"""Of the loss, relative to itself."""


class SlopeError(NamedTuple):
    """A tensor whose gradient is not the derivative of the loss."""

    name: str
    slope: float
    """By differences of the loss, in the direction in which it is farthest off."""
    found: float
    """By the gradient."""
    ratio: float | None
    """The gradient is so many times what it should be, in all directions; None where it is not one factor."""

    def __str__(self) -> str:
        factor = "" if self.ratio is None else f", {self.ratio:.3g} times"
        return f"{self.name}: slope {self.found:.6g} instead of {self.slope:.6g}{factor}"


@dataclass
class SlopeReport:
    """The outcome for all tensors."""

    loss: float
    gradients: dict[str, Tensor]
    """Of the run in float64: name -> full tensor."""
    routes: list[list[Tensor]]
    """For each router the experts [T, k] of each microbatch."""
    tensors: int = 0
    errors: list[SlopeError] = field(default_factory=list)
    """In the order of backward."""
    unseen: list[str] = field(default_factory=list)
    """Tensors whose slopes drown in the rounding of the loss: the gradient is zero, or nearly."""
    unjudged: list[str] = field(default_factory=list)
    """Tensors of which every step, however short, made the routers choose other experts."""
    largest: float = 0.0
    """Difference of those that agree, relative to a typical slope."""


def widen_settings(config: RunConfig) -> None:
    """Let a run compute in float64 from end to end, in `config` itself; without rounding to 8 or 4 bits, which has no
    derivative."""
    model = config.model
    model.params_dtype, model.bf16, model.fp16, model.fp8, model.fp4 = torch.float64, False, False, None, None
    model.fp32_residual_connection, model.logit_dtype, model.moe_router_dtype = False, None, None
    # Compiled or not, a function has the same derivatives; the run in its dtype compiles what it should.
    model.compile = False
    config.ddp.grad_reduce_in_fp32 = config.ddp.grad_reduce_in_bf16 = False


def check_slopes(config: RunConfig, recipe: Recipe) -> SlopeReport:
    """Compare every tensor's gradient of a step of one process with slopes of its loss; `config` after
    widen_settings."""
    first = FirstGradients()
    with open_local_run(config, dataclasses.replace(recipe, build_optimizer=build_plain_optimizer), 0, [first]) as run:
        batches = list(itertools.islice(run.data.open("train", 0), run.num_microbatches))
        function, placed = LossFunction(run, batches), list_placed_parameters(run)
        state = [tensor for _, tensor in [*placed, *list_untrained(run)]]
        before = [tensor.detach().clone() for tensor in state]
        arrivals = _note_arrivals(placed)
        train_step(run, iter(batches))
        for tensor, values in zip(state, before, strict=True):
            tensor.data.copy_(values)
        base = function()
        gradients = {placement.name: grad for (placement, _), grad in zip(placed, first.grads, strict=True)}
        report = SlopeReport(base.value, gradients, base.choices)
        # What gets no gradient at all, and should have one, comes last.
        arrivals |= {placement.name: param for placement, param in placed if placement.name not in arrivals}
        for name, param in arrivals.items():
            _check_tensor(report, function, base, name, param)
        return report


def _note_arrivals(placed: Sequence[tuple[Placement, nn.Parameter]]) -> dict[str, nn.Parameter]:
    """A dictionary that the parameters will stand in by name, in the order in which backward comes to them."""
    arrivals: dict[str, nn.Parameter] = {}
    for placement, parameter in placed:

        def note(param: Tensor, name: str = placement.name, same: nn.Parameter = parameter) -> None:
            arrivals.setdefault(name, same)

        parameter.register_post_accumulate_grad_hook(note)
    return arrivals


def build_plain_optimizer(config: RunConfig, model: Sequence[Any], groups: ProcessGroupCollection) -> MegatronOptimizer:
    """Build one that has no state, and takes any dtype."""
    return get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.0), model, pg_collection=groups)


class _Slope(NamedTuple):
    """In one direction."""

    measured: float
    """By differences of the loss."""
    found: float
    """By the gradient."""
    noise: float
    """The most that the rounding of the loss may add to the first."""

    @property
    def difference(self) -> float:
        return abs(self.measured - self.found)


def _check_tensor(report: SlopeReport, function: LossFunction, base: LossEvaluation, name: str, param: Tensor) -> None:
    """Add what comes of one tensor."""
    report.tensors += 1
    gradient = report.gradients[name].view(param.shape)
    typical = float(gradient.norm()) / math.sqrt(param.numel())
    generator = torch.Generator().manual_seed(report.tensors)
    slopes = []
    for _ in range(DIRECTIONS):
        direction = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        slope = _measure_slope(function, base, param, direction / direction.norm(), gradient, typical)
        if slope is None:
            report.unjudged.append(name)
            return
        slopes.append(slope)
    worst = max(slopes, key=lambda slope: slope.difference - slope.noise)
    if worst.difference > TOLERANCE * typical + worst.noise:
        ratios = [slope.found / slope.measured if slope.measured else math.inf for slope in slopes]
        is_one_factor = max(ratios) - min(ratios) <= 1e-3 * max(map(abs, ratios))
        report.errors.append(SlopeError(name, worst.measured, worst.found, ratios[0] if is_one_factor else None))
    elif worst.noise > 0.1 * typical:
        report.unseen.append(name)
    else:
        report.largest = max(report.largest, worst.difference / typical)


def _measure_slope(
    function: LossFunction, base: LossEvaluation, param: Tensor, direction: Tensor, gradient: Tensor, typical: float
) -> _Slope | None:
    """The slope with the longest step at which it is the gradient's, else the nearest to that; None where every step
    changed a choice of experts."""
    original, found = param.detach().clone(), float((gradient * direction).sum())
    length = max(float(original.square().mean().sqrt()), _LEAST_SIZE) * math.sqrt(original.numel())
    slopes: list[_Slope] = []
    for step in (size * length for size in _STEPS):
        noise = _ROUNDING * abs(base.value) / step
        # A step so short that rounding hides a mistake would find none.
        if slopes and noise > 0.01 * typical:
            break
        ends = []
        for sign in (step, -step):
            param.data.copy_(original + sign * direction)
            ends.append(function())
        param.data.copy_(original)
        if all(end.chooses_as(base) for end in ends):
            slopes.append(_Slope((ends[0].value - ends[1].value) / (2 * step), found, noise))
            # Where two steps find the same, so does a third.
            targets = [found, *(slope.measured for slope in slopes[-2:-1])]
            if any(abs(slopes[-1].measured - target) <= TOLERANCE * typical + noise for target in targets):
                break
    return min(slopes, key=lambda slope: slope.difference, default=None)
