# SPDX-License-Identifier: Apache-2.0
"""The gradients of a run in its dtype, against the gradients of the same step in float64.

What a run computes only in float32 or bfloat16 (kernels, other products, a loss straight from 16 bits) is not in the
run in float64. Both draw no random numbers, and their tokens go to the same experts. Products in FP8 and NVFP4 are
compared one by one (few_bits.py): of the gradients as a whole their rounding leaves too little to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megatron.core.transformer.moe.route_log import RouteLog
from megatron.core.transformer.moe.router import TopKRouter
from megatron.training.config.container import RunConfig
from megatron.training.recipes.recipe import Recipe
from megatron.training.step import train_step
from megatron.training.verify.few_bits import ProductCheck
from megatron.training.verify.gradients import widen_settings
from megatron.training.verify.parity import FirstGradients, list_placed_parameters, open_local_run

Routes = list[list[Tensor]]

TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.05}
"""Of a gradient's norm. Sums have other orders, and every layer's rounding goes through all others."""
_NEGLIGIBLE = 1e-3
"""Of the root mean square of all gradients: what is as small is rounding."""


@dataclass
class FormatReport:
    """The outcome of the step in its dtype."""

    dtype: str
    """Name of its dtype; `FP8 hybrid, ...` for low-precision products."""
    tolerance: float | None
    """None where gradients as a whole were not compared."""
    largest: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)
    """Tensor -> difference relative to its norm, or product -> relative to its largest element."""
    products: int = 0
    """Compared one by one."""


def check_own_format(read: Callable[[], RunConfig], build: Callable[[RunConfig], Recipe]) -> FormatReport:
    """Compare a step of one process with the same in float64. read: returns new settings; build: their recipe."""
    config = read()
    dtype, recipe = config.model.compute_dtype_name, config.model.few_bits_recipe
    if recipe is not None:
        # Scales of the second step follow from the first.
        _, _, check = _train(config, build, steps=2 if recipe == "delayed" else 1, watches=True)
        assert check is not None
        return FormatReport(recipe, None, errors=check.errors, products=check.checked)
    wide = read()
    widen_settings(wide)
    wanted, routes, _ = _train(wide, build)
    found, _, _ = _train(config, build, routes=routes)
    report = FormatReport(dtype, TOLERANCES[dtype])
    squares = sum(float(grad.square().sum()) for grad in wanted.values())
    least = _NEGLIGIBLE * (squares / sum(grad.numel() for grad in wanted.values())) ** 0.5
    for name, grad in wanted.items():
        floor = least * grad.numel() ** 0.5
        size = float((found[name] - grad).norm()) / max(float(grad.norm()), floor)
        report.largest = max(report.largest, size)
        if not size <= report.tolerance:
            report.errors[name] = size
    return report


def _train(
    config: RunConfig,
    build: Callable[[RunConfig], Recipe],
    *,
    routes: Routes | None = None,
    steps: int = 1,
    watches: bool = False,
) -> tuple[dict[str, Tensor], Routes, ProductCheck | None]:
    """The gradients of the first step without random numbers, by name in backward order, and the experts that routers
    chose in it, or were given."""
    model = config.model
    model.hidden_dropout = model.attention_dropout = 0.0
    model.moe_input_jitter_eps, model.moe_router_force_biased, model.moe_router_force_load_balancing = None, None, False
    first = FirstGradients()
    with open_local_run(config, build(config), 0, [first]) as run:
        routers = [module for chunk in run.model for module in chunk.modules() if isinstance(module, TopKRouter)]
        check = ProductCheck([chunk.module for chunk in run.model], model) if watches else None
        batches, logs = run.data.open("train", 0), []
        for _ in range(steps):
            given: Sequence[list[Tensor] | None] = routes or [None] * len(routers)
            logs = [RouteLog(of_router) for of_router in given]
            for router, log in zip(routers, logs, strict=True):
                router.route_log = log
            scale = train_step(run, batches).loss_scale
            if check is not None:
                check.end_step()
        names = [placement.name for placement, _ in list_placed_parameters(run)]
        grads = dict(reversed(list(zip(names, first.grads, strict=True))))
        return {name: grad.double() / scale for name, grad in grads.items()}, [log.experts for log in logs], check
