"""Number formats of divided parameters and their gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.errors import ConfigError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Formats(NamedTuple):
    """How divided parameters and their gradients are kept and sent."""

    params: torch.dtype
    """Of the divided parameters, which the optimizer updates; the network computes with copies in its own."""
    grads: torch.dtype
    """In which gradients are added up over microbatches."""
    sent: torch.dtype
    """In which they are sent, and summed over processes."""

    @classmethod
    def of(cls, config: DistributedDataParallelConfig, model: torch.dtype) -> Formats:
        """model: number format in which the network computes. Raises ConfigError for a main gradient format that torch
        cannot keep."""
        params = _DTYPES.get(config.megatron_fsdp_main_params_dtype, model)
        grads = _DTYPES.get(config.megatron_fsdp_main_grads_dtype)
        sent = _DTYPES.get(config.megatron_fsdp_grad_comm_dtype, grads)
        if sent is None:
            sent = torch.float32 if config.grad_reduce_in_fp32 else model
        if grads not in (None, params, model):
            raise ConfigError(
                f"--megatron-fsdp-main-grads-dtype {config.megatron_fsdp_main_grads_dtype}: sums arrive in the number "
                "format of the divided parameters; use auto"
            )
        return cls(params, params if grads is None else grads, sent)
