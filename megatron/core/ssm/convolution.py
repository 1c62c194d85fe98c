# SPDX-License-Identifier: Apache-2.0
"""A short causal convolution along the tokens, with a filter for each channel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.placement import Part
from megatron.core.process_groups_config import Group
from megatron.core.ssm.pieces import Pieces
from megatron.core.tensor_parallel.layers import tensor_parallel_split
from megatron.core.tensor_parallel.parameters import Initialiser, declare_parameter, parameter_dtype


class CausalConvolution(nn.Module):
    """y_t = bias + sum over j of w_j x_{t - W + 1 + j}, channel by channel; zeros before a document.

    channels: of the whole model. parts: sections of the channels that are split one by one over the TP group.
    """

    def __init__(
        self,
        channels: int,
        width: int,
        *,
        config: ModelParallelConfig,
        parts: Sequence[Part],
        bias: bool,
        tp_group: Group,
    ) -> None:
        super().__init__()
        dtype, splits = parameter_dtype(config), tensor_parallel_split(0, tp_group, parts)
        # PyTorch's own start of a convolution with one input channel for each output: uniform in +-1/sqrt(width).
        self.weight = declare_parameter(
            (channels, 1, width), kind="filter", init=_uniform(width**-0.5), dtype=dtype, splits=splits
        )
        self.bias = (
            declare_parameter((channels,), init=_uniform(width**-0.5), dtype=dtype, splits=splits) if bias else None
        )

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
        tokens, width = x.shape[0], self.width
        before = x.new_zeros(width - 1, *x.shape[1:]) if before is None else before
        padded = torch.cat([before, x])
        taps = self.weight[:, 0].unbind(1)
        output = torch.zeros_like(x) if self.bias is None else self.bias.expand_as(x)
        for tap, weight in enumerate(taps):
            read = padded[tap : tap + tokens]
            if documents is not None and tap < width - 1:
                is_same = documents[:, tap : tap + tokens] == documents[:, width - 1 :]
                read = read * is_same.t()[..., None]
            output = torch.addcmul(output, read, weight)
        return output


def _uniform(bound: float) -> Initialiser:
    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        tensor.uniform_(-bound, bound, generator=generator)

    return fill
