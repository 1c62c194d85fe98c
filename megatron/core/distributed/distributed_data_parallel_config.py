"""What data parallelism needs to know."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config_base import flag
from megatron.core.distributed.fully_sharded_config import FullyShardedConfig


@dataclass(kw_only=True)
class DistributedDataParallelConfig(FullyShardedConfig):
    """How gradients are stored and summed over data-parallel processes."""

    grad_reduce_in_fp32: bool = flag(False, names=("--accumulate-allreduce-grads-in-fp32",))
    """Accumulate and sum gradients in float32. Always so with bf16, unless --grad-reduce-in-bf16 is given."""
    grad_reduce_in_bf16: bool = False
    """Accumulate and sum gradients of bfloat16 parameters in bfloat16: half the memory and traffic, fewer digits."""
    overlap_grad_reduce: bool = False
    """Sum each bucket of gradients while backward still runs."""
    align_grad_reduce: bool = True
    """With --overlap-grad-reduce in a pipeline, all stages start to sum a chunk's gradients at the same moment, so that
    no stage's traffic slows its neighbours' last microbatches; otherwise each stage starts as soon as it can."""
    overlap_param_gather: bool = False
    """Gather each bucket of updated parameters while the next forward already runs."""
    overlap_param_gather_with_optimizer_step: bool = False
    """With --overlap-param-gather and several chunks of layers on each stage: update chunk by chunk, and gather one
    chunk's parameters while the next ones are updated."""
    use_distributed_optimizer: bool = False
    """Divide optimizer state over the data-parallel processes (ZeRO-1)."""
    num_distributed_optimizer_instances: int = flag(1, minimum=1)
    """Copies of the divided optimizer state: the data-parallel processes form as many groups of neighbours, and each
    group divides one copy, so that parameters are gathered inside a group only. With --use-torch-fsdp2, copies of the
    divided parameters and gradients as well (HSDP)."""
    bucket_size: int | None = flag(None, minimum=1, names=("--ddp-bucket-size",), unit="elements")
    """Parameters per gradient bucket with --overlap-grad-reduce; the larger of 40 million and one million for each
    data-parallel process when not given."""
    num_buckets: int | None = flag(None, minimum=1, names=("--ddp-num-buckets",))
    """Buckets of equal size with --overlap-grad-reduce, instead of a size. Parameters without weight decay have
    another bucket of their own."""
    pad_buckets_for_high_nccl_busbw: bool = flag(False, names=("--ddp-pad-buckets-for-high-nccl-busbw",))
    """Pad every bucket to a multiple of 65536 elements, over which NCCL's algorithms run fastest."""
    average_in_collective: bool = flag(False, names=("--ddp-average-in-collective",))
    """Let the collective compute the mean, instead of dividing each process's gradients before they are summed."""
    reduce_scatter_with_fp32_accumulation: bool = flag(False, names=("--ddp-reduce-scatter-with-fp32-accumulation",))
    """With --use-distributed-optimizer, send gradients in their own (16-bit) format to the process that updates them,
    and sum them there in float32, instead of rounding every partial sum."""
    check_for_nan_in_grad: bool = flag(True, names=("--check-for-nan-in-loss-and-grad",),
                                       off_names=("--no-check-for-nan-in-loss-and-grad",))  # fmt: skip
    """Stop with the name of the first parameter whose gradient, or the step whose loss, is not a number."""
