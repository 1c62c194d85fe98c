# SPDX-License-Identifier: Apache-2.0
"""A short causal convolution along the tokens, with a filter for each channel, and usually SiLU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.device import current_device, is_cpu
from megatron.core.placement import Part
from megatron.core.process_groups_config import Group
from megatron.core.ssm.chunks import list_slabs
from megatron.core.ssm.libraries import choose_convolution
from megatron.core.ssm.pieces import Pieces
from megatron.core.tensor_parallel.layers import tensor_parallel_split
from megatron.core.tensor_parallel.parameters import Initialiser, declare_parameter, parameter_dtype
from megatron.core.tensor_parallel.products import at_least_float32
from megatron.core.transformer.transformer_config import TransformerConfig

_ELEMENTS = 2**17
"""At a time on a CPU, of everything that is as large as the input."""


class CausalConvolution(nn.Module):
    """y_t = silu(bias + sum over j of w_j x_{t - W + 1 + j}), channel by channel; zeros before a document.

    channels: of the whole model. parts: sections of the channels that are split one by one over the TP group.
    has_activation: False leaves silu out.
    """

    def __init__(
        self,
        channels: int,
        width: int,
        *,
        config: TransformerConfig,
        parts: Sequence[Part],
        bias: bool,
        tp_group: Group,
        has_activation: bool = True,
    ) -> None:
        super().__init__()
        self.has_activation = has_activation
        dtype, splits = parameter_dtype(config), tensor_parallel_split(0, tp_group, parts)
        # PyTorch's default initialisation of a convolution with one input channel for each output: uniform in
        # +-1/sqrt(width).
        self.weight = declare_parameter(
            (channels, 1, width), kind="filter", init=_uniform(width**-0.5), dtype=dtype, splits=splits
        )
        self.bias = (
            declare_parameter((channels,), init=_uniform(width**-0.5), dtype=dtype, splits=splits) if bias else None
        )
        self._library, self.backend_name = choose_convolution(config, len(self.weight), width, current_device())
        if not has_activation:
            self._library, self.backend_name = None, "torch"
        """The package that computes it, if one does; what computes it, for the log."""

    @property
    def width(self) -> int:
        """Tokens that a filter reads."""
        return self.weight.shape[-1]

    def forward(self, x: Tensor, pieces: Pieces) -> Tensor:
        """[s, b, c] -> [s, b, c]; b counts pieces as sequences."""
        before = pieces.fetch_before(x, self.width - 1)
        return self.convolve(x, before, pieces.list_documents(self.width - 1))

    def convolve(self, x: Tensor, before: Tensor | None, documents: Tensor | None = None) -> Tensor:
        """[s, b, c] -> [s, b, c]. before: the width - 1 tokens before them, [width - 1, b, c]; zeros when None.
        documents: the number of each token's document, int [b, width - 1 + s]."""
        if before is None and self._library is not None and self._library.takes(x):
            own = None if documents is None else documents[:, self.width - 1 :]
            return self._library(x, self.weight[:, 0], self.bias, own)
        before = x.new_zeros(self.width - 1, *x.shape[1:]) if before is None else before
        return _Convolution.apply(x, before, self.weight, self.bias, documents, self.has_activation)  # type: ignore[no-any-return]


class _Convolution(torch.autograd.Function):
    """Keeps nothing but its arguments for backward, and goes over some tokens at a time; in float32 or wider."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None,
        has_activation: bool,
    ) -> Tensor:  # fmt: skip
        ctx.has_activation = has_activation
        ctx.save_for_backward(x, before, weight, bias, documents)
        output = x.new_empty(x.shape)
        for start, stop in _list_stretches(x):
            reads = _list_reads(x, before, documents, start, stop, weight.shape[-1])
            total = _sum_up(reads, weight, bias)
            output[start:stop] = F.silu(total) if has_activation else total
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, before, weight, bias, documents = ctx.saved_tensors
        width = weight.shape[-1]
        taps = at_least_float32(weight[:, 0])
        of_weight, of_bias = torch.zeros_like(taps), torch.zeros_like(taps[:, 0])
        of_padded = taps.new_zeros(len(before) + len(x), *x.shape[1:])
        for start, stop in _list_stretches(x):
            reads = _list_reads(x, before, documents, start, stop, width)
            of_sum = at_least_float32(grad[start:stop])
            if ctx.has_activation:
                summed = _sum_up(reads, weight, bias)
                gate = torch.sigmoid(summed)
                # silu'(y) = g (1 + y (1 - g)) with g = sigmoid(y).
                of_sum = gate * (1 + summed * (1 - gate)) * of_sum
            of_bias += of_sum.sum((0, 1))
            for tap, read in enumerate(reads):
                of_weight[:, tap] += (of_sum * read).sum((0, 1))
                part = of_sum * taps[:, tap]
                if documents is not None and tap < width - 1:
                    part = part * _find_same(documents, start, stop, tap, width)
                of_padded[start + tap : stop + tap] += part
        return (
            of_padded[len(before) :].to(x.dtype), of_padded[: len(before)].to(before.dtype),
            of_weight[:, None].to(weight.dtype), None if bias is None else of_bias.to(bias.dtype), None,
            None,
        )  # fmt: skip


def _list_stretches(x: Tensor) -> Sequence[tuple[int, int]]:
    """Tokens at a time: on a CPU as many as its caches hold."""
    return list_slabs(len(x), max(1, _ELEMENTS // x[0].numel()) if is_cpu(x) else max(len(x), 1))


def _list_reads(x: Tensor, before: Tensor, documents: Tensor | None, start: int, stop: int, width: int) -> list[Tensor]:
    """Return what each weight of the filters is multiplied by, [stop - start, b, c], for tokens start..stop."""
    first = start - (width - 1)
    window = x[first:stop] if first >= 0 else torch.cat([before[start:], x[:stop]])
    window, tokens = at_least_float32(window), stop - start
    reads = [window[tap : tap + tokens] for tap in range(width)]
    if documents is not None:
        for tap in range(width - 1):
            # Not a product: beyond a document's beginning may be anything, NaN too.
            reads[tap] = reads[tap].masked_fill(~_find_same(documents, start, stop, tap, width), 0.0)
    return reads


def _find_same(documents: Tensor, start: int, stop: int, tap: int, width: int) -> Tensor:
    """Return whether the token that a weight reads is of the reader's document, [stop - start, b, 1]."""
    own = documents[:, start + width - 1 : stop + width - 1]
    return (documents[:, start + tap : stop + tap] == own).t()[..., None]


def _sum_up(reads: Sequence[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    taps = at_least_float32(weight[:, 0])
    total = reads[0] * taps[:, 0]
    for tap in range(1, len(reads)):
        total.addcmul_(reads[tap], taps[:, tap])
    return total if bias is None else total.add_(bias)


def _uniform(bound: float) -> Initialiser:
    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        tensor.uniform_(-bound, bound, generator=generator)

    return fill
