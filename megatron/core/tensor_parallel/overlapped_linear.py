"""Linear layers whose communication runs while products are computed. Under sequence parallelism a column layer keeps
its rank's tokens and gathers the others' again in backward; without, it sums its input gradient over the ranks.

    column, forward    gather chunk 1 | gather chunk 2   | gather chunk 3   |
                                      | product, chunk 1 | product, chunk 2 | product, chunk 3

    row, forward       product, chunk 1 | product, chunk 2 | product, chunk 3 |
                                        | scatter chunk 1  | scatter chunk 2  | scatter chunk 3

| pass                     | what runs at the same time                                    | switch             |
|--------------------------|---------------------------------------------------------------|--------------------|
| column forward, row dX   | gather of a chunk, product of the one before                  | overlap_ag         |
| row forward              | reduce-scatter of a chunk, product of the next                | overlap_rs         |
| column backward          | gather of X (kept divided), product dX = dY W                 | bulk_dgrad         |
| column backward          | reduce-scatter of dX, product dW = dY^T X                     | bulk_wgrad         |
| column backward, chunked | reduce-scatter of a chunk of dX, product of the next          | overlap_rs_dgrad   |
| column backward, no SP   | all-reduce of dX, product dW = dY^T X                         | always             |

The two bulk rows need no chunks and always hold (Korthikanti et al., 2022, section 4.2.2); the others, and switching
these off, belong to --tp-comm-overlap.

A chunk is the same stretch of every rank's tokens: of x [tp, chunks, n, b, h], x[:, i]. Collectives are torch's own; on
CUDA they run on the communicator's stream. Source: Wang et al., "Overlap Communication with Dependent Computation via
Decomposition", 2023; the bulk variants are those of Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.collectives import Handle, all_gather_into_tensor, all_reduce, reduce_scatter_tensor
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.process_groups_config import Group
from megatron.core.tensor_parallel.linear_ops import multiply_to_float32, weight_gradient
from megatron.core.weight_grad_queue import is_deferred

CHUNKS = 4
"""At most; the largest divisor of a rank's tokens up to it. What is exposed is one chunk's communication."""


@dataclass(frozen=True)
class CommunicationOverlap:
    """What runs beside what; upstream's switches, see the table above."""

    ag: bool = True
    rs: bool = True
    bulk_dgrad: bool = True
    bulk_wgrad: bool = True
    rs_dgrad: bool = False
    divided: bool = True
    """Each rank has its own tokens (sequence parallelism); else all have all, and nothing is gathered or scattered."""
    into_main_grad: bool = True
    to_float32: bool = False
    """A column layer's result stays in float32, as its products are summed."""

    @classmethod
    def of(cls, config: ModelParallelConfig, group: Group) -> CommunicationOverlap | None:
        """None for a group of one, and where layers are compiled: the communication is outside the linear operation
        then, and a column layer keeps the gathered input."""
        if group.size() == 1 or getattr(config, "compile", False):
            return None
        if not config.tp_comm_overlap:
            into_main_grad, divided = config.gradient_accumulation_fusion, config.sequence_parallel
            return cls(ag=False, rs=False, divided=divided, into_main_grad=into_main_grad)
        return cls(
            ag=config.tp_comm_overlap_ag,
            rs=config.tp_comm_overlap_rs,
            bulk_dgrad=config.tp_comm_bulk_dgrad,
            bulk_wgrad=config.tp_comm_bulk_wgrad,
            rs_dgrad=config.tp_comm_overlap_rs_dgrad,
            into_main_grad=config.gradient_accumulation_fusion,
        )


def gather_and_multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, overlap: CommunicationOverlap
) -> Tensor:
    """A column-parallel layer: all ranks' tokens times our rows of the weight. [s/tp, b, h] -> [s, b, out / tp]; where
    tokens are not divided [s, b, h] -> [s, b, out / tp]."""
    result: Tensor = _GatherAndMultiply.apply(x, weight, bias, group, overlap)
    return result


def multiply_and_scatter(x: Tensor, weight: Tensor, group: Group, overlap: CommunicationOverlap) -> Tensor:
    """A row-parallel layer: partial outputs of all tokens, summed and divided. [s, b, in / tp] -> [s/tp, b, out]."""
    result: Tensor = _MultiplyAndScatter.apply(x, weight, group, overlap)
    return result


class _GatherAndMultiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, overlap: CommunicationOverlap
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.group, ctx.overlap = weight, group, overlap
        multiply = multiply_to_float32 if overlap.to_float32 else F.linear
        if not overlap.divided:
            return multiply(x, weight, bias)
        chunks = _chunks(x.shape[0]) if overlap.ag else 1
        if chunks == 1:
            return multiply(_gather(x, group)[0], weight, bias)
        dtype = torch.float32 if overlap.to_float32 else x.dtype
        output = x.new_empty(x.shape[0] * group.size(), x.shape[1], weight.shape[0], dtype=dtype)
        for rows, gathered in _gathered(x.contiguous(), group, chunks):
            rows(output).copy_(multiply(gathered, weight))
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,), weight, group, overlap = ctx.saved_tensors, ctx.weight, ctx.group, ctx.overlap
        grad_bias = grad.sum(dim=(0, 1)).to(x.dtype) if ctx.needs_input_grad[2] else None
        grad = grad.to(x.dtype).contiguous()
        if not overlap.divided:
            grad_x = grad @ weight if ctx.needs_input_grad[0] else None
            summing = None if grad_x is None else all_reduce(grad_x, group, async_op=True)
            rows = x.flatten(0, -2)
            grad_weight = _weight_gradient(weight, grad, rows, overlap) if ctx.needs_input_grad[1] else None
            _wait([summing])
            return grad_x, grad_weight, grad_bias, None, None
        # A weight gradient that waits in a queue gathers when its turn comes: until then only our tokens are kept.
        is_later = overlap.into_main_grad and is_deferred(weight)
        x_full, gathering = None, None
        if ctx.needs_input_grad[1] and not is_later:
            x_full, gathering = _gather(x, group, async_op=overlap.bulk_dgrad)
        chunks = _chunks(x.shape[0]) if overlap.rs_dgrad else 1
        grad_x, scattering = _multiplied_and_scattered(grad, weight, group, chunks)
        if not (overlap.bulk_wgrad or overlap.rs_dgrad):
            _wait(scattering)
        _wait([gathering])
        grad_weight = None
        if ctx.needs_input_grad[1]:
            x_rows = (lambda: _gather(x, group)[0].flatten(0, -2)) if x_full is None else x_full.flatten(0, -2)
            grad_weight = _weight_gradient(weight, grad, x_rows, overlap)
        _wait(scattering)
        return grad_x, grad_weight, grad_bias, None, None


class _MultiplyAndScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Group, overlap: CommunicationOverlap) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.group, ctx.overlap = weight, group, overlap
        chunks = _chunks(x.shape[0] // group.size()) if overlap.rs else 1
        output, scattering = _multiplied_and_scattered(x.contiguous(), weight.t(), group, chunks)
        _wait(scattering)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,), weight, group, overlap = ctx.saved_tensors, ctx.weight, ctx.group, ctx.overlap
        chunks = _chunks(grad.shape[0]) if overlap.ag else 1
        if chunks == 1:
            grad_full, _ = _gather(grad, group)
            grad_x = grad_full @ weight
        else:
            grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
            grad_full = grad.new_empty(x.shape[0], *grad.shape[1:])
            for rows, gathered in _gathered(grad.contiguous(), group, chunks):
                rows(grad_full).copy_(gathered)
                rows(grad_x).copy_(gathered @ weight)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = _weight_gradient(weight, grad_full, x.flatten(0, -2), overlap)
        return grad_x, grad_weight, None, None


def _gather(own: Tensor, group: Group, async_op: bool = False) -> tuple[Tensor, Handle | None]:
    """All ranks' tokens, [s/tp, b, h] -> [s, b, h], and what to wait for."""
    full = own.new_empty(own.shape[0] * group.size(), *own.shape[1:])
    return full, all_gather_into_tensor(full, own.contiguous(), group, async_op=async_op)


Rows = Callable[[Tensor], Tensor]
"""A tensor of all tokens [s, ...] -> the tokens of one chunk [tp, n, ...], a view."""


def _chunks(tokens: int) -> int:
    return next(count for count in range(min(CHUNKS, tokens), 0, -1) if tokens % count == 0)


def _rows(index: int, chunks: int, group: Group) -> Rows:
    return lambda full: full.view(group.size(), chunks, -1, *full.shape[1:])[:, index]


def _gathered(own: Tensor, group: Group, chunks: int) -> Iterator[tuple[Rows, Tensor]]:
    """Chunk after chunk of all ranks' tokens [tp, n, b, h], while the following ones are still on their way."""
    under_way: list[tuple[Tensor, Handle | None]] = []
    for part in own.chunk(chunks):
        gathered = own.new_empty(group.size(), *part.shape)
        handle = all_gather_into_tensor(gathered.flatten(0, 1), part, group, async_op=chunks > 1)
        under_way.append((gathered, handle))
    for index, (gathered, handle) in enumerate(under_way):
        _wait([handle])
        yield _rows(index, chunks, group), gathered


def _multiplied_and_scattered(
    x: Tensor, factor: Tensor, group: Group, chunks: int
) -> tuple[Tensor, list[Handle | None]]:
    """Our tokens of the ranks' sum of x @ factor, [s, b, in] -> [s/tp, b, out], and what to wait for."""
    own = x.new_empty(x.shape[0] // group.size(), x.shape[1], factor.shape[1])
    handles = []
    for index, part in enumerate(own.chunk(chunks)):
        product = _rows(index, chunks, group)(x).flatten(0, -2) @ factor
        product = product.view(group.size() * part.shape[0], *part.shape[1:])
        handles.append(reduce_scatter_tensor(part, product, group, async_op=True))
    return own, handles


def _wait(handles: list[Handle | None]) -> None:
    for handle in handles:
        if handle is not None:
            handle.wait()
    handles.clear()


def _weight_gradient(
    weight: Tensor, grad: Tensor, x_rows: Tensor | Callable[[], Tensor], overlap: CommunicationOverlap
) -> Tensor | None:
    grad_rows = grad.flatten(0, -2)
    if overlap.into_main_grad:
        return weight_gradient(weight, grad_rows, x_rows)
    return grad_rows.t() @ (x_rows if isinstance(x_rows, Tensor) else x_rows())
