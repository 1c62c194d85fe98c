# SPDX-License-Identifier: Apache-2.0
"""Linear and embedding layers whose weight is split over the tensor-parallel (TP) group.

A column layer splits the outputs, a row layer splits the inputs, so `row(act(column(x)))` needs one collective on the
way in and one on the way out:

                  TP                             TP + sequence parallel (SP)
    column, in    x [s, b, h]     identity       x [s/tp, b, h]   all-gather over s
    row, out      y [s, b, h]     all-reduce     y [s/tp, b, h]   reduce-scatter over s

In backward each collective becomes its transpose. A layer has a product (products.py), which multiplies by its weight
in forward and backward, and a plan (communication_plans.py), which runs the collectives before, after or beside the
product; `plan.multiply(product, x, weight, bias)` is all that its forward does, but for an adapter where there is one
(transformer/adapters.py). A built layer may be given another product, as the output layer of float32 logits is.
Source: Shoeybi et al., "Megatron-LM", 2019, section 3; Korthikanti et al., 2022, section 4.2 for SP.

s: sequence, b: batch, h: hidden, tp: size of the TP group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.placement import Part, Split
from megatron.core.process_groups_config import Group, ProcessGroupCollection
from megatron.core.taken_arguments import take_arguments
from megatron.core.tensor_parallel.communication_plans import choose_column_plan, choose_row_plan
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.parameters import (
    Initialiser,
    by_blocks_of_rows,
    declare_parameter,
    parameter_dtype,
    zeros,
)
from megatron.core.tensor_parallel.products import choose_lookup, choose_product, multiply
from megatron.core.tensor_parallel.upstream_arguments import find_layer_group, finish_layer, take_layer_arguments

LayerOutput = tuple[Tensor, Tensor | None]
"""(output, bias): the bias is None, or with skip_bias_add the one that the caller still has to add."""


def tensor_parallel_split(dim: int, group: Group, parts: Sequence[Part] | None = None) -> tuple[Split, ...]:
    """The split of one dimension over the TP group; none in a group of one, unless there are parts to tell of."""
    # The parts (gate and up; query, key, value) are facts about the weight that optimizers and checkpoints read also
    # where one rank has all of it.
    if group.size() == 1 and parts is None:
        return ()
    return (Split(dim, "tp", group.size(), group.rank(), None if parts is None else tuple(parts)),)


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with W [output_size / tp, input_size]: each rank computes a slice of the outputs.

    gather_output: every rank gets all outputs. skip_bias_add: hand the bias back instead of adding it, for a caller
    that fuses it with what follows. skip_weight_param_allocation: the weight comes with each call (tied embeddings).
    parts: sub-blocks of the outputs that are split one by one, such as (gate, up); the whole when None. is_expert,
    pg_collection: see find_layer_group().
    """

    @take_layer_arguments
    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: Initialiser,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        parts: Sequence[Part] | None = None,
        tp_group: Group | None = None,
        is_expert: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__()
        self.tp_group = find_layer_group(self, tp_group, is_expert, pg_collection)
        self.input_size, self.output_size = input_size, output_size
        self.gather_output, self.skip_bias_add = gather_output, skip_bias_add
        self.product = choose_product(config)
        self.plan = choose_column_plan(config, self.tp_group)
        # [out, in]: the outputs are dimension 0 of the weight, and the bias is split as they are.
        dtype, splits = parameter_dtype(config), tensor_parallel_split(0, self.tp_group, parts)
        self.weight = (
            None
            if skip_weight_param_allocation
            else declare_parameter(
                (output_size, input_size), init=init_method, dtype=dtype, splits=splits, parallel_dim=0
            )
        )
        self.bias = None
        if bias:
            self.bias = declare_parameter((output_size,), init=zeros, dtype=dtype, splits=splits, parallel_dim=0)
        self.adapter: nn.Module | None = None
        finish_layer(self, config, tp_group is None or is_expert or pg_collection is not None)

    def forward(self, input_: Tensor, weight: Tensor | None = None) -> LayerOutput:
        """[s, b, input_size], with SP [s/tp, b, input_size] -> [s, b, output_size / tp], or all of output_size."""
        weight = self.weight if weight is None else weight
        assert weight is not None, "this layer was built without a weight; hand one over with each call"
        added_bias = None if self.skip_bias_add else self.bias
        output = self.plan.multiply(self.product, input_, weight, added_bias)
        if self.adapter is not None:
            output = self.adapter(input_, output, weight, added_bias)
        if self.gather_output:
            output = gather_from_tensor_model_parallel_region(output, self.tp_group)
        return output, self.bias if self.skip_bias_add else None

    def extra_repr(self) -> str:
        """Sizes and split, for print(model)."""
        return f"{self.input_size}, {self.output_size}, bias={self.bias is not None}, tp={self.tp_group.size()}"


class ReplicatedLinear(nn.Module):
    """y = x W^T with W [output_size, input_size] unsharded on every rank: no collective in forward or backward.

    For narrow outputs that all ranks need. Every rank computes all outputs of the same tokens, and with SP only of its
    tokens, so that its gradient of the weight is a partial sum. splits_tokens: True if each rank has different tokens;
    with SP when None.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: Initialiser,
        tp_group: Group | None = None,
        bias: bool = False,
        splits_tokens: bool | None = None,
    ) -> None:
        super().__init__()
        group = tp_group if tp_group is not None else ProcessGroupCollection.current().tp
        self.product = choose_product(config)
        splits_tokens = config.sequence_parallel if splits_tokens is None else splits_tokens
        partial_grad_axes = ("tp",) if splits_tokens and group.size() > 1 else ()
        dtype = parameter_dtype(config)
        self.weight = declare_parameter(
            (output_size, input_size), init=init_method, dtype=dtype, partial_grad_axes=partial_grad_axes
        )
        self.bias = None
        if bias:
            self.bias = declare_parameter((output_size,), init=zeros, dtype=dtype, partial_grad_axes=partial_grad_axes)
        self.adapter: nn.Module | None = None

    def forward(self, input_: Tensor) -> LayerOutput:
        """[s, b, input_size] -> [s, b, output_size], with SP of this rank's tokens; a bias has been added."""
        output = multiply(self.product, input_, self.weight, self.bias)
        return output if self.adapter is None else self.adapter(input_, output, self.weight, self.bias), None

    def extra_repr(self) -> str:
        """Sizes, for print(model)."""
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}, replicated"


class RowParallelLinear(nn.Module):
    """y = x W^T + b with W [output_size, input_size / tp]: each rank adds a part to every output.

    input_is_parallel: the input is this rank's slice already; else it is cut here. skip_bias_add: as above.
    """

    @take_layer_arguments
    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: Initialiser,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        tp_group: Group | None = None,
        is_expert: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__()
        self.tp_group = find_layer_group(self, tp_group, is_expert, pg_collection)
        self.input_size, self.output_size = input_size, output_size
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
        self.product = choose_product(config)
        self.plan = choose_row_plan(config, self.tp_group)
        dtype = parameter_dtype(config)
        self.weight = declare_parameter(
            (output_size, input_size),
            init=init_method,
            dtype=dtype,
            splits=tensor_parallel_split(1, self.tp_group),
            parallel_dim=1,
        )
        # Each rank has the full bias. Without SP all compute the same gradient of it from the same outputs; with SP
        # each adds it only to its tokens, so that its gradient is a partial sum.
        partial = ("tp",) if config.sequence_parallel and self.tp_group.size() > 1 else ()
        self.bias = (
            declare_parameter((output_size,), init=zeros, dtype=dtype, partial_grad_axes=partial) if bias else None
        )
        self.adapter: nn.Module | None = None
        finish_layer(self, config, tp_group is None or is_expert or pg_collection is not None)

    def forward(self, input_: Tensor) -> LayerOutput:
        """[s, b, input_size / tp] -> [s, b, output_size], with SP [s/tp, b, output_size]."""
        # What a column layer left is split already; anything else has to be, or all ranks would add up the same.
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_, self.tp_group)
        # Of several ranks each makes a part of the sum: the bias is added once, when the sum is complete.
        inner_bias = self.bias if self.tp_group.size() == 1 and not self.skip_bias_add else None
        output = self.plan.multiply(self.product, input_, self.weight, inner_bias)
        if self.adapter is not None:
            output = self.adapter(input_, output, self.weight, inner_bias)
        if self.skip_bias_add:
            return output, self.bias
        return (output if self.bias is None or inner_bias is not None else output + self.bias), None

    def extra_repr(self) -> str:
        """Sizes and split, for print(model)."""
        return f"{self.input_size}, {self.output_size}, bias={self.bias is not None}, tp={self.tp_group.size()}"


class VocabParallelEmbedding(nn.Module):
    """A table [num_embeddings / tp, embedding_dim]: each rank looks up its rows, and the results are summed.

    reduce_scatter_embeddings: leave with this rank's part of the sequence (SP).
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: Initialiser,
        config: ModelParallelConfig,
        reduce_scatter_embeddings: bool = False,
        tp_group: Group | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__()
        self.tp_group = find_layer_group(self, tp_group, groups=pg_collection)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.leave = (
            reduce_scatter_to_sequence_parallel_region
            if reduce_scatter_embeddings
            else reduce_from_tensor_model_parallel_region
        )
        self.product = choose_lookup(config)
        self.weight = declare_parameter(
            (num_embeddings, embedding_dim),
            kind="embedding",
            init=by_blocks_of_rows(init_method),
            dtype=parameter_dtype(config),
            splits=tensor_parallel_split(0, self.tp_group),
            parallel_dim=0,
        )
        finish_layer(self, config, tp_group is None or pg_collection is not None)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Token numbers [s, b] -> [s, b, embedding_dim], with SP [s/tp, b, embedding_dim]."""
        if self.tp_group.size() == 1:
            return multiply(self.product, input_ids, self.weight)
        # Ranks hold consecutive rows. Of each token one rank has the row, the others add zeros.
        rows = self.weight.shape[0]
        local_ids = input_ids - self.tp_group.rank() * rows
        elsewhere = (local_ids < 0) | (local_ids >= rows)
        # Other ranks' tokens look up row 0, and the zeros that replace it also stop its gradient.
        output = multiply(self.product, local_ids.masked_fill(elsewhere, 0), self.weight)
        output = torch.where(elsewhere.unsqueeze(-1), torch.zeros((), dtype=output.dtype, device=output.device), output)
        return self.leave(output, self.tp_group)

    def extra_repr(self) -> str:
        """Sizes and split, for print(model)."""
        return f"{self.num_embeddings}, {self.embedding_dim}, tp={self.tp_group.size()}"


@take_arguments(
    "input weight bias gradient_accumulation_fusion allreduce_dgrad sequence_parallel tp_group "
    "grad_output_buffer=None wgrad_deferral_limit=... gtp_remat_size=1 output_dtype=None",
    "a frozen weight has no gradient to keep outputs for, and a caller can cast the output",
)
def linear_with_frozen_weight(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Group | None,
    async_grad_allreduce: bool | None = None,
) -> Tensor:
    """input W^T + b, where the weight gets no gradient.

    allreduce_dgrad: the input's gradient is summed over the group, async_grad_allreduce is its former name.
    sequence_parallel: the input is gathered along dimension 0 first. gradient_accumulation_fusion: about a weight's
    gradient.
    """
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, group=tp_group)  # noqa: A001
    elif allreduce_dgrad if async_grad_allreduce is None else async_grad_allreduce:
        input = copy_to_tensor_model_parallel_region(input, tp_group)  # noqa: A001
    return F.linear(input, weight.detach(), bias)


# ---- marks on parameters of layers of others


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


def param_is_not_tensor_parallel_duplicate(
    param: Any, tp_group: Group | None = None, expert_tp_group: Group | None = None
) -> bool:
    """Return whether this process's copy counts: a divided tensor's always, a whole one's on the first rank.
    expert_tp_group: in place of tp_group for experts, whose parameters have `allreduce` False."""
    if not getattr(param, "allreduce", True):
        tp_group = expert_tp_group if expert_tp_group is not None else ProcessGroupCollection.current().expt_tp
    group = tp_group if tp_group is not None else ProcessGroupCollection.current().tp
    return bool(getattr(param, "tensor_model_parallel", False)) or group.rank() == 0
