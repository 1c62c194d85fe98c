# SPDX-License-Identifier: Apache-2.0
"""Settings of data parallelism: plain, with divided optimizer state, and fully sharded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.config_base import CheckedConfig, derived, flag
from megatron.core.setting import Needs, NeedsGPU

NumberFormat = Literal["fp32", "bf16", "fp16", "auto"]

_SWITCHES = "--use-torch-fsdp2 or --use-megatron-fsdp"
# By what was given, not by the values: --use-megatron-fsdp may have become another switch by then.
_FULLY_SHARDED = Needs(_SWITCHES, lambda run: not run.given.isdisjoint(("use_torch_fsdp2", "use_megatron_fsdp")))
_DIVIDED_PARAMETERS = Needs(_SWITCHES, lambda run: run.use_torch_fsdp2)
_MEGATRON_FSDP = Needs("--use-megatron-fsdp", lambda run: run.use_megatron_fsdp)
_BF16 = Needs("--bf16", lambda run: run.bf16)
_BUCKETS = Needs("--overlap-grad-reduce", lambda run: run.overlap_grad_reduce)
_CHUNKS = Needs(
    "several chunks of layers per stage, --num-virtual-stages-per-pipeline-rank",
    lambda run: run.virtual_pipeline_model_parallel_size is not None,
)
_SHORT_GRADIENTS = Needs(
    "gradients in 16 bits, --grad-reduce-in-bf16",
    lambda run: not run.use_distributed_optimizer or ((run.bf16 or run.fp16) and not run.grad_reduce_in_fp32),
)
_DIVIDED_STATE = Needs("--use-distributed-optimizer", lambda run: run.use_distributed_optimizer or run.use_torch_fsdp2)


@dataclass(kw_only=True)
class FullyShardedConfig(CheckedConfig):
    """Parameters, gradients and optimizer state divided over data-parallel processes, under upstream's names."""

    # All of these are layout: the weights and what a checkpoint means stay the same.
    use_torch_fsdp2: bool = flag(False, kind="layout")
    """Divide parameters, gradients and optimizer state over the data-parallel processes, through PyTorch's fully_shard
    (ZeRO-3); a layer's parameters are gathered while it computes."""
    use_megatron_fsdp: bool = flag(False, kind="layout")
    """For scripts of upstream's FSDP: becomes --use-torch-fsdp2, or with --data-parallel-sharding-strategy optim
    --use-distributed-optimizer, and with no_shard plain data parallelism."""
    data_parallel_sharding_strategy: str = flag(
        "optim_grads_params",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
        kind="layout",
        needs=_FULLY_SHARDED,
    )
    """With --use-torch-fsdp2 or --use-megatron-fsdp, what is divided: everything (ZeRO-3), all but parameters (ZeRO-2:
    they are gathered once a step), only the optimizer state (as --use-distributed-optimizer), or nothing."""
    torch_fsdp2_reshard_after_forward: bool = flag(
        True, off_names=("--torch-fsdp2-no-reshard-after-forward",), kind="layout", needs=_DIVIDED_PARAMETERS
    )
    """With --use-torch-fsdp2, drop a layer's gathered parameters after its forward and gather them again for its
    backward; switched off, they stay in between, which spares one of the two gathers."""
    suggested_communication_unit_size: int | None = flag(
        None, minimum=1, unit="elements", kind="layout", needs=_DIVIDED_PARAMETERS
    )
    """With --use-torch-fsdp2 or --use-megatron-fsdp, gather layers that follow each other together until they have so
    many parameters; each layer separately when not given."""
    megatron_fsdp_enable_fine_grained_param_gather: bool = flag(False, kind="layout", needs=_DIVIDED_PARAMETERS)
    """With --use-torch-fsdp2 or --use-megatron-fsdp, gather the attention and the MLP of a layer each for itself."""
    megatron_fsdp_main_params_dtype: NumberFormat = flag("fp32", kind="numerics", needs=_FULLY_SHARDED)
    """With --use-torch-fsdp2 or --use-megatron-fsdp, dtype of the divided parameters, which the optimizer updates:
    fp32, or the model's (auto), without float32 main parameters."""
    megatron_fsdp_main_grads_dtype: NumberFormat = flag("auto", kind="numerics", needs=_FULLY_SHARDED)
    """With --use-torch-fsdp2 or --use-megatron-fsdp, dtype in which gradients are accumulated over microbatches; auto:
    the divided parameters' dtype."""
    megatron_fsdp_grad_comm_dtype: NumberFormat = flag("auto", kind="numerics", needs=_FULLY_SHARDED)
    """With --use-torch-fsdp2 or --use-megatron-fsdp, dtype in which gradients are sent and summed over processes; auto:
    as --megatron-fsdp-main-grads-dtype where given, else as without FSDP."""
    megatron_fsdp_version: int = flag(1, choices=(1, 2), kind="layout", needs=_MEGATRON_FSDP)
    """With --use-megatron-fsdp, which of upstream's implementations; PyTorch's takes the place of either."""
    nccl_ub: bool = flag(
        False,
        names=("--use-nccl-ub",),
        kind="layout",
        gpu=NeedsGPU(lambda run: run.nccl_ub, "it has no effect: gloo registers no memory"),
    )
    """With --use-torch-fsdp2 or --use-megatron-fsdp, gather and sum in memory that NCCL has registered, so that it
    need not copy; other backends use ordinary memory."""
    # From here on details of upstream's implementation: accepted so that its scripts run, decided by PyTorch.
    disable_symmetric_registration: bool = flag(False, kind="layout")
    """With --use-nccl-ub, register memory without symmetric windows, which is how PyTorch does it."""
    fsdp_manual_registration: bool = flag(False, kind="layout")
    """With --use-nccl-ub, a hint: register all memory at one moment. PyTorch does so whenever its pool grows."""
    fsdp_double_buffer: bool = flag(False, kind="layout")
    """A hint: gather into two buffers that take turns. PyTorch's allocator hands out the memory of the last layers
    again."""
    megatron_fsdp_max_pool_double_buffer: bool = flag(False, kind="layout")
    """A hint about the two buffers of --fsdp-double-buffer."""
    fsdp_db_use_persist_buf_on_alloc_fail: bool = flag(False, kind="layout")
    """A hint about the two buffers of --fsdp-double-buffer."""

    def rules(self) -> Iterator[str]:
        unit, fine = "suggested_communication_unit_size", "megatron_fsdp_enable_fine_grained_param_gather"
        if self.use_torch_fsdp2 and getattr(self, unit) is not None and getattr(self, fine):
            yield f"{self.say(unit)} gathers layers together, {self.say(fine)} parts of them each for itself; keep one"
        if self.nccl_ub and not self.use_torch_fsdp2:
            yield (
                f"{self.say('nccl_ub')} works where parameters are divided, with --use-torch-fsdp2 or "
                "--use-megatron-fsdp; leave it out"
            )


@dataclass(kw_only=True)
class DistributedDataParallelConfig(FullyShardedConfig):
    """Settings by which gradients are stored and summed over data-parallel processes."""

    grad_reduce_in_fp32: bool = flag(False, names=("--accumulate-allreduce-grads-in-fp32",), kind="numerics")
    """Accumulate and sum gradients in float32. Always so with bf16, unless --grad-reduce-in-bf16 is given."""
    grad_reduce_in_bf16: bool = flag(False, kind="numerics", needs=_BF16)
    """Accumulate and sum gradients of bfloat16 parameters in bfloat16: half the memory and traffic, fewer digits."""
    # Off by default, like upstream; the overlaps pay where the network is slow in relation to the device.
    overlap_grad_reduce: bool = flag(False, kind="layout")
    """Sum each bucket of gradients while backward still runs."""
    align_grad_reduce: bool = flag(True, kind="layout")
    """With --overlap-grad-reduce in a pipeline, all stages start to sum a chunk's gradients at the same moment, so that
    no stage's traffic slows its neighbours' last microbatches; otherwise each stage starts as soon as it can."""
    overlap_param_gather: bool = flag(False, kind="layout")
    """Gather each bucket of updated parameters while the next forward already runs."""
    overlap_param_gather_with_optimizer_step: bool = flag(False, kind="layout", needs=_CHUNKS)
    """With --overlap-param-gather and several chunks of layers on each stage: update chunk by chunk, and gather one
    chunk's parameters while the next ones are updated."""
    use_distributed_optimizer: bool = flag(False, kind="layout")
    """Divide optimizer state over the data-parallel processes (ZeRO-1)."""
    num_distributed_optimizer_instances: int = flag(1, minimum=1, kind="layout", needs=_DIVIDED_STATE)
    """Copies of the divided optimizer state: the data-parallel processes form as many groups of neighbours, and each
    group divides one copy, so that parameters are gathered inside a group only. With --use-torch-fsdp2, copies of the
    divided parameters and gradients as well (HSDP)."""
    bucket_size: int | None = flag(
        None, minimum=1, names=("--ddp-bucket-size",), unit="elements", kind="layout", needs=_BUCKETS
    )
    """Parameters per gradient bucket with --overlap-grad-reduce; the larger of 40 million and one million for each
    data-parallel process when not given."""
    num_buckets: int | None = flag(None, minimum=1, names=("--ddp-num-buckets",), kind="layout", needs=_BUCKETS)
    """Buckets of equal size with --overlap-grad-reduce, instead of a size. Parameters without weight decay have one
    more, separate bucket."""
    pad_buckets_for_high_nccl_busbw: bool = flag(False, names=("--ddp-pad-buckets-for-high-nccl-busbw",), kind="layout")
    """Pad every bucket to a multiple of 65536 elements, over which NCCL's algorithms run fastest."""
    # A kernel, not numerics: whether the division comes before or after the sum is a matter of rounding.
    average_in_collective: bool = flag(False, names=("--ddp-average-in-collective",), kind="kernel")
    """Let the collective compute the mean, instead of dividing each process's gradients before they are summed."""
    reduce_scatter_with_fp32_accumulation: bool = flag(
        False, names=("--ddp-reduce-scatter-with-fp32-accumulation",), kind="kernel", needs=_SHORT_GRADIENTS
    )
    """With --use-distributed-optimizer, send gradients in their (16-bit) dtype to the process that updates them, and
    sum them there in float32, instead of rounding every partial sum."""
    check_for_nan_in_grad: bool = flag(True, names=("--check-for-nan-in-loss-and-grad",),
                                       off_names=("--no-check-for-nan-in-loss-and-grad",), kind="report")  # fmt: skip
    """Stop with the name of the first parameter whose gradient, or the step whose loss, is not a number."""

    align_param_gather: bool = derived(False, kind="layout")
    """Ignored: each stage gathers parameters when it needs them."""
    fp8_param_gather: bool = derived(False, kind="layout")
    """Only False here: the model's config has it."""
    reuse_grad_buf_for_mxfp8_param_ag: bool = derived(False, kind="layout")
    """Only False: parameters and gradients have separate buffers."""
    use_custom_fsdp: bool = derived(False, kind="layout")
    """Only False: the former name of use_megatron_fsdp."""

    def rules(self) -> Iterator[str]:
        for name in ("fp8_param_gather", "reuse_grad_buf_for_mxfp8_param_ag", "use_custom_fsdp"):
            if getattr(self, name):
                yield f"DistributedDataParallelConfig has no {name}: use use_megatron_fsdp for FSDP, or leave it out"
        is_sharded = self.use_distributed_optimizer or self.use_megatron_fsdp or self.use_torch_fsdp2
        if self.overlap_param_gather and not (self.overlap_grad_reduce and is_sharded):
            yield (
                "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce; add them or leave "
                "it out"
            )
        if self.overlap_param_gather_with_optimizer_step and not self.overlap_param_gather:
            yield "--overlap-param-gather-with-optimizer-step needs --overlap-param-gather"
        if self.num_buckets is not None and self.bucket_size is not None:
            yield (
                f"{self.say('num_buckets')} and {self.say('bucket_size')} both say how gradients are divided; keep one"
            )
        if self.reduce_scatter_with_fp32_accumulation and not self.use_distributed_optimizer:
            yield (
                "--ddp-reduce-scatter-with-fp32-accumulation needs --use-distributed-optimizer; add it or leave it out"
            )
        if self.reduce_scatter_with_fp32_accumulation and self.num_distributed_optimizer_instances > 1:
            yield (
                f"--ddp-reduce-scatter-with-fp32-accumulation cannot be combined with "
                f"{self.say('num_distributed_optimizer_instances')}, whose second sum rounds; use 1"
            )
