# SPDX-License-Identifier: Apache-2.0
"""Products of a model that is only used: float32 weights in the order in which the CPU's kernel reads them.

A matrix product puts the weight in order first. Of a thousand tokens that is little, of the few that texts are
continued with a half of the work: eight rows times 1024 x 512 take 0.20 instead of 0.35 milliseconds with a weight that
is in order already (one core of an AMD EPYC). For a single row torch's product with a transposed weight is faster
still: it reads 14.5 GB/s, oneDNN in its order 12.3, both 9.6 of the weight as it is. The ordered weights are copies.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.host_memory import read_host_memory
from megatron.core.tensor_parallel.products import Matmul, onednn_is_faster, takes_float32

_LEAST_WEIGHT = 1 << 16
"""Elements; a call of oneDNN takes 10 microseconds more than one of torch's matmul."""
_ROWS = 8
"""Tokens that the order is made for; for 1 and for 256 it is as good."""


class OrderedCopies:
    """Copies of a weight [out, in], or of each matrix of a stack of them, for several rows and for a single one; made
    when first needed, and again where the weight has been written to."""

    def __init__(self, *, turns: bool) -> None:
        """turns: True if a single row has a separate copy, the transposed weight."""
        self.turns = turns
        self.held: dict[tuple[int, bool], Tensor] = {}
        self._of: tuple[int, int] | None = None

    def suit(self, x: Tensor, weight: Tensor) -> bool:
        """Return whether `multiply` is the faster way to multiply x [..., in] by the weight."""
        is_large = weight.shape[-1] * weight.shape[-2] >= _LEAST_WEIGHT
        return torch.is_inference_mode_enabled() and is_large and takes_float32(x, weight)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, index: int = 0) -> Tensor:
        """x [..., in] by the weight, or by the matrix of a stack with this index, and the bias: -> [..., out]."""
        if self._of != (which := (weight.data_ptr(), weight._version)):
            self._of, self.held = which, {}
        is_single = self.turns and x.numel() == x.shape[-1]
        ordered = self.held.get((index, is_single))
        if ordered is None:
            matrix = weight.detach() if weight.dim() == 2 else weight.detach()[index]
            ordered = self.held[index, is_single] = (_turn if is_single else _pack)(matrix)
        if is_single:
            return F.linear(x, ordered, bias)
        rows = x.reshape(-1, x.shape[-1])
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, ordered, bias, "none", [], "")
        return product.view(*x.shape[:-1], -1)


class PackedMatmul(Matmul):
    """A Matmul that in inference mode multiplies by ordered copies of its weight."""

    def __init__(self, plain: Matmul, copies: OrderedCopies) -> None:
        super().__init__(accumulates=plain.accumulates, by_autograd=plain.by_autograd)
        self.name = f"{self.name}; in generation by ordered copies of the weight"
        self.copies = copies

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, ends: Tensor | None = None) -> Tensor:
        """See Matmul."""
        if self.copies.suit(x, weight):
            return self.copies.multiply(x, weight, bias)
        return super().forward(x, weight, bias, ends)


def _turn(weight: Tensor) -> Tensor:
    """The same numbers, column after column in memory."""
    return weight.t().contiguous().t()


def _pack(weight: Tensor) -> Tensor:
    """In oneDNN's order."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    return packed


def pack_weights(model: nn.Module) -> None:
    """Let plain linear layers and experts of a model multiply by ordered copies of their weights, where that is faster.

    For a model that is not trained: an optimizer may write to weights in a way that does not show. In generation it
    then takes its float32 weights up to three times, so they have to be at most an eighth of the host's memory, or
    where single rows have no separate copy a quarter; otherwise nothing is ordered.
    """
    share = sum(parameter.nbytes for parameter in model.parameters()) / read_host_memory().total_bytes
    if not onednn_is_faster() or share > 1 / 4:
        return
    layer: Any
    for layer in model.modules():
        # Embeddings, and low-precision layers, have other kinds of products.
        product, copies = layer.__dict__.get("product"), OrderedCopies(turns=share <= 1 / 8)
        if type(product) is Matmul and product.out_dtype is None:
            layer.product = PackedMatmul(product, copies)
        elif hasattr(product, "copies"):
            product.copies = copies
