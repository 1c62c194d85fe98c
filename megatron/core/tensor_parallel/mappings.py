# SPDX-License-Identifier: Apache-2.0
"""Collectives over the tensor-parallel (TP) group that know their gradient.

| function                                    | forward                     | backward                    |
|---------------------------------------------|-----------------------------|-----------------------------|
| copy_to_tensor_model_parallel_region        | identity                    | all-reduce                  |
| reduce_from_tensor_model_parallel_region    | all-reduce                  | identity                    |
| scatter_to_tensor_model_parallel_region     | local slice, last dim       | gather the last dim         |
| gather_from_tensor_model_parallel_region    | gather the last dim         | local slice, last dim       |
| scatter_to_sequence_parallel_region         | local slice, first dim      | gather the first dim        |
| gather_from_sequence_parallel_region        | gather the first dim        | reduce-scatter (or slice)   |
| reduce_scatter_to_sequence_parallel_region  | reduce-scatter, first dim   | gather the first dim        |

A group of one costs nothing: the function returns its argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.core.collectives import all_gather_into_tensor, all_reduce, reduce_scatter_tensor
from megatron.core.errors import ConfigError
from megatron.core.process_groups_config import Group, ProcessGroupCollection

_Step = Callable[[Tensor, Group], Tensor]


def _identity(x: Tensor, group: Group) -> Tensor:
    # A view: autograd takes a function's input returned as it is for a sign that nothing was done.
    return x.view_as(x)


def _all_reduce(x: Tensor, group: Group) -> Tensor:
    # The collective works in place, and the argument may be needed by somebody else.
    x = x.clone(memory_format=torch.contiguous_format)
    all_reduce(x, group)
    return x


def _gather_first(x: Tensor, group: Group) -> Tensor:
    full = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    all_gather_into_tensor(full, x.contiguous(), group)
    return full


def _reduce_scatter_first(x: Tensor, group: Group) -> Tensor:
    own = x.new_empty(_share(x.shape[0], group), *x.shape[1:])
    reduce_scatter_tensor(own, x.contiguous(), group)
    return own


def _slice_first(x: Tensor, group: Group) -> Tensor:
    length = _share(x.shape[0], group)
    # A copy, so that the memory of the whole can be freed.
    return x.narrow(0, group.rank() * length, length).contiguous()


def _gather_last(x: Tensor, group: Group) -> Tensor:
    # Collectives concatenate along the first dimension only: gather into a new one, then move it where it belongs.
    stacked = _gather_first(x.unsqueeze(0), group)  # [tp, ..., n / tp]
    return stacked.movedim(0, -2).flatten(-2)  # [..., tp, n / tp] -> [..., n]


def _slice_last(x: Tensor, group: Group) -> Tensor:
    length = _share(x.shape[-1], group)
    return x.narrow(-1, group.rank() * length, length).contiguous()


def _share(size: int, group: Group) -> int:
    assert size % group.size() == 0, f"a dimension of {size} cannot be divided over {group.size()} ranks"
    return size // group.size()


class _Mapping(torch.autograd.Function):
    """A collective in forward, and its transpose in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, forward: _Step, backward: _Step) -> Tensor:
        # Linear maps: backward needs no values of forward, and keeps none.
        ctx.group, ctx.transpose = group, backward
        return forward(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.transpose(grad, ctx.group), None, None, None


def _apply(x: Tensor, group: Group | None, forward: _Step, backward: _Step) -> Tensor:
    if group is None:  # user code that hands over none
        group = ProcessGroupCollection.current().tp
    # Not even a node in the graph: one process runs the same layers as many, without paying for it.
    if group.size() == 1:
        return x
    result: Tensor = _Mapping.apply(x, group, forward, backward)
    return result


def copy_to_tensor_model_parallel_region(input_: Tensor, group: Group | None = None) -> Tensor:
    """Use the same tensor x on every rank for different work: the ranks' gradients of it are summed."""
    return _apply(input_, group, _identity, _all_reduce)


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: Group | None = None) -> Tensor:
    """Sum every rank's part x; all ranks get the sum."""
    return _apply(input_, group, _all_reduce, _identity)


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: Group | None = None) -> Tensor:
    """Keep this rank's slice of the last dimension: [..., n] -> [..., n / tp]."""
    return _apply(input_, group, _slice_last, _gather_last)


def gather_from_tensor_model_parallel_region(input_: Tensor, group: Group | None = None) -> Tensor:
    """Gather the slices of the last dimension from all ranks: [..., n / tp] -> [..., n]."""
    return _apply(input_, group, _gather_last, _slice_last)


def scatter_to_sequence_parallel_region(input_: Tensor, group: Group | None = None) -> Tensor:
    """Keep this rank's part of the sequence: [s, ...] -> [s / tp, ...]."""
    return _apply(input_, group, _slice_first, _gather_first)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: Group | None = None,
    output_split_sizes: None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """[s / tp, ...] -> [s, ...].

    tensor_parallel_output_grad: each rank goes on with its part of the work, so gradients are summed while they are
    scattered; False where every rank does the same with the result. use_global_buffer: no other result. Raises
    ConfigError for output_split_sizes: ranks have parts of one length.
    """
    _refuse_sizes("output_split_sizes", output_split_sizes)
    return _apply(input_, group, _gather_first, _reduce_scatter_first if tensor_parallel_output_grad else _slice_first)


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor, group: Group | None = None, input_split_sizes: None = None, use_global_buffer: bool = False
) -> Tensor:
    """Sum the ranks' partial sums [s, ...] and keep this rank's part of the sequence, [s / tp, ...]. The last two as
    above."""
    _refuse_sizes("input_split_sizes", input_split_sizes)
    return _apply(input_, group, _reduce_scatter_first, _gather_first)


def _refuse_sizes(name: str, sizes: object) -> None:
    if sizes is not None:
        raise ConfigError(f"{name}={sizes} is not done here: every rank has as much; leave it out, and pad")


def all_gather_last_dim_from_tensor_parallel_region(input_: Tensor, group: Group | None = None) -> Tensor:
    """[..., d / tp] -> [..., d]; backward sums the gradients of all ranks and keeps this one's part."""
    return gather_from_sequence_parallel_region(input_.movedim(-1, 0).contiguous(), group=group).movedim(0, -1)
