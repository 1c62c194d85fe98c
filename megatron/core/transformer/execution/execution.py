# SPDX-License-Identifier: Apache-2.0
"""The one reader of a config's settings for recomputation, offloading, chunks, graphs and dtypes of layers.

A layer is built as its formula says, and then equipped: its modules are told what backward computes again and what is
offloaded, its linear layers get other products, and its branches get runners (branch_runner.py). The stage that runs
the layers goes on with the Execution of the first of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megatron.core.device import current_device
from megatron.core.device_graphs import Recorder
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.offloaded_activations import Offloader, offload
from megatron.core.transformer.execution.activation_policy import ActivationPolicy, Unit, divide_layers
from megatron.core.transformer.execution.branch_runner import (
    ComputedAgain,
    InChunks,
    NormalisedAgain,
    OneNorm,
    Parallel,
    RecordedBranch,
    RecordedLayer,
    RecordedRouter,
    Runner,
)
from megatron.core.transformer.execution.cuda_graphs import Passes
from megatron.core.transformer.execution.fp8_layers import multiply_in_fp8
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.residual_branch import JoinedBranches, ResidualBranch
from megatron.core.transformer.transformer_config import TransformerConfig

_NORM_PARTS = {"attention": "attn_norm", "mlp": "mlp_norm", "moe": "mlp_norm"}
"""Kind of a branch -> the name of its norm in --offload-modules."""
_GRAPH_PARTS = {"attention": "attn", "mlp": "mlp", "moe": "moe_router"}
"""Kind of a branch -> what of it --cuda-graph-modules may name."""


class Execution:
    """Recomputation, offloading, chunks and graphs around the formula of layers with one config."""

    open_pass: Callable[[], AbstractContextManager[Any]] = staticmethod(nullcontext)
    """Open the context in which a pass through all layers of a stage runs."""
    fuses_norms = False
    """True where norms are parts of the products that a library computes after them."""

    def __init__(self, config: TransformerConfig) -> None:
        self.config, self.policy = config, ActivationPolicy(config)
        self.divides_unit_inputs = config.distribute_saved_activations

    # ---- a layer

    def equip(self, layer: Any, groups: ProcessGroupCollection) -> None:
        """Tell the parts of a TransformerLayer, which are built, what is asked of them, and choose its runners."""
        offloads = self.policy.offloads_parts
        for part in layer.modules():
            if isinstance(part, MegatronModule):
                if offloads:
                    part.offload = offload
                part.recomputed = frozenset(
                    name for name, within in part.recomputable.items() if self.policy.recomputes(name, within)
                )
        if self.config.few_bits_recipe is not None:
            self.multiply_in_few_bits(layer, groups)
        self.exchange_parts(layer)
        for branch in layer.branches:
            self._wrap(branch)
        self.choose_runners(layer)

    def multiply_in_few_bits(self, layer: Any, groups: ProcessGroupCollection) -> None:
        """Have the linear layers multiply in FP8 or FP4, where this layer is one that does."""
        if layer.plan.low_precision:
            keeps = self.policy.keeps_rounded_input
            layer.fp8_products = multiply_in_fp8(layer, self.config, groups, layer.plan.name, keeps)

    def exchange_parts(self, layer: Any) -> None:
        """Let a library compute parts of a layer; here none does."""

    def _wrap(self, branch: ResidualBranch) -> None:
        policy, kind = self.policy, branch.kind
        if policy.offloads_parts:
            branch.around_norm = functools.partial(offload, _NORM_PARTS[kind])
        # From the inside to the outside.
        if policy.recomputes(kind):
            branch.body = ComputedAgain(branch.body)
        if kind == "mlp" and self.config.mlp_chunks_for_training > 1:
            branch.body = InChunks(branch.body, branch.name, branch.parts, self.config.mlp_chunks_for_training)
        if policy.recomputes("layernorm") and branch.norm is not None:
            branch.body = NormalisedAgain(branch.body, branch.norm_name, branch.parts, _NORM_PARTS[kind])

    def choose_runners(self, layer: Any) -> None:
        """Choose who calls the branches of a TransformerLayer."""
        adds = [branch.add for branch in layer.branches]
        if any(branch.options.norm == "shared" for branch in layer.plan.branches):
            layer.runners = (OneNorm(layer.branches),)
        elif self.config.parallel_residual:
            layer.runners = (Parallel(adds),)
        elif len(adds) == 2 and all(branch.joins for branch in layer.branches):
            layer.runners = (JoinedBranches(*layer.branches),)
        else:
            layer.runners = adds

    # ---- a stage

    def divide_layers(self, layers: int) -> list[Unit]:
        """See activation_policy.py."""
        return divide_layers(self.config, layers)

    def build_offloader(self, stage: int) -> Offloader | None:
        """Build the mover of activations to the host for a pipeline stage, from 0; None where nothing goes."""
        choice = self.policy.choose_offload(stage)
        return None if choice is None else Offloader(choice)

    @property
    def recomputes_prediction(self) -> bool:
        """True where full recomputation covers layers after the decoder's: each is a separate unit, about which
        `block`, counting the layers of a stage, says nothing."""
        return self.config.recompute_granularity == "full" and self.config.recompute_method == "uniform"

    def open_passes(self, recorder: Recorder) -> Passes:
        """Begin the passes of a stage whose layers are launched as CUDA graphs."""
        return Passes(recorder, self.config.cuda_graph_warmup_steps)

    def record(self, layer: Any, passes: Passes, *, is_recomputed: bool) -> None:
        """Let passes be recorded, of the parts that the config names or of the whole TransformerLayer. is_recomputed:
        whether of the whole layer only the input is kept."""
        if not self.config.cuda_graph_modules:
            part = passes.add(*layer.children())
            layer.runners = (RecordedLayer(layer.runners, part, is_recomputed=is_recomputed),)
            return
        recorded = [self._record_branch(branch, passes) for branch in layer.branches]
        if any(recorded):
            each = [found or branch.add for found, branch in zip(recorded, layer.branches, strict=True)]
            layer.runners = (Parallel(each),) if self.config.parallel_residual else each

    def _record_branch(self, branch: ResidualBranch, passes: Passes) -> Runner | None:
        if _GRAPH_PARTS[branch.kind] not in self.config.cuda_graph_modules:
            return None
        if branch.kind != "moe":
            return RecordedBranch(branch, passes.add(*branch.modules))
        experts = branch.parts[branch.name]
        if not getattr(experts, "can_route_apart", False):
            return None
        router = experts.router
        modules = (branch.norm, router, experts.fc1_latent_proj)
        part = passes.add(*(module for module in modules if module is not None))
        router.auxiliary_loss_scale.keep_address(current_device())
        return RecordedRouter(branch, part)
