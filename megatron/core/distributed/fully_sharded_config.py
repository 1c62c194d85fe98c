"""What fully sharded data parallelism needs to know, under upstream's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.config_base import CheckedConfig, flag
from megatron.core.setting import Needs

NumberFormat = Literal["fp32", "bf16", "fp16", "auto"]

_SWITCHES = "--use-torch-fsdp2 or --use-megatron-fsdp"
_FULLY_SHARDED = Needs(_SWITCHES, lambda run: not run.given.isdisjoint(("use_torch_fsdp2", "use_megatron_fsdp")))
_DIVIDED_PARAMETERS = Needs(_SWITCHES, lambda run: run.use_torch_fsdp2)
_MEGATRON_FSDP = Needs("--use-megatron-fsdp", lambda run: run.use_megatron_fsdp)


@dataclass(kw_only=True)
class FullyShardedConfig(CheckedConfig):
    """Parameters, gradients and optimizer state divided over data-parallel processes."""

    use_torch_fsdp2: bool = flag(False, kind="layout")
    """Divide parameters, gradients and optimizer state over the data-parallel processes, through PyTorch's fully_shard
    (ZeRO-3); a layer's parameters are gathered while it computes."""
    use_megatron_fsdp: bool = flag(False, kind="layout")
    """For scripts of upstream's own FSDP: becomes --use-torch-fsdp2, or with --data-parallel-sharding-strategy optim
    --use-distributed-optimizer, and with no_shard plain data parallelism."""
    data_parallel_sharding_strategy: str = flag(
        "optim_grads_params",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
        kind="layout",
        needs=_FULLY_SHARDED,
    )
    """With --use-torch-fsdp2 or --use-megatron-fsdp, what is divided: everything (ZeRO-3), all but parameters (ZeRO-2:
    they are gathered once a step), the optimizer state alone (as --use-distributed-optimizer), or nothing."""
    torch_fsdp2_reshard_after_forward: bool = flag(
        True, off_names=("--torch-fsdp2-no-reshard-after-forward",), kind="layout", needs=_DIVIDED_PARAMETERS
    )
    """With --use-torch-fsdp2, drop a layer's gathered parameters after its forward and gather them again for its
    backward; switched off, they stay in between, which spares one of the two gathers."""
    suggested_communication_unit_size: int | None = flag(
        None, minimum=1, unit="elements", kind="layout", needs=_DIVIDED_PARAMETERS
    )
    """With --use-torch-fsdp2 or --use-megatron-fsdp, gather layers that follow each other together until they have so
    many parameters; each layer alone when not given."""
    megatron_fsdp_enable_fine_grained_param_gather: bool = flag(False, kind="layout", needs=_DIVIDED_PARAMETERS)
    """With --use-torch-fsdp2 or --use-megatron-fsdp, gather the attention and the MLP of a layer each for itself."""
    megatron_fsdp_main_params_dtype: NumberFormat = flag("fp32", kind="numerics", needs=_FULLY_SHARDED)
    """With --use-torch-fsdp2 or --use-megatron-fsdp, number format of the divided parameters, which the optimizer
    updates: fp32, or that of the model (auto), without float32 main parameters."""
    megatron_fsdp_main_grads_dtype: NumberFormat = flag("auto", kind="numerics", needs=_FULLY_SHARDED)
    """With --use-torch-fsdp2 or --use-megatron-fsdp, number format in which gradients are added up over microbatches;
    auto: that of the divided parameters."""
    megatron_fsdp_grad_comm_dtype: NumberFormat = flag("auto", kind="numerics", needs=_FULLY_SHARDED)
    """With --use-torch-fsdp2 or --use-megatron-fsdp, number format in which gradients are sent and summed over
    processes; auto: that of --megatron-fsdp-main-grads-dtype where given, else as without FSDP."""
    megatron_fsdp_version: int = flag(1, choices=(1, 2), kind="layout", needs=_MEGATRON_FSDP)
    """With --use-megatron-fsdp, which of upstream's implementations; PyTorch's takes the place of either."""
    nccl_ub: bool = flag(False, names=("--use-nccl-ub",), kind="layout")
    """With --use-torch-fsdp2 or --use-megatron-fsdp, gather and sum in memory that NCCL has registered, so that it
    need not copy; other backends use ordinary memory."""
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
