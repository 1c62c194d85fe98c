# SPDX-License-Identifier: Apache-2.0
"""A product with operands on the grid of 8-bit floats and with a state: what a layer must be able to own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.core.tensor_parallel.products import Product

OPERANDS = ("x", "weight", "grad")


class RoundedProduct(Product, nn.Module):
    """Another product's arithmetic on operands that are rounded to float8_e4m3fn; it remembers how large they were."""

    largest: Tensor
    """[3], largest absolute value of each of OPERANDS so far: a buffer, so that a checkpoint has it."""

    def __init__(self, inner: Product) -> None:
        nn.Module.__init__(self)
        self.inner, self.accumulates, self.is_deferrable = inner, inner.accumulates, inner.is_deferrable
        self.name, self.out_dtype = f"8 bits, {inner.name}", inner.out_dtype
        self.register_buffer("largest", torch.zeros(len(OPERANDS)))
        self.calls = {"forward": 0, "input_grad": 0, "weight_grad": 0}

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, ends: Tensor | None = None) -> Tensor:
        self.calls["forward"] += 1
        return self.inner.forward(self._rounded("x", x), self._rounded("weight", weight), bias, ends)

    def input_grad(self, grad: Tensor, weight: Tensor, ends: Tensor | None = None) -> Tensor:
        self.calls["input_grad"] += 1
        return self.inner.input_grad(self._rounded("grad", grad), self._rounded("weight", weight), ends)

    def weight_grad(
        self, grad: Tensor, x: Tensor, weight: Tensor, main_grad: Tensor | None, ends: Tensor | None = None
    ) -> Tensor | None:
        self.calls["weight_grad"] += 1
        grad, x = self._rounded("grad", grad), self._rounded("x", x)
        return self.inner.weight_grad(grad, x, weight, main_grad, ends)

    def _rounded(self, operand: str, value: Tensor) -> Tensor:
        if not value.is_floating_point() or not value.numel():  # token numbers, experts without rows
            return value
        seen = self.largest[OPERANDS.index(operand)]
        seen.copy_(torch.maximum(seen, value.detach().abs().max()))
        return on_grid(value)


def on_grid(value: Tensor) -> Tensor:
    """The nearest 8-bit floats, in value's own format."""
    return value.detach().to(torch.float8_e4m3fn).to(value.dtype)


def round_products(model: nn.Module) -> list[RoundedProduct]:
    """Exchange the product of every layer of the model; the layers stay as they are."""
    rounded = []
    for module in list(model.modules()):
        if isinstance(getattr(module, "product", None), Product):
            module.product = RoundedProduct(module.product)  # type: ignore[arg-type]
            rounded.append(module.product)
    return rounded
