# SPDX-License-Identifier: Apache-2.0
"""Communication of tensor-parallel linear layers around their product, and the part of it that overlaps computation.

Each layer has one plan, chosen when it is built:

| layer, tokens             | plan              | forward                  | backward                               |
|---------------------------|-------------------|--------------------------|----------------------------------------|
| column, whole everywhere  | SumInputGrad      | product                  | all-reduce of dX beside dW             |
| column, divided (SP)      | GatherInput       | all-gather of X, product | all-gather of X beside dX,             |
|                           |                   |                          | reduce-scatter of dX beside dW         |
| row, whole everywhere     | OutsideProduct    | product, all-reduce of Y | products                               |
| row, divided (SP)         | ScatterOutput     | product, reduce-scatter  | all-gather of dY, products             |
| either, in a group of one | CommunicationPlan | product                  | products                               |

Under sequence parallelism (SP) a column layer keeps only its rank's tokens until backward, and gathers the others'
again there.

With --tp-comm-overlap, gathers and scatters are cut into chunks, each of which travels beside another one's product:

    column, forward    gather chunk 1 | gather chunk 2   | gather chunk 3   |
                                      | product, chunk 1 | product, chunk 2 | product, chunk 3

    launched           gather 1, gather 2, product 1, gather 3, product 2, gather 4, product 3, product 4

    row, forward       product, chunk 1 | product, chunk 2 | product, chunk 3 |
                                        | scatter chunk 1  | scatter chunk 2  | scatter chunk 3

| pass                     | what runs at the same time                                    | switch             |
|--------------------------|---------------------------------------------------------------|--------------------|
| column forward, row dX   | gather of a chunk, product of the one before                  | overlap_ag         |
| row forward              | reduce-scatter of a chunk, product of the next                | overlap_rs         |
| column backward          | gather of X (kept divided), product dX = dY W                 | bulk_dgrad         |
| column backward          | reduce-scatter of dX, product dW = dY^T X                     | bulk_wgrad         |
| column backward, chunked | reduce-scatter of a chunk of dX, product of the next          | overlap_rs_dgrad   |

The two bulk rows need no chunks and always hold (Korthikanti et al., 2022, section 4.2.2); the others, and switching
these off, belong to --tp-comm-overlap.

Where the GPUs of a group are linked by NVLink and have several hardware queues, overlap_ag, overlap_rs and
overlap_rs_dgrad leave chunks and products to PyTorch's symmetric memory (fused_collectives.py), the first two also
without --tp-comm-overlap.

A chunk is the same stretch of every rank's tokens: of x [tp, chunks, n, b, h], x[:, i]. Collectives are torch's; on
CUDA they run on the communicator's stream. Source: Wang et al., "Overlap Communication with Dependent Computation via
Decomposition", 2023; the bulk variants are Transformer Engine's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.collectives import Handle, all_gather_into_tensor, all_reduce, reduce_scatter_tensor
from megatron.core.device import current_device, is_cpu
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.process_groups_config import Group
from megatron.core.tensor_parallel.fused_collectives import FusedCollectives, choose_fused_collectives
from megatron.core.tensor_parallel.kept_activations import has_way
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.products import (
    CommunicationPlan,
    Kept,
    Product,
    defers_weight_grad,
    finish_weight_grad,
    forward_keeping,
    load_kept,
    multiply,
    save_kept,
    sum_bias_grad,
)

CHUNKS = 4
"""At most; the largest divisor of a rank's tokens up to it. What is exposed is one chunk's communication."""
IN_FLIGHT = 2
"""Chunks that travel at the same time, at most: one that the next product waits for, and the one after it."""

Mapping = Callable[[Tensor, Group], Tensor]


def choose_column_plan(config: ModelParallelConfig, group: Group) -> CommunicationPlan:
    """Choose the plan of a column layer, whose outputs are split over the group."""
    if group.size() == 1:
        return CommunicationPlan()
    if not config.sequence_parallel:
        return SumInputGrad(group)
    fused = _find_fused(config, group)
    if not config.tp_comm_overlap and fused is None:
        return GatherInput(group)
    return GatherInput(
        group,
        overlap_ag=config.tp_comm_overlap_ag,
        bulk_dgrad=config.tp_comm_bulk_dgrad,
        bulk_wgrad=config.tp_comm_bulk_wgrad,
        overlap_rs_dgrad=config.tp_comm_overlap_rs_dgrad,
        fused=fused,
        most_chunks=CHUNKS if config.tp_comm_overlap else 1,
    )


def _find_fused(config: ModelParallelConfig, group: Group) -> FusedCollectives | None:
    # They promise no order of sums. On the CPU there are none, and no query is needed.
    if config.deterministic_mode or (is_cpu(current_device()) and not config.tp_comm_overlap):
        return None
    return choose_fused_collectives(group)


def choose_row_plan(config: ModelParallelConfig, group: Group) -> CommunicationPlan:
    """The plan of a layer whose inputs are split over the group. Its product has no bias: the outputs are parts of a
    sum."""
    if group.size() == 1:
        return CommunicationPlan()
    if not config.sequence_parallel:
        return OutsideProduct(group, leave=reduce_from_tensor_model_parallel_region)
    fused = _find_fused(config, group)
    if not config.tp_comm_overlap and fused is None:
        return ScatterOutput(group)
    return ScatterOutput(
        group,
        overlap_ag=config.tp_comm_overlap_ag,
        overlap_rs=config.tp_comm_overlap_rs,
        fused=fused,
        most_chunks=CHUNKS if config.tp_comm_overlap else 1,
    )


@dataclass(frozen=True)
class OutsideProduct(CommunicationPlan):
    """Communication after the product, as a separate operation: all that a sum of outputs needs."""

    group: Group
    leave: Mapping

    @property
    def name(self) -> str:
        """As CommunicationPlan.name."""
        return "collectives before and after products"

    def multiply(self, product: Product, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """[s, b, in] -> [s, b, out]."""
        return self.leave(multiply(product, x, weight, bias), self.group)


@dataclass(frozen=True)
class SumInputGrad(CommunicationPlan):
    """Every rank has all tokens and makes a part of the outputs, so the input gradient is a sum over the ranks."""

    group: Group

    @property
    def name(self) -> str:
        """As CommunicationPlan.name."""
        return "input gradients summed beside weight gradients"

    def multiply(self, product: Product, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply all tokens x [s, b, in] -> this rank's outputs [s, b, out / tp]."""
        result: Tensor = _MultiplyAndSumInputGrad.apply(x, weight, bias, product, self)
        return result


@dataclass(frozen=True)
class GatherInput(CommunicationPlan):
    """Every rank has different tokens, and computes a part of the outputs of all of them."""

    group: Group
    overlap_ag: bool = False
    bulk_dgrad: bool = True
    bulk_wgrad: bool = True
    overlap_rs_dgrad: bool = False
    fused: FusedCollectives | None = None
    most_chunks: int = CHUNKS
    """1 where only products that `fused` takes overlap."""

    @property
    def name(self) -> str:
        """As CommunicationPlan.name."""
        return _describe_overlap(self.overlap_ag or self.overlap_rs_dgrad, self.fused)

    def multiply(self, product: Product, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Gather all tokens from x [s/tp, b, in] and multiply them -> this rank's outputs [s, b, out / tp]."""
        result: Tensor = _GatherAndMultiply.apply(x, weight, bias, product, self)
        return result


@dataclass(frozen=True)
class ScatterOutput(CommunicationPlan):
    """Every rank makes partial outputs of all tokens, which are summed and divided."""

    group: Group
    overlap_ag: bool = False
    overlap_rs: bool = False
    fused: FusedCollectives | None = None
    most_chunks: int = CHUNKS
    """1 where only products that `fused` takes overlap."""

    @property
    def name(self) -> str:
        """As CommunicationPlan.name."""
        return _describe_overlap(self.overlap_ag or self.overlap_rs, self.fused)

    def multiply(self, product: Product, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply this rank's inputs x [s, b, in / tp], sum over the ranks -> this rank's tokens [s/tp, b, out]."""
        assert bias is None, "every rank would add the bias to its part of the sum"
        result: Tensor = _MultiplyAndScatter.apply(x, weight, product, self)
        return result


def _describe_overlap(is_chunked: bool, fused: FusedCollectives | None) -> str:
    if not is_chunked:
        return "tokens gathered before products and scattered after"
    how = "in chunks beside products" if fused is None else "inside of products, by symmetric memory"
    return f"tokens gathered and scattered {how}"


def _choose_fused(plan: GatherInput | ScatterOutput, product: Product) -> FusedCollectives | None:
    # Other products round operands or results.
    return plan.fused if product.is_plain else None


# In each backward below a collective is launched before the product that overlaps it. On a GPU with one hardware queue
# (CUDA_DEVICE_MAX_CONNECTIONS=1, set at start) kernels start in the order of their launch: the other way round the
# collective would wait until the product has left the processors.
# Each also keeps the weight itself on ctx, with its main_grad and queue: hooks for saved tensors would hand back
# another tensor.


class _MultiplyAndSumInputGrad(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product, plan: SumInputGrad
    ) -> Tensor:
        output, kept = forward_keeping(product, x, weight, bias)
        save_kept(ctx, kept)
        ctx.weight, ctx.product, ctx.plan, ctx.shape = weight, product, plan, x.shape
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x, _), weight, product = load_kept(ctx), ctx.weight, ctx.product
        grad = grad.reshape(-1, grad.shape[-1])  # [s, b, out] -> [tokens, out]
        grad_bias = sum_bias_grad(grad, weight) if ctx.needs_input_grad[2] else None
        grad = grad.to(weight.dtype)
        grad_x, summing = None, None
        if ctx.needs_input_grad[0]:
            grad_x = product.input_grad(grad, weight).view(ctx.shape)
            # Under way while dW is computed, which does not need it.
            summing = all_reduce(grad_x, ctx.plan.group, async_op=True)
        grad_weight = finish_weight_grad(product, weight, grad, x) if ctx.needs_input_grad[1] else None
        _wait([summing])
        return grad_x, grad_weight, grad_bias, None, None


class _GatherAndMultiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product, plan: GatherInput
    ) -> Tensor:
        ctx.weight, ctx.product, ctx.plan, ctx.tokens, ctx.divides = weight, product, plan, x.shape[0], []
        if plan.overlap_ag and (fused := _choose_fused(plan, product)) is not None:
            save_kept(ctx, x)
            output = fused.gather_and_multiply(x, weight.t())
            return output if bias is None else output.add_(bias)
        chunks = _count_chunks(x.shape[0], plan.most_chunks) if plan.overlap_ag else 1
        # Only the local tokens: the gathered ones are tp times as large, and backward can hide a second gather.
        if chunks == 1:
            full = _gather(x, plan.group)[0]
            if has_way(x):
                save_kept(ctx, x)
                return product.forward(full, weight, bias)
            output, kept = product.forward_keeping(full, weight, bias)
            own, ctx.divides = (x, []) if isinstance(kept, Tensor) else _divide_kept(kept, plan.group)
            save_kept(ctx, own)
            return output
        save_kept(ctx, x)
        dtype = x.dtype if product.out_dtype is None else product.out_dtype
        output = x.new_empty(x.shape[0] * plan.group.size(), x.shape[1], weight.shape[0], dtype=dtype)
        # A chunk's tokens come from all ranks: its product goes straight to their places in the sequence.
        for rows, gathered in _gather_chunks(x.contiguous(), plan.group, chunks):
            product.forward_parts(gathered, weight, out=rows(output))
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x, _), weight, product, plan = load_kept(ctx), ctx.weight, ctx.product, ctx.plan
        grad_bias = sum_bias_grad(grad.flatten(0, -2), weight) if ctx.needs_input_grad[2] else None
        grad = grad.to(weight.dtype).contiguous()
        # A weight gradient that waits in a queue gathers when its turn comes: until then only our tokens are kept.
        is_later = defers_weight_grad(product, weight)
        x_full: Kept | None = None
        gathering: list[Handle | None] = []
        if ctx.needs_input_grad[1] and not is_later:
            x_full, gathering = _gather_kept(x, ctx.divides, plan.group, async_op=plan.bulk_dgrad)
        scattering: list[Handle | None] = []
        if plan.overlap_rs_dgrad and (fused := _choose_fused(plan, product)) is not None:
            grad_x = fused.multiply_and_scatter(grad, weight)
        else:
            chunks = _count_chunks(ctx.tokens, plan.most_chunks) if plan.overlap_rs_dgrad else 1
            grad_x, scattering = _multiply_and_scatter(
                grad, lambda rows: product.input_grad_parts(rows, weight), weight.shape[1], plan.group, chunks
            )
        # Switched off, the scatter ends before the weight gradient begins; else it has that product's time.
        if not (plan.bulk_wgrad or plan.overlap_rs_dgrad):
            _wait(scattering)
        _wait(gathering)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            tokens = (lambda: _gather_kept(x, ctx.divides, plan.group)[0]) if x_full is None else x_full
            grad_weight = finish_weight_grad(product, weight, grad.flatten(0, -2), tokens)
        _wait(scattering)
        return grad_x, grad_weight, grad_bias, None, None


class _MultiplyAndScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, product: Product, plan: ScatterOutput) -> Tensor:
        ctx.weight, ctx.product, ctx.plan, ctx.shape = weight, product, plan, x.shape
        if plan.overlap_rs and (fused := _choose_fused(plan, product)) is not None:
            save_kept(ctx, x)
            return fused.multiply_and_scatter(x.contiguous(), weight.t())
        chunks = _count_chunks(x.shape[0] // plan.group.size(), plan.most_chunks) if plan.overlap_rs else 1
        kept: Kept = x

        def multiply_chunk(rows: Tensor) -> Tensor:
            nonlocal kept
            # Scales of a chunk are not valid for all tokens, which the weight gradient is a sum over.
            if chunks > 1 or not product.has_smaller_form:
                return product.forward_parts(rows, weight)
            output, kept = forward_keeping(product, rows, weight)
            return output

        output, scattering = _multiply_and_scatter(x.contiguous(), multiply_chunk, weight.shape[0], plan.group, chunks)
        save_kept(ctx, x if isinstance(kept, Tensor) else kept)
        _wait(scattering)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x, _), weight, product, plan = load_kept(ctx), ctx.weight, ctx.product, ctx.plan
        chunks = _count_chunks(grad.shape[0], plan.most_chunks) if plan.overlap_ag else 1
        # dY of all tokens serves both products, so it is gathered once and needs no second collective.
        if plan.overlap_ag and (fused := _choose_fused(plan, product)) is not None:
            chunks = 1
            grad_full, grad_x = fused.gather_and_multiply_both(grad.contiguous(), weight)
        elif chunks == 1:
            grad_full, _ = _gather(grad, plan.group)
            grad_x = product.input_grad(grad_full.flatten(0, -2), weight).view(ctx.shape)
        else:
            grad_x = grad.new_empty(ctx.shape)
            full = grad.new_empty(chunks, ctx.shape[0] // chunks, *grad.shape[1:])
            for rows, gathered in _gather_chunks(grad.contiguous(), plan.group, chunks, into=full):
                product.input_grad_parts(gathered, weight, out=rows(grad_x))
        grad_weight = None
        if ctx.needs_input_grad[1]:
            if chunks > 1:
                # The weight gradient is one sum over tokens, so dY has to be in the order of X.
                by_rank = full.view(chunks, plan.group.size(), -1, *grad.shape[1:]).transpose(0, 1)
                grad_full = by_rank.reshape(ctx.shape[0], *grad.shape[1:])
            grad_weight = finish_weight_grad(product, weight, grad_full.flatten(0, -2), x)
        return grad_x, grad_weight, None, None


# ---- collectives in chunks


def _gather(own: Tensor, group: Group, async_op: bool = False) -> tuple[Tensor, Handle | None]:
    """All ranks' tokens, [s/tp, b, h] -> [s, b, h], and what to wait for."""
    full = own.new_empty(own.shape[0] * group.size(), *own.shape[1:])
    return full, all_gather_into_tensor(full, own.contiguous(), group, async_op=async_op)


def _is_divisible(tensor: Tensor, group: Group) -> bool:
    return tensor.dim() > 1 and tensor.shape[0] % group.size() == 0


def _divide_kept(kept: tuple[Tensor, ...], group: Group) -> tuple[tuple[Tensor, ...], list[bool]]:
    """Our tokens' part of what a product keeps of all of them, and of which of its tensors it is a part."""
    divides = [_is_divisible(tensor, group) for tensor in kept]
    # A copy, because a view of some rows keeps the memory of all of them.
    parts = (
        tensor.chunk(group.size())[group.rank()].clone() if divided else tensor
        for tensor, divided in zip(kept, divides, strict=True)
    )
    return tuple(parts), divides


def _gather_kept(
    kept: Kept, divides: list[bool], group: Group, async_op: bool = False
) -> tuple[Kept, list[Handle | None]]:
    """All ranks' tokens again, [s, b, h] or in the product's form, and what to wait for."""
    if isinstance(kept, Tensor):
        full, handle = _gather(kept, group, async_op)
        return full, [handle]
    gathered, handles = [], []
    for tensor, divided in zip(kept, divides, strict=True):
        if not divided:
            gathered.append(tensor)
            continue
        # As bytes, because collectives know no 8-bit floats.
        full, handle = _gather(tensor.view(torch.uint8), group, async_op)
        gathered.append(full.view(tensor.dtype))
        handles.append(handle)
    return tuple(gathered), handles


Rows = Callable[[Tensor], Tensor]
"""A contiguous tensor of all tokens [s, b, h] -> the tokens of one chunk [tp, tokens, h], a view with gaps."""


def _count_chunks(tokens: int, most: int) -> int:
    # Equal chunks: every rank must send as many, of the same size.
    return next(count for count in range(min(most, tokens), 0, -1) if tokens % count == 0)


def _select_chunk(index: int, chunks: int, group: Group) -> Rows:
    if chunks == 1:
        return lambda full: full.view(1, -1, full.shape[-1])
    return lambda full: full.view(group.size(), chunks, -1, full.shape[-1])[:, index]


def _gather_chunks(own: Tensor, group: Group, chunks: int, into: Tensor | None = None) -> Iterator[tuple[Rows, Tensor]]:
    """Chunk after chunk of all ranks' tokens [tp, tokens, h], while the next one is still on its way.

    own: [s/tp, b, h]. into: [chunks, s/chunks, b, h], where the chunks are to be kept; else each has separate memory.
    """
    parts = own.chunk(chunks)

    def begin(index: int) -> tuple[Tensor, Handle | None]:
        part = parts[index]
        gathered = own.new_empty(group.size() * part.shape[0], *part.shape[1:]) if into is None else into[index]
        return gathered, all_gather_into_tensor(gathered, part, group, async_op=True)

    # A gather is launched before the product that it overlaps: with one hardware queue it would wait for it otherwise.
    # And not more than IN_FLIGHT: the queue stops at a gather that cannot start before the one in front of it has
    # ended, and with it every product after it.
    under_way = deque(begin(index) for index in range(min(IN_FLIGHT, chunks)))
    for index in range(chunks):
        gathered, handle = under_way.popleft()
        _wait([handle])
        yield _select_chunk(index, chunks, group), gathered.view(group.size(), -1, own.shape[-1])
        if index + IN_FLIGHT < chunks:
            under_way.append(begin(index + IN_FLIGHT))


def _multiply_and_scatter(
    x: Tensor, product: Callable[[Tensor], Tensor], width: int, group: Group, chunks: int
) -> tuple[Tensor, list[Handle | None]]:
    """Our tokens of the ranks' sum of product(x), and what to wait for.

    x: [s, b, in] of all tokens, contiguous. product: [tp, tokens, in] -> [tp, tokens, width]. The result is
    [s/tp, b, width].
    """
    # Each chunk is scattered into its place of the result: nothing is copied together afterwards.
    own = x.new_empty(x.shape[0] // group.size(), x.shape[1], width)
    handles: list[Handle | None] = []
    for index, part in enumerate(own.chunk(chunks)):
        # What is sent keeps its memory until it is waited for: two chunks of it, not all.
        if len(handles) >= IN_FLIGHT:
            _wait([handles.pop(0)])
        output = product(_select_chunk(index, chunks, group)(x))
        output = output.view(group.size() * part.shape[0], *part.shape[1:])
        handles.append(reduce_scatter_tensor(part, output, group, async_op=True))
    return own, handles


def _wait(handles: list[Handle | None]) -> None:
    for handle in handles:
        if handle is not None:
            handle.wait()
    handles.clear()
