"""Mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config_base import divisors_near, multiples_near
from megatron.training.flags.settings import Settings


def experts_are_divisible(s: Settings) -> Iterator[str]:
    experts, ep, groups = s.num_moe_experts, s.expert_model_parallel_size, s.moe_router_num_groups
    if not experts:
        if ep > 1:
            yield f"{s.say('expert_model_parallel_size')} needs --num-experts; use 1 for a dense model"
        return
    if experts % ep:
        yield (
            f"{s.say('num_moe_experts')} cannot be divided over {s.say('expert_model_parallel_size')}; "
            f"use {multiples_near(experts, ep)} experts, or an expert-parallel size of {divisors_near(experts, ep)}"
        )
    if groups and (groups < 1 or experts % groups):
        yield (
            f"{s.say('moe_router_num_groups')} does not divide {s.say('num_moe_experts')}; "
            f"use {divisors_near(experts, max(1, groups))} groups"
        )
    if s.moe_router_topk > experts:
        yield f"{s.say('moe_router_topk')} is more than {s.say('num_moe_experts')}; use {experts} or fewer"


def router_is_consistent(s: Settings) -> Iterator[str]:
    if not s.num_moe_experts:
        return
    score, topk = s.moe_router_score_function, s.moe_router_topk
    if topk == 1 and score == "softmax" and not s.moe_router_pre_softmax:
        loads = s.moe_router_load_balancing_type
        if "sinkhorn" not in (loads if isinstance(loads, list) else [loads]):
            yield "--moe-router-topk 1 with softmax scores gives every token the weight 1; add --moe-router-pre-softmax"
    if s.moe_router_enable_expert_bias and score not in ("sigmoid", "sqrtsoftplus"):
        yield "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid or sqrtsoftplus"
    if s.moe_router_group_topk and not s.moe_router_num_groups:
        yield f"{s.say('moe_router_group_topk')} needs --moe-router-num-groups"
    if s.moe_pad_expert_input_to_capacity and s.moe_expert_capacity_factor is None:
        yield "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor"
    kinds, weights = s.moe_router_load_balancing_type, s.moe_aux_loss_coeff
    if isinstance(kinds, list) and len(kinds) > 1 and len(kinds) != len(weights):
        yield (
            f"{s.say('moe_router_load_balancing_type')} names {len(kinds)} losses, {s.say('moe_aux_loss_coeff')} "
            f"{len(weights)}"
        )


def expert_biases_fit_the_layout(s: Settings) -> Iterator[str]:
    if s.num_moe_experts and s.add_bias_linear and s.expert_tensor_parallel_size > 1:
        yield (
            f"{s.say('expert_tensor_parallel_size')} cannot divide experts with biases; use --disable-bias-linear or "
            "--expert-tensor-parallel-size 1"
        )


def tokens_are_divisible(s: Settings) -> Iterator[str]:
    """Without sequence parallelism a layer with experts divides the tokens itself."""
    tp, cp, length = s.tensor_model_parallel_size, s.context_parallel_size, s.seq_length
    if s.num_moe_experts and length and not length % cp and length // cp % tp:
        yield (
            f"{s.say('num_moe_experts')}: {s.say('seq_length')} does not divide by "
            f"{s.say('tensor_model_parallel_size')} x {s.say('context_parallel_size')}; "
            f"use {multiples_near(length, tp * cp)} tokens"
        )


def expert_communication_is_possible(s: Settings) -> Iterator[str]:
    dispatcher = s.moe_token_dispatcher_type
    if s.moe_shared_expert_overlap and dispatcher == "allgather":
        yield "--moe-shared-expert-overlap does not work with --moe-token-dispatcher-type allgather; use alltoall"
    if s.overlap_moe_expert_parallel_comm:
        if s.expert_model_parallel_size == 1:
            yield "--overlap-moe-expert-parallel-comm needs --expert-model-parallel-size above 1"
        if dispatcher not in ("alltoall", "flex"):
            yield (
                f"--overlap-moe-expert-parallel-comm does not work with {s.say('moe_token_dispatcher_type')}; use "
                "alltoall"
            )
    if s.delay_wgrad_compute and not (
        s.overlap_moe_expert_parallel_comm or s.overlap_dispatch_backward_with_experts_wgrad
    ):
        yield "--delay-wgrad-compute needs --overlap-moe-expert-parallel-comm"


CHECKS = (
    experts_are_divisible, router_is_consistent, expert_biases_fit_the_layout, tokens_are_divisible,
    expert_communication_is_possible,
)  # fmt: skip
