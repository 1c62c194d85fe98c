"""What data parallelism needs to know."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config_base import flag
from megatron.core.distributed.fully_sharded_config import FullyShardedConfig
from megatron.core.setting import Needs

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
class DistributedDataParallelConfig(FullyShardedConfig):
    """How gradients are stored and summed over data-parallel processes."""

    grad_reduce_in_fp32: bool = flag(False, names=("--accumulate-allreduce-grads-in-fp32",), kind="numerics")
    """Accumulate and sum gradients in float32. Always so with bf16, unless --grad-reduce-in-bf16 is given."""
    grad_reduce_in_bf16: bool = flag(False, kind="numerics", needs=_BF16)
    """Accumulate and sum gradients of bfloat16 parameters in bfloat16: half the memory and traffic, fewer digits."""
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
    """Buckets of equal size with --overlap-grad-reduce, instead of a size. Parameters without weight decay have
    another bucket of their own."""
    pad_buckets_for_high_nccl_busbw: bool = flag(False, names=("--ddp-pad-buckets-for-high-nccl-busbw",), kind="layout")
    """Pad every bucket to a multiple of 65536 elements, over which NCCL's algorithms run fastest."""
    average_in_collective: bool = flag(False, names=("--ddp-average-in-collective",), kind="kernel")
    """Let the collective compute the mean, instead of dividing each process's gradients before they are summed."""
    reduce_scatter_with_fp32_accumulation: bool = flag(
        False, names=("--ddp-reduce-scatter-with-fp32-accumulation",), kind="kernel", needs=_SHORT_GRADIENTS
    )
    """With --use-distributed-optimizer, send gradients in their own (16-bit) format to the process that updates them,
    and sum them there in float32, instead of rounding every partial sum."""
    check_for_nan_in_grad: bool = flag(True, names=("--check-for-nan-in-loss-and-grad",),
                                       off_names=("--no-check-for-nan-in-loss-and-grad",), kind="report")  # fmt: skip
    """Stop with the name of the first parameter whose gradient, or the step whose loss, is not a number."""
