# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts in place of an MLP.

    y = sum of w_e expert_e(x) over the k experts that the router gives a token, plus the shared expert's output

With --moe-latent-size experts work on narrow vectors, for which less is sent and multiplied:

    y = U sum of w_e expert_e(D x)            D and U: projections that all experts of the layer have in common

Router and shared expert read x itself.

Tokens are divided over all processes of a stage that see the same samples: with sequence parallelism they are so
already, otherwise the layer divides them over the tensor-parallel group and gathers the outputs. So no token is worked
on twice, and experts may be laid out over the stage's processes in any way.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.taken_arguments import take_arguments
from megatron.core.tensor_parallel.layers import LayerOutput, ReplicatedLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.initialisers import input_initialiser, output_initialiser
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import Experts
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.routing import Routing
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import build_token_dispatcher
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class MoESubmodules:
    """The parts of a mixture of experts that may be exchanged: specs or classes."""

    shared_experts: Any
    """A ModuleSpec of SharedExpertMLP, whose `gate` must be what the config says; or its MLPSubmodules."""
    router: Any = TopKRouter
    experts: Any = Experts
    latent_projection: Any = ReplicatedLinear


class MoELayer(MegatronModule):
    """A mixture of experts: [s, b, h] -> [s, b, h]; no bias is left to be added."""

    recomputable: ClassVar[Mapping[str, tuple[str, ...]]] = {"shared_experts": ("moe",)}

    @take_arguments("* is_mtp_layer=... name=...")
    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        groups = pg_collection if pg_collection is not None else ProcessGroupCollection.current()
        self.tp_group = groups.tp
        self.divides_tokens = groups.tp.size() > 1 and not config.sequence_parallel
        self.router = submodules.router(config, groups, layer_number=layer_number)
        # Names as in upstream's models.
        self.fc1_latent_proj = self.fc2_latent_proj = None
        if config.moe_latent_size is not None:
            assert config.hidden_size is not None
            project = functools.partial(
                build_module,
                submodules.latent_projection,
                config=config,
                tp_group=groups.tp,
                bias=config.add_bias_linear,
                splits_tokens=True,
            )
            narrow, wide = config.moe_latent_size, config.hidden_size
            self.fc1_latent_proj = project(wide, narrow, init_method=input_initialiser(config))
            self.fc2_latent_proj = project(narrow, wide, init_method=output_initialiser(config))
        self._loss_names: tuple[str, ...] = ()
        self.experts = submodules.experts(config, groups)
        self.dispatcher = build_token_dispatcher(config, groups)
        self.exchange_gap = self.dispatcher.exchange_gap  # where the executor looks for it
        self.shared_experts: SharedExpertMLP | None = None
        if config.moe_shared_expert_intermediate_size is not None:
            spec = submodules.shared_experts
            if isinstance(spec, MLPSubmodules):
                spec = ModuleSpec(SharedExpertMLP, submodules=spec)
            self.shared_experts = build_module(spec, config=config, pg_collection=groups)
        self.overlaps_shared_experts = config.moe_shared_expert_overlap and self.shared_experts is not None

    def train(self, mode: bool = True) -> Self:
        """Set the mode; tells the dispatcher, since ranks may have different numbers of tokens only in evaluation."""
        self.dispatcher.evaluates = not mode
        return super().train(mode)

    def forward(self, hidden_states: Tensor, routed: tuple[Tensor, Routing] | None = None) -> LayerOutput:
        """Hidden states [s, b, h], with SP [s/tp, b, h] -> the same shape, and None in place of a bias. routed: where
        `route` has been called already, what `take_routing` made of it."""
        shared: Tensor | None = None

        def compute_shared_output() -> None:
            nonlocal shared
            shared = self._compute_shared_output(hidden_states)

        meanwhile = compute_shared_output if self.overlaps_shared_experts else None
        if routed is None:
            own = self._take_own_tokens(hidden_states)
            routed = self._choose_sent(own), self.router(own)
        rows, weights, ends, combine = self.dispatcher.dispatch(*routed, meanwhile)
        output = combine(self.experts(rows, weights, ends))
        if self.fc2_latent_proj is not None:
            # Of [T, n]: what it makes of three dimensions is a view, to which no residual may be added in place.
            output, _ = self.fc2_latent_proj(output)
        # Local tokens. Not view(): the residual is added in place, and a view that is written to loses its hooks,
        # through which FSDP gathers weights.
        output = torch.ops.aten._unsafe_view(output, [-1, *hidden_states.shape[1:]])
        if self.divides_tokens:
            # All ranks go on with the same full output, so that each has the full gradient of its part.
            output = gather_from_sequence_parallel_region(output, False, self.tp_group)
        if self.shared_experts is not None:
            output = output + (self._compute_shared_output(hidden_states) if shared is None else shared)
        return output, None

    def _take_own_tokens(self, hidden_states: Tensor) -> Tensor:
        # Without sequence parallelism all tensor-parallel ranks have all tokens: each takes its share, or every token
        # would be worked on tp times.
        if not self.divides_tokens:
            return hidden_states
        # A copy: what is kept for backward of a view would keep the tokens of all ranks.
        return scatter_to_sequence_parallel_region(hidden_states, self.tp_group).clone()

    def _choose_sent(self, own: Tensor) -> Tensor:
        """Return what experts get of a token: [s, b, h] -> [T, h], or narrower."""
        return (own if self.fc1_latent_proj is None else self.fc1_latent_proj(own)[0]).flatten(0, 1)

    @property
    def can_route_apart(self) -> bool:
        """True if `route` is there: a router of somebody else's says nothing about its losses and counts."""
        return type(self.router) is TopKRouter

    def route(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """The router's part of forward, for a recording: tensors that `take_routing` reads."""
        own = self._take_own_tokens(hidden_states)
        sent = self._choose_sent(own)
        routing, logits, losses = self.router.route(own)
        self._loss_names = tuple(losses)
        kept = () if routing.kept is None else (routing.kept,)
        return sent, routing.experts, routing.weights, logits, *losses.values(), *kept

    def take_routing(self, hidden_states: Tensor, routed: Sequence[Tensor]) -> tuple[Tensor, Routing]:
        """Return what forward needs of `route`; counts the microbatch."""
        (sent, experts, weights, logits), rest = routed[:4], routed[4:]
        count = len(self._loss_names)
        routing = Routing(experts, weights, rest[count] if len(rest) > count else None)
        # A log keeps the tokens themselves.
        own = hidden_states if self.router.route_log is None else self._take_own_tokens(hidden_states)
        self.router.note(own, routing, logits, dict(zip(self._loss_names, rest[:count], strict=True)))
        return sent, routing

    def _compute_shared_output(self, hidden_states: Tensor) -> Tensor:
        """[s, b, h], with SP [s/tp, b, h] -> the same shape. From the undivided input: the shared expert is
        tensor-parallel itself, and takes what any MLP takes."""
        assert self.shared_experts is not None
        compute = self.shared_experts.compute_output
        output: Tensor = (
            checkpoint(compute, False, hidden_states) if "shared_experts" in self.recomputed else compute(hidden_states)
        )
        return output
