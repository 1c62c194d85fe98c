"""The matrix products of a linear layer, with the weight gradient added straight into the gradient buffer.

    forward            Y  = X W^T + b       [tokens, in] x [in, out]
    input gradient     dX = dY W            [tokens, out] x [out, in]
    weight gradient    G += dY^T X          [out, tokens] x [tokens, in]

G is `weight.main_grad`, the view of the flat gradient buffer that data parallelism hands to every parameter. Adding
into it inside the product spares one temporary the size of the weight, and one pass over it, per microbatch.

The weight itself, with what is attached to it, stays on ctx: hooks for saved tensors, such as those of recomputation,
hand back another tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.weight_grad_queue import queue_of

LinearFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x [..., in], weight [out, in], bias [out] or None) -> [..., out]."""


class _LinearIntoMainGrad(torch.autograd.Function):
    """y = x W^T + b whose weight gradient goes into `weight.main_grad`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,), weight = ctx.saved_tensors, ctx.weight
        grad_rows = grad.reshape(-1, grad.shape[-1])  # [s, b, out] -> [tokens, out]
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad_rows @ weight).view(x.shape)  # [tokens, in] -> [s, b, in]
        if ctx.needs_input_grad[1]:
            x_rows = x.reshape(-1, x.shape[-1])  # [s, b, in] -> [tokens, in]
            grad_weight = weight_gradient(weight, grad_rows, x_rows)
        if ctx.needs_input_grad[2]:
            grad_bias = grad_rows.sum(0)
        return grad_x, grad_weight, grad_bias


def weight_gradient(weight: Tensor, grad_rows: Tensor, x_rows: Tensor | Callable[[], Tensor]) -> Tensor | None:
    """dW = dY^T X: added into weight.main_grad, returning None; or returned, where the weight has no such buffer.

    grad_rows: dY [tokens, out]. x_rows: X [tokens, in], or what makes it when its turn comes. Where a zero-bubble
    schedule defers weight gradients, the product waits in the queue and None is returned.
    """
    queue = queue_of(weight)
    if queue is not None and queue.defer(lambda: _add_weight_gradient(weight, grad_rows, x_rows)):
        return None
    x_rows = x_rows if isinstance(x_rows, Tensor) else x_rows()
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return grad_rows.t() @ x_rows
    add_product(main_grad, grad_rows, x_rows)
    return None


def add_product(main_grad: Tensor, grad_rows: Tensor, x_rows: Tensor) -> None:
    """main_grad [out, in] += dY^T X, summed in main_grad's number format; rows as in `weight_gradient`."""
    if main_grad.dtype == grad_rows.dtype:
        main_grad.addmm_(grad_rows.t(), x_rows)
    elif main_grad.is_cpu:
        main_grad.add_(grad_rows.t() @ x_rows)
    else:
        # Low-precision operands, float32 sum: one kernel on the GPU; the CPU has none.
        torch.addmm(main_grad, grad_rows.t(), x_rows, out_dtype=main_grad.dtype, out=main_grad)


def _add_weight_gradient(weight: Tensor, grad_rows: Tensor, x_rows: Tensor | Callable[[], Tensor]) -> None:
    """The deferred half of a backward pass: what autograd would have done with the result is done here."""
    with torch.no_grad():
        grad = weight_gradient(weight, grad_rows, x_rows)
        if grad is not None:
            weight.grad = grad if weight.grad is None else weight.grad.add_(grad)


def linear_into_main_grad(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, with the weight gradient added into `weight.main_grad` where there is one."""
    result: Tensor = _LinearIntoMainGrad.apply(x, weight, bias)
    return result


def multiply_to_float32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b of 16-bit operands, in float32. It has no gradient of its own."""
    rows = x.reshape(-1, x.shape[-1])  # [s, b, in] -> [tokens, in]
    if x.is_cpu:
        y = rows.float() @ weight.float().t()
    else:
        y = torch.mm(rows, weight.t(), out_dtype=torch.float32)  # the CPU has no such product
    y = y if bias is None else y.add_(bias)
    return y.view(*x.shape[:-1], -1)


class _LinearToFloat32(torch.autograd.Function):
    """y = x W^T + b of 16-bit operands whose float32 sums are not rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, into_main_grad: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.into_main_grad = weight, into_main_grad
        return multiply_to_float32(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,), weight = ctx.saved_tensors, ctx.weight
        grad_rows = grad.reshape(-1, grad.shape[-1])  # [s, b, out] -> [tokens, out]
        short = grad_rows.to(x.dtype)
        x_rows = x.reshape(-1, x.shape[-1])
        grad_x = (short @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = weight_gradient(weight, short, x_rows) if ctx.into_main_grad else short.t() @ x_rows
        grad_bias = grad_rows.sum(0).to(x.dtype) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None


def to_float32(linear: LinearFunction) -> LinearFunction:
    """The same product with a float32 result and 16-bit gradients; its weight gradient goes where `linear` has it."""
    into_main_grad = linear is linear_into_main_grad

    def linear_to_float32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        result: Tensor = _LinearToFloat32.apply(x, weight, bias, into_main_grad)
        return result

    return linear_to_float32


def choose_linear(config: ModelParallelConfig) -> LinearFunction:
    """The function that the parallel layers call, and the name under which the log shows it: its __name__.

    Inside a compiled layer torch's own operator is the faster one: the compiler schedules its three products.
    """
    if config.gradient_accumulation_fusion and not getattr(config, "compile", False):
        return linear_into_main_grad
    return F.linear
