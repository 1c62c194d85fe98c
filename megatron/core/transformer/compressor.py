# SPDX-License-Identifier: Apache-2.0
"""Compression of windows of tokens to one entry each (DeepSeek-V4, 2026, section 2.3).

    content, gate of each token       C = Wc x,  Z = Wz x                          [s, b, d]
    entry of a window of m tokens     norm(sum over its tokens of softmax(Z + P) C)    softmax by channel, P [m, d]

An overlapping compressor has two of C and Z for each token, [s, b, 2 d]: the first serves in the entry of the next
window, the second in the token's window, so that an entry is made of 2 m tokens. An entry is rotated to the position of
its window's first token. Windows start again in each document; the last tokens of one, too few for a window, have none.

s: sequence, b: batch, w: windows, m: tokens of a window, d: channels.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.sequences.token_layout import TokenLayout
from megatron.core.tensor_parallel.layers import ReplicatedLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.parameters import declare_parameter
from megatron.core.tensor_parallel.products import at_least_float32
from megatron.core.transformer.attention import mark_as_query_key_norm
from megatron.core.transformer.initialisers import input_initialiser
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.norms import RMSNorm
from megatron.core.transformer.rotary import Rotation, apply_rotary
from megatron.core.transformer.transformer_config import TransformerConfig


class Windows(NamedTuple):
    """The whole windows of a row of tokens, in its order."""

    starts: np.ndarray
    """The first token of each, int64 [w] on the host."""
    follows: np.ndarray
    """bool [w], True where the window before is of the same document."""
    is_even: bool
    """True where they lie side by side from the first token on."""

    @classmethod
    def build(cls, tokens: int, size: int, documents: TokenLayout | None = None) -> Windows:
        """Windows of `size` tokens in a row of `tokens`, starting again with each document."""
        bounds = (0, tokens) if documents is None else documents.bounds
        pairs = list(zip(bounds, bounds[1:], strict=False))
        starts = np.concatenate([begin + size * np.arange((end - begin) // size) for begin, end in pairs])
        return cls(starts, ~np.isin(starts, [begin for begin, _ in pairs]), len(pairs) == 1)

    def cut(self, x: Tensor, size: int) -> Tensor:
        """[s, ...] -> [w, m, ...]."""
        if self.is_even:
            return x[: len(self.starts) * size].unflatten(0, (len(self.starts), size))
        return x[move_to(x, self.starts)[:, None] + torch.arange(size, device=x.device)]


class Compressor(MegatronModule):
    """Makes entries of hidden states; whole on every tensor-parallel rank, with the same results."""

    def __init__(
        self, config: TransformerConfig, groups: ProcessGroupCollection, width: int, ratio: int, *, overlaps: bool
    ) -> None:
        """width: of an entry. ratio: tokens of a window."""
        super().__init__(config)
        assert config.hidden_size is not None
        self.tp_group, self.ratio, self.overlaps = groups.tp, ratio, overlaps
        channels = width * (2 if overlaps else 1)
        self.linear_wkv, self.linear_wgate = (
            ReplicatedLinear(
                config.hidden_size, channels, config=config, init_method=input_initialiser(config), tp_group=groups.tp
            )
            for _ in range(2)
        )
        self.ape = declare_parameter((ratio, channels), kind="vector")
        self.norm = RMSNorm(config, width, partial_grad_axes=())  # of entries that all ranks have
        mark_as_query_key_norm(self.norm)

    def project(self, hidden_states: Tensor) -> Tensor:
        """[s, b, h], with sequence parallelism of this rank's tokens -> contents and gates of all tokens, side by side,
        [s, b, 2 d] or, overlapping, [s, b, 4 d]."""
        products = torch.cat((self.linear_wkv(hidden_states)[0], self.linear_wgate(hidden_states)[0]), dim=-1)
        if not self.config.sequence_parallel:
            return products
        # Every rank does the same with the result.
        return gather_from_sequence_parallel_region(products, tensor_parallel_output_grad=False, group=self.tp_group)

    def forward(self, products: Tensor, windows: Windows, rotation: Rotation) -> Tensor:
        """Contents and gates of a row of tokens -> entries [w, b, d]. rotation: of these tokens."""
        content, gate = windows.cut(products, self.ratio).chunk(2, dim=-1)  # [w, m, b, d]
        gate = at_least_float32(gate) + self.ape.unsqueeze(1)
        if self.overlaps:
            content, gate = (_put_before(x, windows.follows, fill) for x, fill in ((content, 0.0), (gate, -torch.inf)))
        entries = self.norm((content * gate.softmax(1).to(content.dtype)).sum(1))
        first = move_to(products, windows.starts)
        return rotate_last(entries, rotation._replace(cos=rotation.cos[first], sin=rotation.sin[first]))


def move_to(like: Tensor, numbers: np.ndarray) -> Tensor:
    """Numbers of the host, int64 or bool, as a tensor on the device of another one."""
    return torch.tensor(numbers.tolist(), dtype=torch.from_numpy(numbers[:0]).dtype).to(like.device, non_blocking=True)


def _put_before(x: Tensor, follows: np.ndarray, fill: float) -> Tensor:
    """[w, m, b, 2 d] -> [w, 2 m, b, d]: the first half of the window before, or `fill`, and the second of this one."""
    before, own = x.chunk(2, dim=-1)
    shifted = torch.cat((torch.full_like(before[:1], fill), before[:-1]))
    missing = ~move_to(x, follows).view(-1, 1, 1, 1)
    return torch.cat((shifted.masked_fill(missing, fill), own), dim=1)


def rotate_last(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the last channels of x [s, ..., d]."""
    plain, turned = x.split([x.shape[-1] - rotation.channels, rotation.channels], dim=-1)
    return torch.cat((plain, apply_rotary(turned, rotation)), dim=-1)
