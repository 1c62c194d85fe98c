"""Fully sharded data parallelism."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.flags.settings import Settings, asked_for_sharding, replicas, sharding_flag

_FORMATS = ("megatron_fsdp_main_params_dtype", "megatron_fsdp_main_grads_dtype", "megatron_fsdp_grad_comm_dtype")


def divided_parameters_have_their_needs(s: Settings) -> Iterator[str]:
    asked = sharding_flag(s)
    if s.given >= {"use_megatron_fsdp", "use_torch_fsdp2"}:
        yield "--use-megatron-fsdp and --use-torch-fsdp2 contradict each other; keep one"
        return
    if (s.use_megatron_fsdp or s.use_torch_fsdp2) and s.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield f"{asked} needs several hardware queues, but CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment; unset it"
    if not s.use_torch_fsdp2:
        return
    if s.use_distributed_optimizer:
        yield f"{asked} already divides the optimizer state; leave out --use-distributed-optimizer"
    if s.pipeline_model_parallel_size > 1:
        yield f"{asked} cannot be combined with {s.say('pipeline_model_parallel_size')}; use 1 stage"
    if s.overlap_grad_reduce or s.overlap_param_gather:
        given = "--overlap-grad-reduce" if s.overlap_grad_reduce else "--overlap-param-gather"
        yield f"{asked} always sums and gathers beside the computation; leave out {given}"
    if s.num_query_groups and s.num_query_groups < s.tensor_model_parallel_size:
        yield (
            f"{asked} cannot be combined with {s.say('num_query_groups')} below "
            f"{s.say('tensor_model_parallel_size')}: several ranks would hold a key-value head; use at most "
            f"--tensor-model-parallel-size {s.num_query_groups}"
        )
    if s.compile:
        yield f"{asked} cannot be combined with --compile; leave one out"


def units_are_divided_in_one_way(s: Settings) -> Iterator[str]:
    unit, fine = "suggested_communication_unit_size", "megatron_fsdp_enable_fine_grained_param_gather"
    if s.use_torch_fsdp2 and getattr(s, unit) is not None and getattr(s, fine):
        yield f"{s.say(unit)} gathers layers together, {s.say(fine)} parts of them each for itself; keep one"


def instances_divide_something(s: Settings) -> Iterator[str]:
    instances = s.num_distributed_optimizer_instances
    if s.use_torch_fsdp2 and 1 < instances == replicas(s):
        yield (
            f"{s.say('num_distributed_optimizer_instances')} leaves each of the {instances} model copies whole, and "
            f"{sharding_flag(s)} nothing to divide; use fewer, or --data-parallel-sharding-strategy no_shard"
        )


def registered_memory_has_its_use(s: Settings) -> Iterator[str]:
    if s.nccl_ub and not s.use_torch_fsdp2:
        yield (
            f"{s.say('nccl_ub')} works where parameters are divided, with --use-torch-fsdp2 or --use-megatron-fsdp; "
            "leave it out"
        )
    if s.nccl_ub and s.log_comm_volume:
        yield f"{s.say('nccl_ub')} cannot be combined with --log-comm-volume; leave one out"


def number_formats_fit(s: Settings) -> Iterator[str]:
    """Each is float32 or the model's; main gradients are the main parameters' or the model's."""
    if not asked_for_sharding(s):
        return
    model = "bf16" if s.bf16 else "fp16" if s.fp16 else "fp32"
    foreign = [dest for dest in _FORMATS if getattr(s, dest) not in ("auto", "fp32", model)]
    for dest in foreign:
        yield f"{s.say(dest)} is neither float32 nor the model's {model}; use fp32, auto, or --{getattr(s, dest)}"
    if not foreign:
        params = model if s.megatron_fsdp_main_params_dtype == "auto" else s.megatron_fsdp_main_params_dtype
        whole = not s.use_torch_fsdp2 or replicas(s) == 1
        yield from (_of_whole_parameters if whole else _of_divided_parameters)(s, params)
    if "grad_reduce_in_fp32" in s.given:
        for dest in _FORMATS[1:]:
            if getattr(s, dest) in ("bf16", "fp16"):
                yield f"{s.say(dest)} contradicts --accumulate-allreduce-grads-in-fp32; keep one"


def _of_divided_parameters(s: Settings, params: str) -> Iterator[str]:
    _, grads, sent = _FORMATS
    if s.megatron_fsdp_main_grads_dtype == "fp32" != params:
        yield (
            f"{s.say(grads)} cannot be had with {s.say(_FORMATS[0])}: sums arrive in the number format of the divided "
            f"parameters; use {s.name(grads)} auto"
        )
    if s.megatron_fsdp_grad_comm_dtype == "fp32" and s.grad_reduce_in_bf16:
        yield f"{s.say(sent)} contradicts --grad-reduce-in-bf16; keep one"


def _of_whole_parameters(s: Settings, params: str) -> Iterator[str]:
    _, grads, sent = _FORMATS
    if params != "fp32":
        yield f"{s.say(_FORMATS[0])} needs divided parameters, which this run has not; use fp32"
    if "auto" not in (getattr(s, grads), getattr(s, sent)) and getattr(s, grads) != getattr(s, sent):
        yield (
            f"{s.say(grads)} and {s.say(sent)} differ, but gradients of parameters that are not divided are sent as "
            "they are kept; use one format for both"
        )
    for dest in (grads, sent):
        if getattr(s, dest) == "fp32" and "grad_reduce_in_bf16" in s.given:
            yield f"{s.say(dest)} contradicts --grad-reduce-in-bf16; keep one"


CHECKS = (
    divided_parameters_have_their_needs,
    units_are_divided_in_one_way,
    instances_divide_something,
    registered_memory_has_its_use,
    number_formats_fit,
)
