# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: how many, who gets which token, and what keeps them busy alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.config_base import flag, name_divisors, name_multiples
from megatron.core.flag_texts import layer_pattern
from megatron.core.setting import Needs
from megatron.core.transformer.config_fields.architecture import ArchitectureFields

# What a flag needs to have any effect; a flag that is given without it is refused, not ignored.
_EXPERTS = Needs("--num-experts", lambda run: run.num_moe_experts is not None)
_AUXILIARY_LOSS = Needs(
    "--moe-router-load-balancing-type aux_loss",
    lambda run: any(kind.endswith("aux_loss") for kind in run.moe_router_load_balancing_type),
)
_SOFTMAX = Needs("--moe-router-score-function softmax", lambda run: run.moe_router_score_function == "softmax")
_EXPERT_BIAS = Needs("--moe-router-enable-expert-bias", lambda run: run.moe_router_enable_expert_bias)
_QUANTILE = Needs(
    "--moe-router-load-balancing-type quantile_balancing",
    lambda run: "quantile_balancing" in run.moe_router_load_balancing_type,
)
_GROUP_TOPK = Needs("--moe-router-group-topk", lambda run: run.moe_router_group_topk is not None)
_CHOICE_BY_SCORE = Needs(
    "a --moe-router-load-balancing-type other than sinkhorn",
    lambda run: "sinkhorn" not in run.moe_router_load_balancing_type,
)
_GATED = Needs("--swiglu, or another gated activation", lambda run: run.gated_linear_unit)
_SHARED = Needs(
    "--moe-shared-expert-intermediate-size", lambda run: run.moe_shared_expert_intermediate_size is not None
)
_LOADING = Needs("--load or --pretrained-checkpoint", lambda run: run.load or run.pretrained_checkpoint)
_HASHED = Needs("--moe-n-hash-layers", lambda run: bool(run.moe_n_hash_layers))
_CAPACITY = Needs(
    "--moe-expert-capacity-factor or --moe-expert-rank-capacity-factor",
    lambda run: run.moe_expert_capacity_factor is not None or run.moe_expert_rank_capacity_factor is not None,
)

CAPACITY_FACTORS = ("moe_expert_capacity_factor", "moe_expert_rank_capacity_factor")


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class MoEFields(ArchitectureFields):
    """Mixture of experts."""

    num_moe_experts: int | None = flag(None, minimum=0, names=("--num-experts",), kind="shape")
    """Experts of a layer, over all processes; a dense MLP when not given or 0."""
    moe_layer_freq: int | list[int] = flag(1, parse=layer_pattern, kind="shape", needs=_EXPERTS)
    """Layers with experts: every n-th beginning with the first, or one entry per layer such as ([0]*3+[1]*24), 1 for
    experts."""
    moe_router_load_balancing_type: list[str] = flag(
        default_factory=lambda: ["aux_loss"],
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "none"),
        kind="numerics",
        needs=_EXPERTS,
    )
    """Method that balances the load of experts: a loss over each microbatch (Fedus et al., 2021), over each sequence,
    or over the microbatches of a step so far; an even assignment by Sinkhorn's algorithm; a bias in the choice with
    which the last step's tokens would have been shared evenly (quantile_balancing); or nothing. Several may be
    named."""
    moe_aux_loss_coeff: list[float] = flag(
        default_factory=lambda: [0.0], minimum=0, kind="numerics", needs=(_EXPERTS, _AUXILIARY_LOSS)
    )
    """Weight of each loss that --moe-router-load-balancing-type names."""
    moe_ffn_hidden_size: int = flag(None, minimum=1, maximum=2**26, kind="shape", needs=_EXPERTS)
    """Inner width of an expert; --ffn-hidden-size when not given."""
    moe_router_add_bias: bool = flag(False, kind="shape", needs=_EXPERTS)
    """Add a bias that learns to the router's logits (gpt-oss)."""
    moe_router_topk: int = flag(2, minimum=1, kind="function", needs=_EXPERTS)
    """Experts that work on each token."""
    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus", "softmax-share"] = flag(
        "softmax", kind="function", needs=_EXPERTS
    )
    """From a token's logits to the scores of the experts; softmax-share is a softmax over all, whose chosen ones are
    divided by their sum (ERNIE 4.5, Mistral Small 4)."""
    moe_router_pre_softmax: bool = flag(False, kind="function", needs=(_EXPERTS, _SOFTMAX))
    """Softmax over all experts before the best are chosen; otherwise over the chosen ones, so that their weights add up
    to one."""
    moe_n_hash_layers: int = flag(0, minimum=0, unit="layers", kind="shape", needs=_EXPERTS)
    """The first layers with experts, so many, have no choice: a table that nothing trains says which experts work on a
    token, by its number in the vocabulary; scores only weigh them, and no loss balances them (DeepSeek-V4). They lie on
    the pipeline stage with the embedding."""
    actual_vocab_size: int | None = flag(None, minimum=1, unit="tokens", kind="shape", needs=(_EXPERTS, _HASHED))
    """Rows of the tables of --moe-n-hash-layers: the vocabulary, without padding."""
    moe_router_num_groups: int | None = flag(None, minimum=1, kind="function", needs=(_EXPERTS, _GROUP_TOPK))
    """Divide the experts into so many groups; --moe-router-group-topk says of how many a token may use experts."""
    moe_router_group_topk: int | None = flag(None, minimum=1, kind="function", needs=(_EXPERTS, _CHOICE_BY_SCORE))
    """Groups whose best experts score highest, to which a token is limited (DeepSeek-V2 and V3)."""
    moe_router_group_score: Literal["sum", "best", "two-best"] = flag(
        "sum", kind="function", needs=(_EXPERTS, _GROUP_TOPK)
    )
    """Score of a group of experts for a token: the sum of the scores of its k / groups best experts (DeepSeek-V3),
    the score of its best one (DeepSeek-V2), or the sum of its two best, whatever k and groups are."""
    moe_router_topk_scaling_factor: float | None = flag(None, above=0, kind="function", needs=_EXPERTS)
    """Factor on the weights of the chosen experts."""
    moe_router_dtype: str | None = flag(None, choices=("fp32", "fp64"), kind="numerics", needs=_EXPERTS)
    """Dtype of the router's product; the model's when not given. Scores are float32 or wider in any case."""
    moe_router_enable_expert_bias: bool = flag(False, kind="shape", needs=(_EXPERTS, _CHOICE_BY_SCORE))
    """Choose experts by score plus a bias that grows for experts with few tokens (Wang et al., 2024); the weights of
    the chosen ones are the scores without it."""
    moe_router_bias_update_rate: float = flag(1e-3, minimum=0, kind="numerics", needs=(_EXPERTS, _EXPERT_BIAS))
    """Amount that --moe-router-enable-expert-bias adds to or takes from each bias after a step."""
    moe_router_quantile_balancing_ema: float = flag(
        0.0, minimum=0, maximum=1, kind="numerics", needs=(_EXPERTS, _QUANTILE)
    )
    """Share of the old bias in the new one after a step; 0: only the last step decides."""
    moe_router_force_load_balancing: bool = flag(False, kind="function", needs=_EXPERTS)
    """Choose experts at random, to measure speed with equal loads."""
    moe_router_force_biased: float | None = flag(None, kind="function", needs=_EXPERTS)
    """Add a random number of this standard deviation to each expert's logits, the same for all tokens, to measure
    speed with uneven loads: another one in every microbatch; where negative, always the same."""
    moe_z_loss_coeff: float | None = flag(None, minimum=0, kind="numerics", needs=_EXPERTS)
    """Weight of the mean of log(sum(exp(logits)))^2 (Zoph et al., 2022), which keeps the router's logits small."""
    moe_input_jitter_eps: float | None = flag(None, above=0, maximum=1, kind="numerics", needs=_EXPERTS)
    """In training, multiply what the router reads by random numbers from 1 - eps to 1 + eps (Fedus et al., 2021)."""
    moe_expert_capacity_factor: float | None = flag(None, above=0, kind="function", needs=_EXPERTS)
    """An expert takes so many times its even share of a microbatch's tokens; it drops the others. All if not given."""
    moe_expert_rank_capacity_factor: float | None = flag(None, above=0, kind="function", needs=_EXPERTS)
    """An expert-parallel rank takes so many times its even share of a microbatch's choices, whichever of its experts
    they are of; it drops the others, after those that experts drop. All if not given."""
    moe_pad_expert_input_to_capacity: bool = flag(False, kind="kernel", needs=_EXPERTS)
    """Every expert gets as many rows as its capacity allows, zeros beyond its tokens: sizes do not depend on the
    routing, and the host waits for nothing."""
    moe_router_padding_for_quantization: bool = flag(
        False, aliases=("--moe-router-padding-for-fp8",), kind="kernel", needs=_EXPERTS
    )
    """Every expert gets a multiple of 16 rows, zeros beyond its tokens, as products of quantized numbers need them."""
    moe_token_drop_policy: str = flag(
        "probs", choices=("probs", "position"), kind="function", needs=(_EXPERTS, _CAPACITY)
    )
    """Whom a full expert, or rank, drops: the tokens with the smallest weights, or the last of the microbatch."""
    moe_shared_expert_intermediate_size: int | None = flag(None, minimum=1, maximum=2**26, kind="shape", needs=_EXPERTS)
    """Inner width of an MLP in addition to the experts that works on every token (DeepSeekMoE); none when not given."""
    moe_shared_expert_gate: bool = flag(False, kind="shape", needs=_EXPERTS)
    """Multiply the shared expert's output by the sigmoid of a learned projection of the token (Qwen 1.5 MoE)."""
    moe_shared_expert_overlap: bool = flag(False, kind="kernel", needs=(_EXPERTS, _SHARED))
    """Compute the shared expert while tokens travel to their experts (alltoall), in backward while their gradients
    travel back."""
    moe_latent_size: int | None = flag(None, minimum=1, maximum=2**26, kind="shape", needs=_EXPERTS)
    """Width of the vectors that experts read and write: one projection makes a token so narrow before it travels to its
    experts, another one widens the sum of their outputs. --hidden-size, without projections, when not given."""
    moe_apply_probs_on_input: bool = flag(False, kind="function", needs=_EXPERTS)
    """Multiply what goes into an expert by the router's weight instead of what comes out (Llama 4)."""
    moe_mlp_glu_interleave_size: int | None = flag(None, minimum=1, kind="function", needs=(_EXPERTS, _GATED))
    """The experts' first matrix has so many rows of the gate, as many of the up projection, and so on in turns; first
    all of the gate when not given. Checkpoints have the rows in that order."""
    moe_shared_expert_glu_interleave_size: int | None = flag(
        None, minimum=1, kind="function", needs=(_EXPERTS, _SHARED, _GATED)
    )
    """The same for the shared expert."""
    use_fused_weighted_squared_relu: bool = flag(False, kind="kernel", needs=_EXPERTS)
    """Square and weigh what leaves the ReLU of an expert in one operation, which keeps only its input; for
    --squared-relu."""
    moe_grouped_gemm: bool = flag(False, kind="kernel", needs=_EXPERTS)
    """The products of all experts in one call (torch's grouped_mm), where the device has it; the log says which."""
    moe_permute_fusion: bool = flag(False, kind="kernel", needs=_EXPERTS)
    """Sort tokens by expert, and add up their outputs, as one differentiable operation each, without atomic adds; on
    a GPU this is so without the flag, too."""
    moe_token_dispatcher_type: str = flag(
        "allgather",
        choices=("allgather", "alltoall", "flex"),
        kind="layout",
        needs=_EXPERTS,
    )
    """Way of tokens to experts on other processes: every process gets all tokens, or each only its experts' (alltoall).
    flex, upstream's name for libraries that exchange them, becomes alltoall, with a note."""
    moe_dispatch_fwd_dtype: str = flag("bf16", choices=("bf16", "mxfp8"), kind="numerics", needs=_EXPERTS)
    """Dtype in which tokens travel to experts on other processes (alltoall): the model's, or 8 bits, where 32 channels
    share a scale."""
    moe_combine_bwd_dtype: str = flag("bf16", choices=("bf16", "mxfp8"), kind="numerics", needs=_EXPERTS)
    """The same for the gradients of what experts put out, which travel that way in backward."""
    moe_enable_routing_replay: bool = flag(
        False,
        kind="numerics",
        needs=(_EXPERTS, Needs("--moe-routing-trace-path", lambda run: run.moe_routing_trace_path is not None)),
    )
    """In training, send each token to the experts that --moe-routing-trace-path says; their weights are still the
    router's."""
    moe_use_upcycling: bool = flag(False, kind="numerics", needs=(_EXPERTS, _LOADING))
    """The checkpoint to load is of a dense model: each expert begins as a copy of its MLP (Komatsuzaki et al., 2022). A
    checkpoint that has experts is loaded as it is."""
    moe_upcycling_granularity: int = flag(
        1, minimum=1, kind="numerics", needs=Needs("--moe-use-upcycling", lambda run: run.moe_use_upcycling)
    )
    """Cut the dense MLP into so many slices along its inner width, each of which becomes experts (He et al., 2024): its
    width is so many times --moe-ffn-hidden-size."""
    moe_per_layer_logging: bool = flag(False, kind="report", needs=_EXPERTS)
    """Log the auxiliary losses of each layer in addition to their mean, and how evenly its experts are chosen: the load
    of the busiest one, entropy, share dropped, spread of the biases."""

    @property
    def expert_channels(self) -> int:
        """Width of what an expert reads and writes."""
        assert self.hidden_size is not None
        return self.moe_latent_size or self.hidden_size

    @property
    def has_expert_bias(self) -> bool:
        """True if experts are chosen with a bias that moves after each step."""
        return self.moe_router_enable_expert_bias or "quantile_balancing" in self.moe_router_load_balancing_type

    @property
    def drops_tokens(self) -> bool:
        """True if something bounds how many tokens an expert or a rank takes."""
        return any(getattr(self, name) is not None for name in CAPACITY_FACTORS)

    def rules(self) -> Iterator[str]:
        # A dense model: the other fields have their defaults, or have been refused by what they need.
        if self.num_moe_experts is None:
            if self.expert_model_parallel_size > 1:
                yield f"{self.say('expert_model_parallel_size')} needs --num-experts; use 1 for a dense model"
            return
        yield from self._experts_divide_over_ranks(self.num_moe_experts)
        yield from self._groups_leave_enough_experts(self.num_moe_experts)
        yield from self._router_is_consistent()
        if self.moe_n_hash_layers:
            yield from self._tables_say_all()
        if self.hybrid_context_parallel:
            yield from self._planned_microbatches_are_not_judged()
        if self.moe_shared_expert_gate and self.moe_shared_expert_intermediate_size is None:
            yield "--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size"
        if self.moe_shared_expert_overlap and self.moe_token_dispatcher_type == "allgather":
            yield (
                f"--moe-shared-expert-overlap does not work with {self.say('moe_token_dispatcher_type')}, whose "
                "gathers every rank waits for; use --moe-token-dispatcher-type alltoall or flex"
            )
        if self.moe_pad_expert_input_to_capacity and self.moe_expert_capacity_factor is None:
            yield "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor"
        for name in ("moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype"):
            if getattr(self, name) == "mxfp8":
                yield from self._rows_can_be_packed(self.say(name))
        yield from self._experts_compute_what_is_asked()
        if self.variable_seq_lengths:
            yield from self._ranks_have_equal_tokens("variable_seq_lengths")
        if self.moe_use_upcycling:
            yield from self._dense_layers_become_experts(self.num_moe_experts)

    def _rows_can_be_packed(self, asked: str) -> Iterator[str]:
        if self.moe_token_dispatcher_type == "allgather":
            yield (
                f"{asked} does not work with {self.say('moe_token_dispatcher_type')}, which sends every token to all; "
                "use --moe-token-dispatcher-type alltoall or flex"
            )
        width = "moe_latent_size" if self.moe_latent_size else "hidden_size"
        if getattr(self, width) and self.expert_channels % 32:
            yield (
                f"{asked} gives every 32 channels a scale, and {self.say(width)} is no multiple of 32; use "
                f"{name_multiples(self.expert_channels, 32)}, or bf16"
            )

    def token_exchange_problems(self, asked: str) -> Iterator[str]:
        """Yield the problems of hiding the experts' exchanges. asked: the flag that requests it."""
        if self.num_moe_experts is None or self.expert_model_parallel_size == 1:
            yield f"{asked} needs --num-experts and --expert-model-parallel-size above 1, or nothing is exchanged"
        elif self.moe_token_dispatcher_type == "allgather":
            yield (
                f"{asked} does not work with {self.say('moe_token_dispatcher_type')}; use "
                "--moe-token-dispatcher-type alltoall or flex"
            )

    def _planned_microbatches_are_not_judged(self) -> Iterator[str]:
        """--hybrid-context-parallel: a plan, and with it the number of ranks, decides what is one microbatch; nothing
        that is defined over a microbatch can be the same in every layout."""
        asked, kinds = "--hybrid-context-parallel", self.moe_router_load_balancing_type
        planned = f"whole microbatches, which {asked} puts together by the number of ranks"
        balancing = "use --moe-router-load-balancing-type none, and --moe-router-enable-expert-bias for balance"
        if any(self.moe_aux_loss_coeff) and any(kind.endswith("aux_loss") for kind in kinds):
            yield f"{self.say('moe_aux_loss_coeff')} judges {planned}; {balancing}"
        if "sinkhorn" in kinds:
            yield f"{self.say('moe_router_load_balancing_type')} balances {planned}; {balancing}"
        for name in CAPACITY_FACTORS:
            if getattr(self, name) is not None:
                yield f"{self.say(name)} bounds {planned}; leave it out"
        yield from self._ranks_have_equal_tokens(asked)

    def _ranks_have_equal_tokens(self, asked: str) -> Iterator[str]:
        if self.moe_token_dispatcher_type == "allgather" and self.shares_experts_beyond_tp:
            yield (
                f"{asked} gives ranks different numbers of tokens, which {self.say('moe_token_dispatcher_type')} "
                "cannot gather; use --moe-token-dispatcher-type alltoall"
            )

    @property
    def shares_experts_beyond_tp(self) -> bool:
        """True if a copy of the experts takes more processes than tensor parallelism has: processes with other samples,
        or other parts of a sequence."""
        tp = self.tensor_model_parallel_size
        sharing = self.expert_model_parallel_size * (self.expert_tensor_parallel_size or tp)
        return self.num_moe_experts is not None and sharing > tp

    def _experts_divide_over_ranks(self, experts: int) -> Iterator[str]:
        ep = self.expert_model_parallel_size
        if experts % ep:
            yield (
                f"{self.say('num_moe_experts')} cannot be divided over {self.say('expert_model_parallel_size')}; "
                f"use {name_multiples(experts, ep)} experts, or an expert-parallel size of {name_divisors(experts, ep)}"
            )

    def _experts_compute_what_is_asked(self) -> Iterator[str]:
        # Each of several experts would get a differently weighted token, which no published model means.
        if self.moe_apply_probs_on_input and self.moe_router_topk > 1:
            yield f"--moe-apply-probs-on-input needs one expert for a token; found {self.say('moe_router_topk')}, use 1"
        if self.use_fused_weighted_squared_relu and (
            self.activation_func not in ("squared_relu", None) or self.gated_linear_unit
        ):
            yield "--use-fused-weighted-squared-relu needs experts with --squared-relu"
        for size_name, width_name, ranks in (
            (
                "moe_mlp_glu_interleave_size",
                "moe_ffn_hidden_size",
                self.expert_tensor_parallel_size or self.tensor_model_parallel_size,
            ),
            (
                "moe_shared_expert_glu_interleave_size",
                "moe_shared_expert_intermediate_size",
                self.tensor_model_parallel_size,
            ),
        ):
            size, width = getattr(self, size_name), getattr(self, width_name)
            if self.gated_linear_unit and size and width and width % (size * ranks):
                on_each = f" on each of {ranks} ranks" if ranks > 1 else ""
                yield (
                    f"{self.say(size_name)} does not divide {self.say(width_name)}{on_each}; use a divisor of "
                    f"{max(1, width // ranks)}"
                )

    def _dense_layers_become_experts(self, experts: int) -> Iterator[str]:
        granularity = self.moe_upcycling_granularity
        if experts % granularity:
            yield (
                f"{self.say('num_moe_experts')} is no multiple of {self.say('moe_upcycling_granularity')}, the slices "
                f"of a dense MLP; use {name_multiples(experts, granularity)} experts"
            )
        # A dense model has no weights for them, and with random ones the first function would be another one.
        for name in ("moe_shared_expert_intermediate_size", "moe_latent_size", "moe_apply_probs_on_input"):
            if getattr(self, name):
                yield f"--moe-use-upcycling cannot make {self.say(name)} of a dense model; leave one of the two out"

    def _groups_leave_enough_experts(self, experts: int) -> Iterator[str]:
        topk, groups, kept = self.moe_router_topk, self.moe_router_num_groups, self.moe_router_group_topk
        if topk > experts:
            yield f"{self.say('moe_router_topk')} is more than {self.say('num_moe_experts')}; use {experts} or fewer"
        if kept and not groups:
            yield f"{self.say('moe_router_group_topk')} needs --moe-router-num-groups"
        if groups and experts % groups:
            yield (
                f"{self.say('moe_router_num_groups')} does not divide {self.say('num_moe_experts')}; "
                f"use {name_divisors(experts, groups)} groups"
            )
        elif groups and kept and (kept > groups or kept > topk):
            yield (
                f"{self.say('moe_router_group_topk')} is more than {self.say('moe_router_num_groups')} or "
                f"{self.say('moe_router_topk')}; use {min(groups, topk)} or fewer"
            )
        elif groups == experts and self.moe_router_group_score == "two-best":
            yield f"{self.say('moe_router_num_groups')} leaves one expert in each, and two-best counts two; use fewer"
        # Where groups are judged by their k / groups best experts, this also says that they have so many.
        elif groups and kept and kept * (experts // groups) < topk:
            yield (
                f"{self.say('moe_router_group_topk')} leaves {kept * (experts // groups)} experts to choose from for "
                f"{self.say('moe_router_topk')}; use more groups"
            )

    def _router_is_consistent(self) -> Iterator[str]:
        score, kinds, weights = (
            self.moe_router_score_function, self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        )  # fmt: skip
        # A softmax over one chosen expert is 1 for any logits: the router would get no gradient.
        weighs_alike = self.moe_router_topk == 1 and score == "softmax" and not self.moe_router_pre_softmax
        if weighs_alike and "sinkhorn" not in kinds:
            yield "--moe-router-topk 1 with softmax scores gives every token the weight 1; add --moe-router-pre-softmax"
        # The bias is compared with scores from 0 to about 1; logits, which softmax routing chooses by, have no such
        # scale.
        if self.moe_router_enable_expert_bias and score == "softmax":
            yield (
                "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid, sqrtsoftplus or "
                "softmax-share"
            )
        # One loss may be written without a list, and then has one weight.
        if len(kinds) > 1 and len(kinds) != len(weights):
            yield (
                f"{self.say('moe_router_load_balancing_type')} names {len(kinds)} losses, "
                f"{self.say('moe_aux_loss_coeff')} {len(weights)}"
            )
        if "quantile_balancing" in kinds and ("sinkhorn" in kinds or self.moe_router_enable_expert_bias):
            other = "sinkhorn" if "sinkhorn" in kinds else "--moe-router-enable-expert-bias"
            yield (
                f"--moe-router-load-balancing-type quantile_balancing chooses experts by a bias of its own, and "
                f"cannot be combined with {other}; leave one of the two out"
            )
        if "sinkhorn" in kinds and any(weights):
            yield (
                "--moe-router-load-balancing-type sinkhorn balances without a loss; leave out --moe-aux-loss-coeff "
                "or use aux_loss"
            )

    def _tables_say_all(self) -> Iterator[str]:
        asked = self.say("moe_n_hash_layers")
        if self.actual_vocab_size is None:
            yield f"{asked} has tables with a row for each token of the vocabulary; give --actual-vocab-size"
        if self.moe_router_score_function == "softmax" or "sinkhorn" in self.moe_router_load_balancing_type:
            yield f"{asked} weighs experts by scores of their own; use --moe-router-score-function sqrtsoftplus"

    def normalize(self) -> None:
        super().normalize()
        self.moe_router_load_balancing_type = self.moe_router_load_balancing_type or ["aux_loss"]
        self.moe_aux_loss_coeff = self.moe_aux_loss_coeff or [0.0]
        # Upstream's scripts write 0 for a dense model; everything behind asks for None.
        self.num_moe_experts = self.num_moe_experts or None

    def derive(self) -> None:
        super().derive()
        # One word for one thing: these two are then the same.
        if self.moe_router_group_score == "two-best" and self.moe_router_topk // (self.moe_router_group_topk or 1) == 2:
            self.moe_router_group_score = "sum"
        if self.moe_token_dispatcher_type == "flex":
            self.moe_token_dispatcher_type = "alltoall"
        if self.moe_ffn_hidden_size is None:
            self.moe_ffn_hidden_size = self.ffn_hidden_size
