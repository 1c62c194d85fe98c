# SPDX-License-Identifier: Apache-2.0
"""--log-fp8-stats: what rounding to 8 or 4 bits does to the operands of each linear layer; --fp8-fallback-sqnr: layers
that it does too much to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megatron.core.collectives import all_gather_object, all_reduce
from megatron.core.errors import say
from megatron.core.tensor_parallel.fp8_products import OPERANDS, STATISTICS, FP8Matmul
from megatron.core.tensor_parallel.parameters import find_global_name
from megatron.training.config.container import RunConfig
from megatron.training.run import Hook, HookContext, Phase, Run, StepResult


class FP8Hook(Hook):
    """Of each operand (input, weight, grad) of each FP8 product, over the steps of a log interval and all ranks:

    | name                                | what                                                                    |
    |-------------------------------------|-------------------------------------------------------------------------|
    | fp8_sqnr LAYER OPERAND              | 10 log10(sum of squares / sum of squared rounding errors), dB           |
    | fp8_amax LAYER OPERAND              | largest absolute value                                                  |
    | fp8_overflow LAYER OPERAND          | share of the values that are cut off at the format's largest            |
    | fp8_underflow LAYER OPERAND         | share of the values that become zero                                    |
    | fp8_sqnr                            | the lowest of them all, also in the progress line                       |

    With a lowest ratio, a layer that has an operand below it falls back to 16 bits, and has no values any more.
    """

    phase = Phase.MEASURE
    is_collective = True

    def __init__(self, *, records: bool = True, lowest_ratio: float | None = None) -> None:
        self.records, self.lowest_ratio = records, lowest_ratio
        self.names: list[str] = []
        """Of the layers of all pipeline stages that multiply in low precision, the same on all ranks."""

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> FP8Hook | None:
        """Return the hook for --log-fp8-stats and --fp8-fallback-sqnr; None where neither is asked for."""
        model = config.model
        is_asked = model.log_fp8_stats or model.fp8_fallback_sqnr is not None
        if model.few_bits_recipe is None or not is_asked:
            return None
        return cls(records=model.log_fp8_stats, lowest_ratio=model.fp8_fallback_sqnr)

    def on_train_start(self, run: Run) -> None:
        """Agree on the names."""
        own = [name for name, product in _list_products(run) if not product.falls_back]
        of_ranks = all_gather_object(own, run.groups.world)
        self.names = list(dict.fromkeys(name for names in of_ranks for name in names))

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Record at the end of an interval; values stay on the device."""
        if not run.metrics.is_due(run.progress.iteration):
            return
        # [layers, operands, statistics]; a rank adds zeros for layers of other stages.
        found = torch.zeros(len(self.names), len(OPERANDS), len(STATISTICS), dtype=torch.float64, device=run.device)
        for name, product in _list_products(run):
            if product.falls_back:
                continue
            found[self.names.index(name)] += product.take_statistics(run.device)
        largest, sums = found[..., 0].contiguous(), found[..., 1:].contiguous()
        all_reduce(largest, run.groups.world, op="max")
        all_reduce(sums, run.groups.world)
        signal, noise, overflow, underflow, elements = sums.unbind(-1)
        columns: dict[str, Tensor] = {
            "fp8_sqnr": 10.0 * torch.log10(signal / noise),
            "fp8_amax": largest,
            "fp8_overflow": overflow / elements,
            "fp8_underflow": underflow / elements,
        }
        if self.records and self.names:
            self._record(run, columns)
        if self.lowest_ratio is not None:
            self._fall_back(run, columns["fp8_sqnr"])

    def _record(self, run: Run, columns: Mapping[str, Tensor]) -> None:
        """Hand the values [layers, operands] on; they stay on the device."""
        for statistic, values in columns.items():
            for layer, of_operands in zip(self.names, values.unbind(), strict=True):
                for operand, value in zip(OPERANDS, of_operands.unbind(), strict=True):
                    run.metrics.record(f"{statistic} {layer} {operand}", value, reduce="last")
        # What was rounded without any error has no ratio.
        ratios = columns["fp8_sqnr"]
        lowest = torch.where(ratios.isfinite(), ratios, torch.full_like(ratios, torch.inf)).min()
        run.metrics.record("fp8_sqnr", lowest, "last", "fp8 sqnr: {:.1f} dB".format)

    def _fall_back(self, run: Run, ratios: Tensor) -> None:
        """Let layers with too low a ratio multiply in 16 bits; the same decision on all ranks."""
        products = dict(_list_products(run))
        remaining = []
        for layer, of_operands in zip(self.names, ratios.tolist(), strict=True):  # the host waits here
            ratio, operand = min(zip(of_operands, OPERANDS, strict=True), key=lambda pair: (math.isnan(pair[0]), pair))
            if math.isnan(ratio) or ratio >= self.lowest_ratio:
                remaining.append(layer)
                continue
            if layer in products:
                products[layer].fall_back()
            if run.groups.world.rank() == 0:
                say(
                    f"warning: {layer} multiplies in 16 bits from iteration {run.progress.iteration + 1} on: rounding "
                    f"its {operand} left {ratio:.1f} dB, less than --fp8-fallback-sqnr {self.lowest_ratio:g}"
                )
        self.names = remaining


def _list_products(run: Run) -> Iterator[tuple[str, FP8Matmul]]:
    """The FP8 products of this process, each with its layer's name in the whole model."""
    for chunk in run.model:
        for name, module in chunk.module.named_modules():
            if isinstance(module, FP8Matmul):
                yield find_global_name(chunk.module, name.removesuffix(".product")), module
