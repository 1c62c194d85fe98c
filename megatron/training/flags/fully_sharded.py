"""What a script's fully sharded data parallelism becomes here, and what follows from that.

| --data-parallel-sharding-strategy | divided                              | becomes                              |
|-----------------------------------|--------------------------------------|--------------------------------------|
| no_shard                          | nothing                              | plain data parallelism               |
| optim                             | optimizer state (ZeRO-1)             | --use-distributed-optimizer          |
| optim_grads                       | and gradients (ZeRO-2)               | PyTorch's FSDP2, gathered once a step |
| optim_grads_params                | and parameters (ZeRO-3)              | PyTorch's FSDP2                      |
"""

from __future__ import annotations

from megatron.training.flags.settings import Settings

_DIVIDED = {"optim_grads": "gradients and optimizer state (ZeRO-2)", "optim_grads_params": "everything (ZeRO-3)"}
_OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather", "overlap_param_gather_with_optimizer_step")
_HINTS = {
    "fsdp_double_buffer": "PyTorch's allocator hands out the memory of the last layers again",
    "megatron_fsdp_max_pool_double_buffer": "there are no fixed buffers to gather into",
    "fsdp_db_use_persist_buf_on_alloc_fail": "there are no fixed buffers to gather into",
    "fsdp_manual_registration": "NCCL is told of memory whenever PyTorch's pool of it grows",
    "disable_symmetric_registration": "memory is registered without symmetric windows anyway",
}
"""Switches that leave the results alone, and what happens instead of what they ask for."""


def derive_sharding(s: Settings) -> None:
    """Choose what carries the run, and note what a user may not expect."""
    for dest, instead in _HINTS.items():
        if getattr(s, dest):
            s.note(f"{s.say(dest)} has no effect: {instead}")
    if not asked_for_sharding(s):
        return
    asked, strategy = sharding_flag(s), s.data_parallel_sharding_strategy
    if s.use_megatron_fsdp and s.ckpt_format == "fsdp_dtensor":
        s.note("--ckpt-format fsdp_dtensor is not written; checkpoints are saved as torch_dist, which any layout loads")
        s.derive(ckpt_format="torch_dist")
    s.derive(use_torch_fsdp2=strategy in _DIVIDED)
    if not s.use_torch_fsdp2:
        _without_divided_parameters(s, asked)
        return
    s.derive(gradient_accumulation_fusion=False)  # gradients are whole only until they are summed
    if s.use_megatron_fsdp:
        _as_torch_does_it(s, asked)
    if replicas(s) == 1:
        s.note(f"{asked} has no effect: one process holds each parameter, so there is nothing to divide")
        _formats_of_whole_gradients(s)
    for dest in ("average_in_collective", "pad_buckets_for_high_nccl_busbw"):
        if getattr(s, dest):
            s.note(f"{s.say(dest)} has no effect with {asked}")


def asked_for_sharding(s: Settings) -> bool:
    """Whether the user wants fully sharded data parallelism of either name, whatever it became."""
    return bool(s.given & {"use_torch_fsdp2", "use_megatron_fsdp"})


def sharding_flag(s: Settings) -> str:
    """The switch as the user wrote it."""
    return "--use-megatron-fsdp" if s.use_megatron_fsdp else "--use-torch-fsdp2"


def replicas(s: Settings) -> int | None:
    """Processes that hold the same shard of the model; None where the layout does not fit."""
    return None if s.data_parallel_size is None else s.data_parallel_size * s.context_parallel_size


def _as_torch_does_it(s: Settings, asked: str) -> None:
    s.note(
        f"{asked} becomes --use-torch-fsdp2, PyTorch's FSDP2, which divides "
        f"{_DIVIDED[s.data_parallel_sharding_strategy]}"
    )
    for dest in ("use_distributed_optimizer", *_OVERLAPS):
        if getattr(s, dest):
            s.note(f"{s.say(dest)} has no effect with {asked}, which does so always")
    s.derive(use_distributed_optimizer=False, **dict.fromkeys(_OVERLAPS, False))
    if s.megatron_fsdp_version != 1:
        s.note(f"{s.say('megatron_fsdp_version')} has no effect: PyTorch's FSDP2 takes the place of either version")


def _without_divided_parameters(s: Settings, asked: str) -> None:
    divides_state = s.data_parallel_sharding_strategy == "optim"
    becomes = "--use-distributed-optimizer" if divides_state else "plain data parallelism"
    s.note(
        f"{s.say('data_parallel_sharding_strategy')} divides no parameters; {asked} becomes {becomes}, and PyTorch's "
        "FSDP2 is not used"
    )
    s.derive(use_distributed_optimizer=divides_state)
    if s.overlap_param_gather and not divides_state:
        s.note(f"{s.say('overlap_param_gather')} has no effect: nothing is divided, so nothing is gathered")
        s.derive(overlap_param_gather=False, overlap_param_gather_with_optimizer_step=False)
    _formats_of_whole_gradients(s)


def _formats_of_whole_gradients(s: Settings) -> None:
    """Gradients that are not divided are summed as they are kept, so that one word says both."""
    asked = {s.megatron_fsdp_main_grads_dtype, s.megatron_fsdp_grad_comm_dtype}
    if "fp32" in asked:
        s.derive(grad_reduce_in_fp32=True)
    elif asked & {"bf16", "fp16"}:
        s.derive(grad_reduce_in_bf16=s.bf16, grad_reduce_in_fp32=False)
