# SPDX-License-Identifier: Apache-2.0
"""The router: a token's logits, the experts it gets, and the losses that keep the experts busy alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.auxiliary_loss import AuxiliaryLossScale, attach_auxiliary_loss, is_recomputing
from megatron.core.collectives import all_gather_into_tensor, all_reduce
from megatron.core.context_parallel.sharding import to_rank_order, to_sequence_order
from megatron.core.errors import ConfigError
from megatron.core.plan.read import read_plan
from megatron.core.process_groups_config import Group, ProcessGroupCollection
from megatron.core.taken_arguments import take_arguments
from megatron.core.tensor_parallel.parameters import (
    Initialiser,
    declare_parameter,
    draw_values,
    parameter_dtype,
    zeros,
)
from megatron.core.tensor_parallel.products import has_wide_product, multiply_wide
from megatron.core.tensor_parallel.random import EXPERT_PARALLEL_STREAM, get_cuda_rng_tracker
from megatron.core.transformer.compiled_regions import Compile
from megatron.core.transformer.config_fields.moe import MoEFields
from megatron.core.transformer.initialisers import few_outputs_initialiser
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.load_balancing import compute_balance_loss, compute_z_loss, mark_choices
from megatron.core.transformer.moe.route_log import RouteLog
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.moe.routing import (
    Routing,
    choose_best,
    choose_experts,
    compute_affinities,
    find_even_bias,
    keep_within_capacity,
    score_choice,
    sinkhorn,
    weigh_chosen,
    weigh_experts,
)
from megatron.core.transformer.transformer_config import TransformerConfig

# Put here by a table of upstream's names; declared for type checkers.
MoEAuxLossAutoScaler: Any

LOSS_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    "z_loss": "z_loss",
}
"""Kind of auxiliary loss -> its name in the log."""


def read_loss_coefficients(config: MoEFields) -> dict[str, float]:
    """Read the weights of the auxiliary losses: kind of loss, as in LOSS_NAMES -> its weight."""
    balancing = zip(config.moe_router_load_balancing_type, config.moe_aux_loss_coeff, strict=False)
    found = {kind: coefficient for kind, coefficient in balancing if kind in LOSS_NAMES}
    # z_loss is no balancing loss and has a separate flag; here they join because both hang on the same weights.
    return found | ({"z_loss": config.moe_z_loss_coeff} if config.moe_z_loss_coeff else {})


class RouterArithmetic(NamedTuple):
    """Functions of numbers for each token and expert; see routing.py and load_balancing.py."""

    weigh: Callable[..., Tensor] = weigh_chosen
    compute_affinities: Callable[..., Tensor] = compute_affinities
    compute_balance_loss: Callable[..., Tensor] = compute_balance_loss
    compute_z_loss: Callable[..., Tensor] = compute_z_loss


class TopKRouter(MegatronModule):
    """[s, b, h] -> Routing of T = s * b tokens.

    Each process routes the tokens that only it has. `expert_bias` [E] is a parameter without gradient, so that
    checkpoints keep it; `finish_step` moves it after a step. `losses` sums up the auxiliary losses, by name, of this
    process's tokens since `take_losses` was called.
    """

    @take_arguments("config pg_collection is_mtp_layer=...")
    def __init__(
        self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None, layer_number: int = 1
    ) -> None:
        super().__init__(config)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.current()
        assert config.num_moe_experts is not None and config.hidden_size is not None
        self.layer_number = layer_number
        self.num_experts, self.topk = config.num_moe_experts, config.moe_router_topk
        self.groups = pg_collection
        self.auxiliary_loss_scale = AuxiliaryLossScale()
        self.weight = declare_parameter(
            (self.num_experts, config.hidden_size),
            kind="router",
            init=self._choose_initialiser(config),
            dtype=parameter_dtype(config),
            # Tensor-parallel ranks route different tokens.
            partial_grad_axes=("tp",) if pg_collection.tp.size() > 1 else (),
        )
        self.bias: Tensor | None = None
        if config.moe_router_add_bias:
            self.bias = declare_parameter(
                (self.num_experts,),
                kind="vector",
                init=zeros,
                dtype=parameter_dtype(config),
                partial_grad_axes=("tp",) if pg_collection.tp.size() > 1 else (),
            )
        self.product_dtype = {"fp32": torch.float32, "fp64": torch.float64, None: None}[config.moe_router_dtype]
        self.expert_bias: Tensor | None = None
        self.tid2eid: Tensor | None = None
        """Of a layer without a choice the experts of each token of the vocabulary, int64 [vocabulary, k]."""
        self.token_ids: Tensor | None = None
        """Of such a layer the tokens of this moment, [b, s], which the model writes."""
        layers = [layer.number for layer in read_plan(config).layers if layer.has("experts")]
        if layer_number in layers[: config.moe_n_hash_layers]:
            rows = config.actual_vocab_size or 0
            self.tid2eid = declare_parameter((rows, self.topk), kind="vector", init=self._fill_table, dtype=torch.int64)
        self.finds_bias = config.has_expert_bias and not config.moe_router_enable_expert_bias
        if config.has_expert_bias and self.tid2eid is None:
            self.expert_bias = declare_parameter((self.num_experts,), init=zeros).requires_grad_(False)
        self.arithmetic = RouterArithmetic()
        self.losses: dict[str, Tensor] = {}
        self._tokens_per_expert: Tensor | None = None
        """[E], tokens of this process that chose each expert since the bias was last updated."""
        self._even_biases: Tensor | None = None
        """[E + 1], for quantile_balancing: the sum of each microbatch's even bias since then, and their number."""
        self._load: Tensor | None = None
        """[E + 1], for the log: the same since it was last taken, and how many of these choices were dropped."""
        self.route_log: RouteLog | None = None
        """Log that this step's choices are noted in, or come from; see training/hooks/routes.py."""
        self.router_replay = RouterReplay() if config.moe_enable_routing_replay else None
        self._step_counts = (0, torch.empty(0), 0)
        """For global_aux_loss: the step, tokens that chose each expert in it, its microbatches so far."""

    def set_layer_number(self, layer_number: int) -> None:
        """Set the number of the layer, from 1."""
        self.layer_number = layer_number

    def compile_regions(self, compiled: Compile[Any]) -> None:
        """See compiled_regions.py. The choice itself is not compiled: where backward repeats it, it must be the same
        to the last bit, and a graph with gradients may round in another way than one without."""
        self.arithmetic = RouterArithmetic(*map(compiled, self.arithmetic))

    def _choose_initialiser(self, config: TransformerConfig) -> Initialiser:
        """Choose the initialiser of layers with few outputs; where neighbours are slices of one dense MLP, they have
        one row, so that a token chooses all of them."""
        init, slices = few_outputs_initialiser(config), config.moe_upcycling_granularity
        if not config.moe_use_upcycling or self.topk % slices:
            return init

        def fill(tensor: Tensor, generator: torch.Generator) -> None:
            draw_values(init, tensor, generator, generator.initial_seed())
            tensor.copy_(tensor[::slices].repeat_interleave(slices, dim=0))

        return fill

    def _fill_table(self, tensor: Tensor, generator: torch.Generator) -> None:
        """Neighbours in the vocabulary have neighbouring experts."""
        experts = torch.arange(tensor.shape[0])[:, None] + torch.arange(tensor.shape[1])
        tensor.copy_(experts % self.num_experts)

    def _look_up(self, tokens: int) -> Tensor:
        """The experts of this process's tokens, [T, k], by the table."""
        assert self.tid2eid is not None and self.token_ids is not None, (
            "the model says the tokens before its layers run"
        )
        ids = self.token_ids.t()  # [s, b]
        parts = ids.numel() // tokens  # tensor-parallel ranks route different tokens
        own = ids.chunk(parts)[self.groups.tp.rank()] if parts > 1 else ids
        return self.tid2eid[own.flatten()]

    def forward(self, hidden_states: Tensor) -> Routing:
        """Route hidden states [s, b, h]: the experts and weights of their T = s * b tokens."""
        routing, logits, shares = self.route(hidden_states)
        self.note(hidden_states, routing, logits, shares)
        return routing

    def route(self, hidden_states: Tensor) -> tuple[Routing, Tensor, dict[str, Tensor]]:
        """`forward` without what `note` does; also the logits [T, E], and the auxiliary losses by name."""
        logits = self.compute_logits(hidden_states)
        if self.config.moe_router_force_biased is not None:
            logits = logits + self._draw_bias(logits, self.config.moe_router_force_biased)
        routing, shares = self._choose(logits), dict[str, Tensor]()
        if self.router_replay is not None:
            self.router_replay.note(routing.experts)
        # Losses hang on the weights, which lie on the way from the main loss to the router; and before tokens are
        # dropped: what the router wanted is to be balanced, not what it got.
        if self.learns and self.tid2eid is None:
            weights, shares = self._with_losses(logits, hidden_states.shape[1], routing.weights)
            routing = routing._replace(weights=weights)
        if self.config.drops_tokens:
            routing = routing._replace(kept=self._keep_within_capacity(routing, hidden_states.shape[1]))
        return routing, logits.detach(), shares

    @property
    def learns(self) -> bool:
        """True if this forward counts: in evaluation, and without a graph, losses would be summed and never used."""
        return self.training and torch.is_grad_enabled()

    def note(self, hidden_states: Tensor, routing: Routing, logits: Tensor, shares: Mapping[str, Tensor]) -> None:
        """Count a microbatch that `route` has routed; what is computed again in backward has been counted."""
        if not self.learns or is_recomputing():
            return
        for name, share in shares.items():
            self.losses[name] = self.losses.get(name, 0.0) + share
        self._count_tokens(routing, logits)
        if self.route_log is not None:
            self.route_log.note(hidden_states, logits, routing.experts)

    def _count_tokens(self, routing: Routing, logits: Tensor) -> None:
        """Add this microbatch's tokens per expert to the step's, where the bias or the log needs them."""
        config = self.config
        if self.expert_bias is not None and self.finds_bias:
            scores = _take_rows(score_choice(logits.detach(), config), self.groups.tp_cp)
            even = torch.cat((find_even_bias(scores, self.expert_bias, self.topk), self.expert_bias.new_ones(1)))
            self._even_biases = even if self._even_biases is None else self._even_biases + even
        if self.expert_bias is None and not config.moe_per_layer_logging:
            return
        counts = torch.zeros_like(logits, dtype=torch.int64).scatter_(1, routing.experts, 1).sum(dim=0)  # [E]
        if self.expert_bias is not None:
            self._tokens_per_expert = counts if self._tokens_per_expert is None else self._tokens_per_expert + counts
        if config.moe_per_layer_logging:
            dropped = counts.new_zeros(1) if routing.kept is None else (~routing.kept).sum().reshape(1)
            load = torch.cat((counts, dropped))
            self._load = load if self._load is None else self._load + load

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[s, b, h] -> [T, E], in the router's dtype."""
        x = hidden_states.flatten(0, 1)  # [T, h]
        eps = self.config.moe_input_jitter_eps
        if eps is not None and self.training:
            # Factors around one: logits near a tie are decided now one way, now the other, so that experts get
            # explored.
            x = x * _draw(functools.partial(torch.empty_like(x).uniform_, 1.0 - eps, 1.0 + eps))
        if self.product_dtype == torch.float32 and has_wide_product(x, self.weight):
            logits = multiply_wide(x, self.weight)
            return logits if self.bias is None else logits + self.bias
        if self.product_dtype is not None:
            bias = None if self.bias is None else self.bias.to(self.product_dtype)
            return F.linear(x.to(self.product_dtype), self.weight.to(self.product_dtype), bias)
        return F.linear(x, self.weight, self.bias)

    def _route(self, logits: Tensor, learns: bool) -> Routing:
        config = self.config
        given = None
        # Where backward computes this again, another microbatch's turn has come since.
        if self.route_log is not None and learns:
            given = get_cuda_rng_tracker().decide_once(self.route_log.take)
        elif self.router_replay is not None:
            take = functools.partial(self.router_replay.take, len(logits), self.topk)
            given = get_cuda_rng_tracker().decide_once(take)
        if given is None and self.tid2eid is not None:
            given = get_cuda_rng_tracker().decide_once(functools.partial(self._look_up, len(logits)))
        if config.moe_router_force_load_balancing:
            drawn = _draw(functools.partial(torch.empty_like(logits).normal_))
            # Random choices, but the gradient of the logits as it would be without them.
            return choose_experts(drawn + logits - logits.detach(), config, given=given, weigh=self.arithmetic.weigh)
        if "sinkhorn" in config.moe_router_load_balancing_type:
            assigned = logits.detach()
            if self.training:
                # Balanced over the whole microbatch, so that its choices do not depend on how it is divided.
                assigned = sinkhorn(_take_rows(assigned.float(), self.groups.tp_cp))[self._own_rows(logits)]
            experts = choose_best(assigned, self.topk) if given is None else given
            return weigh_experts(logits, experts, config)
        return choose_experts(logits, config, self.expert_bias, given, self.arithmetic.weigh)

    def routing(self, logits: Tensor, padding_mask: None = None) -> tuple[Tensor, Tensor]:
        """(weights [T, E], 0 where an expert is not chosen; map [T, E] bool) for logits [T, E]. Where a program
        replaces this method, forward takes the replacement's choice. Raises ConfigError for a padding_mask."""
        if padding_mask is not None:
            raise ConfigError("TopKRouter.routing() has no padding_mask; leave padding tokens out")
        experts, weights, _ = self._route(logits, self.learns)
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
        return torch.zeros_like(logits, dtype=weights.dtype).scatter(1, experts, weights), chosen

    def _choose(self, logits: Tensor) -> Routing:
        if type(self).routing is _OWN_ROUTING:
            return self._route(logits, self.learns)
        weights, chosen = self.routing(logits)
        experts = chosen.int().argsort(dim=1, descending=True, stable=True)[:, : self.topk]
        return Routing(experts, weights.gather(1, experts))

    def _draw_bias(self, logits: Tensor, std: float) -> Tensor:
        """A random number for each expert, [E]: the same on all ranks that have this layer, and in every microbatch
        where `std` is negative."""
        if std < 0:
            generator = torch.Generator(logits.device).manual_seed(self.layer_number)
            return logits.new_empty(self.num_experts).normal_(0.0, -std, generator=generator)
        # torch's default stream, which ranks have in common; what is computed again draws the same.
        return logits.new_empty(self.num_experts).normal_(0.0, std)

    def _keep_within_capacity(self, routing: Routing, sequences: int) -> Tensor:
        """Return which choices fit into the capacity of experts and ranks, bool [T, k], decided for the whole
        microbatch on every process alike."""
        group, cp = self.groups.tp_cp, self.groups.cp.size()
        # Capacity is a bound on the microbatch: a rank that decided alone would drop others than the undivided run.
        # Tokens are in the order of the sequence, of which context-parallel ranks have a piece from either end.
        experts, weights = (
            to_sequence_order(_take_rows(rows, group).unflatten(0, (-1, sequences)), cp).flatten(0, 1)
            for rows in (routing.experts, routing.weights.detach())
        )
        kept = keep_within_capacity(experts, weights, self.config)
        return to_rank_order(kept.unflatten(0, (-1, sequences)), cp).flatten(0, 1)[self._own_rows(routing.experts)]

    def _own_rows(self, rows: Tensor) -> slice:
        """Return where this process's tokens are in the microbatch, as `_take_rows` puts them together."""
        start = self.groups.tp_cp.rank() * rows.shape[0]
        return slice(start, start + rows.shape[0])

    # ---- losses

    def _with_losses(self, logits: Tensor, sequences: int, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Attach the auxiliary losses to the weights [T, k]: backward of the weights then also runs theirs. Also the
        losses by name."""
        shares: dict[str, Tensor] = {}
        tokens = logits.shape[0] * self.groups.tp_cp.size()
        for name, coefficient, share in self._loss_shares(logits, sequences, tokens):
            shares[name] = share.detach()
            # Where gradients are divided by all tokens in the end, a microbatch counts as much as it has tokens.
            counted = coefficient * share * (tokens if self.config.calculate_per_token_loss else 1)
            weights = attach_auxiliary_loss(weights, counted, self.auxiliary_loss_scale)
        return weights, shares

    def _loss_shares(self, logits: Tensor, sequences: int, tokens: int) -> Iterator[tuple[str, float, Tensor]]:
        """Name, weight and value, for this process's tokens, of each auxiliary loss whose weight is not zero."""
        coefficients = read_loss_coefficients(self.config)
        z_coefficient = coefficients.pop("z_loss", 0.0)
        if any(coefficients.values()):
            affinities = self.arithmetic.compute_affinities(logits, self.config.moe_router_score_function)
            chosen = mark_choices(affinities, self.topk)
            for kind, coefficient in coefficients.items():
                if coefficient:
                    share = self._compute_balance_loss(kind, affinities, chosen, sequences, tokens)
                    yield LOSS_NAMES[kind], coefficient, share
        if z_coefficient:
            yield LOSS_NAMES["z_loss"], z_coefficient, self.arithmetic.compute_z_loss(logits, tokens)

    def _compute_balance_loss(
        self, kind: str, affinities: Tensor, chosen: Tensor, sequences: int, tokens: int
    ) -> Tensor:
        """Balanced are the experts of each sequence (seq_aux_loss), of the microbatch (aux_loss) or of all microbatches
        of the step so far, on all replicas (global_aux_loss). affinities, chosen: [T, E]."""
        if kind == "seq_aux_loss":
            affinities, chosen = (x.unflatten(0, (-1, sequences)) for x in (affinities, chosen))  # [s, b, E]
            tokens //= sequences
        tokens_per_expert = chosen.sum(dim=0)  # [E] or [b, E]
        if kind != "global_aux_loss":
            all_reduce(tokens_per_expert, self.groups.tp_cp)
            return self.arithmetic.compute_balance_loss(affinities, tokens_per_expert, tokens, self.topk)
        # Where backward computes this again, other microbatches have been counted since.
        mean = get_cuda_rng_tracker().decide_once(functools.partial(self._find_mean_counts, tokens_per_expert))
        return self.arithmetic.compute_balance_loss(affinities, mean, tokens, self.topk)

    def _find_mean_counts(self, tokens_per_expert: Tensor) -> Tensor:
        """Mean tokens per expert of a microbatch of this step so far, [E], over all replicas; counts this process's,
        [E], among them."""
        all_reduce(tokens_per_expert, self.groups.tp_dp_cp)
        step, summed, microbatches = self._step_counts
        # Counts of earlier microbatches have no gradient, so that the sum over the step is a constant for this one.
        if step == self.auxiliary_loss_scale.step and microbatches:
            tokens_per_expert, microbatches = tokens_per_expert + summed, microbatches + 1
        else:
            microbatches = 1
        self._step_counts = (self.auxiliary_loss_scale.step, tokens_per_expert, microbatches)
        # The loss is of one microbatch of this replica, so it takes the mean count of a microbatch over all replicas.
        return tokens_per_expert / (microbatches * self.groups.dp.size())

    def take_losses(self) -> dict[str, Tensor]:
        """Return the sums of the auxiliary losses by name, and start new ones."""
        taken, self.losses = self.losses, {}
        return taken

    def take_load(self) -> Tensor | None:
        """Return int64 [E + 1], how many of this process's tokens chose each expert since the last call, and how many
        of these choices capacity has dropped; None where there were none, or without --moe-per-layer-logging."""
        taken, self._load = self._load, None
        return taken

    # ---- bias

    @torch.no_grad()
    def finish_step(self, groups: ProcessGroupCollection) -> None:
        """Move each bias by the update rate: up for experts that fewer tokens chose in this step than on average, down
        for the others (Wang et al., 2024, algorithm 1). Every process that holds this layer calls it; see
        `finalize_model_grads`."""
        # Where the router is frozen (--freeze-base-for-mtp), its choices stay, too.
        if self.expert_bias is None or not self.weight.requires_grad:
            self._tokens_per_expert = self._even_biases = None
            return
        if self.finds_bias:
            self._take_mean_bias(self.expert_bias, groups)
            return
        tokens_per_expert = self._tokens_per_expert
        if tokens_per_expert is None:
            # Without a microbatch a process still takes part in the all-reduce.
            tokens_per_expert = torch.zeros(self.num_experts, dtype=torch.int64, device=self.expert_bias.device)
        self._tokens_per_expert = None
        all_reduce(tokens_per_expert, groups.tp_dp_cp)
        # Times the number of experts instead of divided by it: in whole numbers an exact balance has the sign 0.
        missing = tokens_per_expert.sum() - tokens_per_expert * self.num_experts
        self.expert_bias.add_(missing.sign(), alpha=self.config.moe_router_bias_update_rate)

    def _take_mean_bias(self, bias: Tensor, groups: ProcessGroupCollection) -> None:
        """Move the bias to the mean of the even biases of this step's microbatches, on all replicas."""
        summed, self._even_biases = self._even_biases, None
        if summed is None:
            summed = bias.new_zeros(self.num_experts + 1)
        all_reduce(summed, groups.tp_dp_cp)
        mean = summed[:-1] / summed[-1].clamp(min=1.0)
        kept = torch.where(summed[-1] > 0, self.config.moe_router_quantile_balancing_ema, 1.0)
        bias.copy_(torch.lerp(mean, bias, kept.to(bias.dtype)))


def tell_tokens(module: nn.Module, ids: Tensor) -> None:
    """Let routers that choose by a table know the tokens of what a module is about to compute, [b, s]."""
    for part in module.modules():
        if isinstance(part, TopKRouter) and part.tid2eid is not None:
            part.token_ids = ids


_OWN_ROUTING = TopKRouter.routing


def _take_rows(rows: Tensor, group: Group) -> Tensor:
    """The rows of all ranks of the group, one rank's after another's: [n, ...] -> [ranks * n, ...]."""
    if group.size() == 1:
        return rows
    whole = rows.new_empty(group.size() * rows.shape[0], *rows.shape[1:])
    all_gather_into_tensor(whole, rows.contiguous(), group)
    return whole


def _draw(draw: functools.partial[Tensor]) -> Tensor:
    """Random numbers that differ from process to process: processes route different tokens, and must not jitter them
    alike."""
    tracker = get_cuda_rng_tracker()
    if not tracker.is_initialized():
        return draw()
    with tracker.fork(EXPERT_PARALLEL_STREAM):
        return draw()
