"""One linear layer for each expert, on rows sorted by expert: the products of all experts.

    forward            Y_e = X_e W_e^T        [rows of e, in] x [in, out]
    input gradient     dX_e = dY_e W_e        [rows of e, out] x [out, in]
    weight gradient    G_e += dY_e^T X_e      [out, rows of e] x [rows of e, in]

Either one product after the other, or all in one call of torch's grouped_mm, which also spares the host the wait for
the numbers of rows. As in tensor_parallel/linear_ops.py the weight gradient goes straight into `weight.main_grad`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from megatron.core.tensor_parallel.linear_ops import add_product
from megatron.core.weight_grad_queue import queue_of

_grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


class Products:
    """One product for each expert. ends: [experts] int32 on the device, where each expert's rows end."""

    name = "one product for each expert"

    def rows(self, x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        """[n, in] x [experts, in, out] -> [n, out]."""
        out = x.new_empty(x.shape[0], matrices.shape[2])
        counts = _counts(ends)
        for part, into, matrix in zip(x.split(counts), out.split(counts), matrices, strict=True):
            torch.mm(part, matrix, out=into)
        return out

    def weight_gradient(self, grad: Tensor, x: Tensor, ends: Tensor, main_grad: Tensor | None) -> Tensor | None:
        """dY^T X of each expert, [experts, out, in]: added to main_grad, or returned where that is None."""
        counts = _counts(ends)
        parts = zip(grad.split(counts), x.split(counts), strict=True)
        if main_grad is None:
            return torch.stack([grad_rows.t() @ x_rows for grad_rows, x_rows in parts])
        for into, (grad_rows, x_rows) in zip(main_grad, parts, strict=True):
            if len(x_rows):
                add_product(into, grad_rows, x_rows)
        return None


class GroupedProducts(Products):
    """All experts in one call."""

    name = "grouped_mm"

    def rows(self, x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        """[n, in] x [experts, in, out] -> [n, out]."""
        assert _grouped_mm is not None
        if not x.shape[0]:
            return x.new_empty(0, matrices.shape[2])
        result: Tensor = _grouped_mm(x, matrices, offs=ends)
        return result

    def weight_gradient(self, grad: Tensor, x: Tensor, ends: Tensor, main_grad: Tensor | None) -> Tensor | None:
        """dY^T X of each expert, [experts, out, in]: added to main_grad, or returned where that is None."""
        if not x.shape[0]:
            return super().weight_gradient(grad, x, ends, main_grad)
        assert _grouped_mm is not None
        result: Tensor = _grouped_mm(grad.t(), x, offs=ends)
        if main_grad is None:
            return result
        main_grad.add_(result)
        return None


def _counts(ends: Tensor) -> list[int]:
    """Rows of each expert, on the host."""
    stops = [0, *ends.tolist()]
    return [stop - start for start, stop in zip(stops, stops[1:], strict=False)]


def choose_products(grouped: bool, widths: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Products:
    """grouped: use grouped_mm where it takes weights of these widths in this number format on this device."""
    return GroupedProducts() if grouped and grouped_mm_works(widths, dtype, device) else Products()


@functools.cache
def grouped_mm_works(widths: tuple[int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's grouped_mm computes what it should: tried on a few rows."""
    if _grouped_mm is None or device.type == "meta":
        return False
    inputs, outputs = widths
    x, matrices = (torch.ones(shape, dtype=dtype, device=device) for shape in ((16, inputs), (2, outputs, inputs)))
    ends = torch.tensor([16, 16], dtype=torch.int32, device=device)
    try:
        y = _grouped_mm(x, matrices.transpose(1, 2), offs=ends)
        back = _grouped_mm(y, matrices, offs=ends)
        gradient = _grouped_mm(y.t(), x, offs=ends)
    except RuntimeError:  # not for this device, these widths or this number format; NotImplementedError is one
        return False
    return back.shape == x.shape and gradient.shape == matrices.shape and bool((y == inputs).all())


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, products: Products, into_main_grad: bool) -> Tensor:
        ctx.save_for_backward(x, ends)
        ctx.weight = weight  # itself, with its main_grad: hooks for saved tensors would hand back another tensor
        ctx.products, ctx.into_main_grad = products, into_main_grad
        return products.rows(x, weight.transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x, ends), weight = ctx.saved_tensors, ctx.weight
        grad = grad.contiguous()
        grad_x = ctx.products.rows(grad, weight, ends) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            main_grad = getattr(weight, "main_grad", None) if ctx.into_main_grad else None
            queue = queue_of(weight)

            @torch.no_grad()
            def compute() -> Tensor | None:
                found: Tensor | None = ctx.products.weight_gradient(grad, x, ends, main_grad)
                return found

            def compute_later() -> None:
                found = compute()
                if found is not None:
                    weight.grad = found if weight.grad is None else weight.grad.add_(found)

            if queue is None or not queue.defer(compute_later):
                grad_weight = compute()
        return grad_x, grad_weight, None, None, None


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, products: Products, into_main_grad: bool) -> Tensor:
    """Rows of each expert times its matrix.

    x: [n, in], sorted by expert. weight: [experts, out, in]. into_main_grad: add the weight gradient to
    `weight.main_grad` where there is one.
    """
    result: Tensor = _GroupedLinear.apply(x, weight, ends, products, into_main_grad)
    return result
