"""Mixture of experts: the routers' auxiliary losses in the log."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.core.collectives import all_reduce
from megatron.core.transformer.layer_patterns import has_experts
from megatron.core.transformer.moe.router import LOSS_NAMES, TopKRouter, read_loss_coefficients
from megatron.training.hooks.meter import MeterHook
from megatron.training.run import Hook, Run, StepResult


class ExpertsHook(Hook):
    """Every rank takes part. per_layer: log the losses of each layer beside their mean."""

    def __init__(self, meter: MeterHook, *, per_layer: bool) -> None:
        self.meter = meter
        self.per_layer = per_layer

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Hand the losses on: means over microbatches and replicas, in the order of layers."""
        model = run.config.model
        layers = [index + 1 for index in range(model.num_layers) if has_experts(model, index + 1)]
        names = [LOSS_NAMES[kind] for kind, coefficient in read_loss_coefficients(model).items() if coefficient]
        if not names:
            return
        means = self._means(run, layers, names)
        for place, name in enumerate(names):
            of_layers = means[:, place].tolist()
            self.meter.step.further[name] = sum(of_layers) / len(of_layers)
            self.meter.step.texts.append(f"{name}: {sum(of_layers) / len(of_layers):.6E}")
            if self.per_layer:
                for layer, value in zip(layers, of_layers, strict=True):
                    self.meter.step.further[f"{name} layer {layer}"] = value

    def _means(self, run: Run, layers: list[int], names: list[str]) -> Tensor:
        """[layers, names], of the last step."""
        own = torch.zeros(len(layers), len(names), dtype=torch.float64, device=run.device)
        for router in routers(run):
            for name, summed in router.take_losses().items():
                own[layers.index(router.layer_number), names.index(name)] += summed
        all_reduce(own, run.groups.world)  # each process has what its own tokens add to its own layers' losses
        samples_of_microbatch = run.batch_size.micro_batch_size
        return own * samples_of_microbatch / self.meter.step.global_batch_size


def routers(run: Run) -> Iterator[TopKRouter]:
    """Those of this process's layers."""
    for chunk in run.model:
        yield from (module for module in chunk.module.modules() if isinstance(module, TopKRouter))
