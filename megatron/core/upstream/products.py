# SPDX-License-Identifier: Apache-2.0
"""Upstream's functions around tensor-parallel products."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megatron.core.errors import ConfigError
from megatron.core.process_groups_config import Group, ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import EXPERT_PARALLEL_STREAM

_CUDA_RNG_STATE_TRACKER = None
_CUDA_RNG_STATE_TRACKER_INITIALIZED = False
"""Set by programs that start over. Nothing reads them: model_parallel_cuda_manual_seed() seeds anew."""


def linear_with_frozen_weight(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Group | None,
    grad_output_buffer: Any = None,
    wgrad_deferral_limit: Any = None,
    async_grad_allreduce: bool | None = None,
) -> Tensor:
    """input W^T + b, where the weight gets no gradient.

    allreduce_dgrad: the input's gradient is summed over the group, async_grad_allreduce is its former name.
    sequence_parallel: the input is gathered along dimension 0 first. gradient_accumulation_fusion,
    wgrad_deferral_limit: about a weight's gradient. Raises ConfigError for a grad_output_buffer.
    """
    if grad_output_buffer is not None:
        raise ConfigError("a frozen weight has no gradient to keep outputs for; leave out grad_output_buffer")
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, group=tp_group)  # noqa: A001
    elif allreduce_dgrad if async_grad_allreduce is None else async_grad_allreduce:
        input = copy_to_tensor_model_parallel_region(input, tp_group)  # noqa: A001
    return F.linear(input, weight.detach(), bias)


def all_gather_last_dim_from_tensor_parallel_region(input_: Tensor, group: Group | None = None) -> Tensor:
    """[..., d / tp] -> [..., d]; backward sums the gradients of all ranks and keeps this one's part."""
    return gather_from_sequence_parallel_region(input_.movedim(-1, 0).contiguous(), group=group).movedim(0, -1)


def set_tensor_model_parallel_attributes(tensor: Any, is_parallel: bool, dim: int, stride: int = 1) -> None:
    """Mark a tensor as divided along `dim`. Raises ValueError where it has marks already."""
    if hasattr(tensor, "tensor_model_parallel"):
        raise ValueError("the tensor has marks already; parameters of our layers get them when they are built")
    tensor.tensor_model_parallel, tensor.partition_dim, tensor.partition_stride = is_parallel, dim, stride


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Any) -> None:
    """Mark a tensor as whole, as far as it has no marks."""
    for name, value in (("tensor_model_parallel", False), ("partition_dim", -1), ("partition_stride", 1)):
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def param_is_not_tensor_parallel_duplicate(param: Any, tp_group: Group | None = None) -> bool:
    """Return whether this process's copy counts: a divided tensor's always, a whole one's on the first rank."""
    group = tp_group if tp_group is not None else ProcessGroupCollection.current().tp
    return bool(getattr(param, "tensor_model_parallel", False)) or group.rank() == 0


def get_expert_parallel_rng_tracker_name() -> str:
    """The name under which the tracker of random streams has that of experts."""
    return EXPERT_PARALLEL_STREAM
