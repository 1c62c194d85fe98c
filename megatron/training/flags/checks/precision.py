"""Number formats."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.flags.settings import Settings, sharding_flag


def residual_has_a_lower_format(s: Settings) -> Iterator[str]:
    if s.fp32_residual_connection and not (s.fp16 or s.bf16):
        yield "--fp32-residual-connection says nothing in a float32 run; add --bf16 or --fp16, or leave it out"


def logits_have_a_format_of_the_model(s: Settings) -> Iterator[str]:
    if s.logit_dtype == "bf16" and not s.bf16:
        yield f"{s.say('logit_dtype')} is the format of a --bf16 model; add --bf16, or leave it out"


def one_low_precision_format(s: Settings) -> Iterator[str]:
    if s.fp8 and s.fp4:
        yield f"{s.say('fp8')} and {s.say('fp4')} contradict each other; keep one"
    for gather, number_format in (("fp8_param_gather", "fp8"), ("fp4_param_gather", "fp4")):
        if not getattr(s, gather):
            continue
        if not getattr(s, number_format):
            yield f"{s.say(gather)} needs {s.name(number_format)}"
        if not (s.use_distributed_optimizer or s.use_megatron_fsdp or s.use_torch_fsdp2):
            yield f"{s.say(gather)} needs --use-distributed-optimizer, or fully sharded data parallelism"


def ends_in_bf16_fit_the_recipe(s: Settings) -> Iterator[str]:
    if s.first_last_layers_bf16 and s.fp8 and s.fp8_recipe == "delayed":
        yield "--first-last-layers-bf16 does not work with --fp8-recipe delayed; use tensorwise, blockwise or mxfp8"


def loss_scale_may_fall(s: Settings) -> Iterator[str]:
    if s.fp16 and s.loss_scale is None and s.min_loss_scale > s.initial_loss_scale:
        yield f"{s.say('min_loss_scale')} is above {s.say('initial_loss_scale')}; give a smaller --min-loss-scale"


_SMALLER_STATE = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def smaller_state_has_its_optimizer(s: Settings) -> Iterator[str]:
    """Number formats of the optimizer's memory."""
    if s.use_precision_aware_optimizer and s.optimizer != "adam":
        yield f"--use-precision-aware-optimizer works with --optimizer adam, not with {s.say('optimizer')}"
    for dest in _SMALLER_STATE:
        if getattr(s, dest) != "fp32" and not s.use_precision_aware_optimizer:
            yield f"{s.say(dest)} needs --use-precision-aware-optimizer"
    if s.main_grads_dtype == "bf16" and not s.bf16:
        yield f"{s.say('main_grads_dtype')} needs --bf16"
    if s.main_grads_dtype == "bf16" and "grad_reduce_in_fp32" in s.given and s.grad_reduce_in_fp32:
        yield f"{s.say('main_grads_dtype')} contradicts --accumulate-allreduce-grads-in-fp32; keep one"
    if s.main_params_dtype == "fp16" and s.use_torch_fsdp2:
        asked = sharding_flag(s)
        yield f"{s.say('main_params_dtype')} cannot be had with {asked}; use fp32, or --megatron-fsdp-main-params-dtype"
    if s.main_params_dtype == "fp16" and not (s.bf16 or s.fp16):
        yield f"{s.say('main_params_dtype')} needs --bf16 or --fp16: a float32 run has no main parameters"


CHECKS = (
    smaller_state_has_its_optimizer,
    loss_scale_may_fall,
    residual_has_a_lower_format,
    logits_have_a_format_of_the_model,
    one_low_precision_format,
    ends_in_bf16_fit_the_recipe,
)
