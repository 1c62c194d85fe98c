"""Linear and embedding layers whose weight is split over the tensor-parallel (TP) group.

A column layer splits the outputs, a row layer splits the inputs, so `row(act(column(x)))` needs one collective on the
way in and one on the way out:

                  TP                             TP + sequence parallel (SP)
    column, in    x [s, b, h]     identity       x [s/tp, b, h]   all-gather over s
    row, out      y [s, b, h]     all-reduce     y [s/tp, b, h]   reduce-scatter over s

In backward each collective becomes its transpose (mappings.py). With a group of one they vanish.
Source: Shoeybi et al., "Megatron-LM", 2019, section 3; Korthikanti et al., 2022, section 4.2 for SP.

s: sequence, b: batch, h: hidden, tp: size of the TP group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron.core.fusions.embedding import embedding_into_main_grad
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.placement import Part, Split
from megatron.core.process_groups_config import Group, ProcessGroupCollection
from megatron.core.tensor_parallel.linear_ops import choose_linear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.overlapped_linear import (
    CommunicationOverlap,
    gather_and_multiply,
    multiply_and_scatter,
)
from megatron.core.tensor_parallel.parameters import (
    Initialiser,
    by_blocks_of_rows,
    declare_parameter,
    parameter_dtype,
    zeros,
)

LayerOutput = tuple[Tensor, Tensor | None]
"""(output, bias): the bias is None, or with skip_bias_add the one that the caller still has to add."""


def tensor_parallel_split(dim: int, group: Group, parts: Sequence[Part] | None = None) -> tuple[Split, ...]:
    """The split of one dimension over the TP group; none in a group of one, unless there are parts to tell of."""
    if group.size() == 1 and parts is None:
        return ()
    return (Split(dim, "tp", group.size(), group.rank(), None if parts is None else tuple(parts)),)


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with W [output_size / tp, input_size]: each rank computes a slice of the outputs.

    gather_output: every rank gets all outputs. skip_bias_add: hand the bias back instead of adding it, for a caller
    that fuses it with what follows. skip_weight_param_allocation: the weight comes with each call (tied embeddings).
    parts: sub-blocks of the outputs that are split one by one, such as (gate, up); the whole when None.
    """

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
    ) -> None:
        super().__init__()
        self.tp_group = tp_group if tp_group is not None else ProcessGroupCollection.current().tp
        self.input_size, self.output_size = input_size, output_size
        self.gather_output, self.skip_bias_add = gather_output, skip_bias_add
        self.enter = (
            gather_from_sequence_parallel_region if config.sequence_parallel else copy_to_tensor_model_parallel_region
        )
        self.linear = choose_linear(config)
        self.overlap = CommunicationOverlap.of(config, self.tp_group)
        dtype, splits = parameter_dtype(config), tensor_parallel_split(0, self.tp_group, parts)
        self.weight = (
            None
            if skip_weight_param_allocation
            else declare_parameter((output_size, input_size), init=init_method, dtype=dtype, splits=splits)
        )
        self.bias = declare_parameter((output_size,), init=zeros, dtype=dtype, splits=splits) if bias else None

    def forward(self, input_: Tensor, weight: Tensor | None = None) -> LayerOutput:
        """[s, b, input_size], with SP [s/tp, b, input_size] -> [s, b, output_size / tp], or all of output_size."""
        weight = self.weight if weight is None else weight
        assert weight is not None, "this layer was built without a weight; hand one over with each call"
        added_bias = None if self.skip_bias_add else self.bias
        if self.overlap is not None:
            output = gather_and_multiply(input_, weight, added_bias, self.tp_group, self.overlap)
        else:
            output = self.linear(self.enter(input_, self.tp_group), weight, added_bias)
        if self.gather_output:
            output = gather_from_tensor_model_parallel_region(output, self.tp_group)
        return output, self.bias if self.skip_bias_add else None

    def extra_repr(self) -> str:
        """Sizes and split, for print(model)."""
        return f"{self.input_size}, {self.output_size}, bias={self.bias is not None}, tp={self.tp_group.size()}"


class RowParallelLinear(nn.Module):
    """y = x W^T + b with W [output_size, input_size / tp]: each rank adds a part to every output.

    input_is_parallel: the input is this rank's slice already; else it is cut here. skip_bias_add: as above.
    """

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
    ) -> None:
        super().__init__()
        self.tp_group = tp_group if tp_group is not None else ProcessGroupCollection.current().tp
        self.input_size, self.output_size = input_size, output_size
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
        self.leave = (
            reduce_scatter_to_sequence_parallel_region
            if config.sequence_parallel
            else reduce_from_tensor_model_parallel_region
        )
        self.linear = choose_linear(config)
        self.overlap = CommunicationOverlap.of(config, self.tp_group) if config.sequence_parallel else None
        dtype = parameter_dtype(config)
        self.weight = declare_parameter(
            (output_size, input_size), init=init_method, dtype=dtype, splits=tensor_parallel_split(1, self.tp_group)
        )
        # With SP each rank adds the bias to its own tokens only: its gradient is a partial sum.
        partial = ("tp",) if config.sequence_parallel and self.tp_group.size() > 1 else ()
        self.bias = (
            declare_parameter((output_size,), init=zeros, dtype=dtype, partial_grad_axes=partial) if bias else None
        )

    def forward(self, input_: Tensor) -> LayerOutput:
        """[s, b, input_size / tp] -> [s, b, output_size], with SP [s/tp, b, output_size]."""
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_, self.tp_group)
        if self.tp_group.size() == 1 and not self.skip_bias_add:
            return self.linear(input_, self.weight, self.bias), None
        if self.overlap is not None:
            output = multiply_and_scatter(input_, self.weight, self.tp_group, self.overlap)
        else:
            output = self.leave(self.linear(input_, self.weight, None), self.tp_group)
        if self.skip_bias_add or self.bias is None:
            return output, self.bias
        return output + self.bias, None  # the bias is added once, after the sum over the ranks

    def extra_repr(self) -> str:
        """Sizes and split, for print(model)."""
        return f"{self.input_size}, {self.output_size}, bias={self.bias is not None}, tp={self.tp_group.size()}"


class VocabParallelEmbedding(nn.Module):
    """A table [num_embeddings / tp, embedding_dim]: each rank looks up its own rows, and the results are summed.

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
    ) -> None:
        super().__init__()
        self.tp_group = tp_group if tp_group is not None else ProcessGroupCollection.current().tp
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.leave = (
            reduce_scatter_to_sequence_parallel_region
            if reduce_scatter_embeddings
            else reduce_from_tensor_model_parallel_region
        )
        self.lookup = (
            embedding_into_main_grad if choose_linear(config) is not nn.functional.linear else nn.functional.embedding
        )
        self.weight = declare_parameter(
            (num_embeddings, embedding_dim),
            init=by_blocks_of_rows(init_method),
            dtype=parameter_dtype(config),
            splits=tensor_parallel_split(0, self.tp_group),
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        """Token numbers [s, b] -> [s, b, embedding_dim], with SP [s/tp, b, embedding_dim]."""
        if self.tp_group.size() == 1:
            return self.lookup(input_ids, self.weight)
        rows = self.weight.shape[0]
        local_ids = input_ids - self.tp_group.rank() * rows
        elsewhere = (local_ids < 0) | (local_ids >= rows)
        output = self.lookup(local_ids.masked_fill(elsewhere, 0), self.weight)
        output = torch.where(elsewhere.unsqueeze(-1), torch.zeros((), dtype=output.dtype, device=output.device), output)
        return self.leave(output, self.tp_group)

    def extra_repr(self) -> str:
        """Sizes and split, for print(model)."""
        return f"{self.num_embeddings}, {self.embedding_dim}, tp={self.tp_group.size()}"
