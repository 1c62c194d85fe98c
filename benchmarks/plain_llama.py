# SPDX-License-Identifier: Apache-2.0
"""A Llama as one writes it in plain torch: nn.Linear, scaled_dot_product_attention, F.cross_entropy: a baseline."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelSizes:
    """The shape of a Llama, or of a Mixtral where it has experts."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    vocab: int
    tied: bool = False
    experts: int = 0
    topk: int = 2

    @property
    def head_width(self) -> int:
        """Channels of a head."""
        return self.hidden // self.heads


class PlainLlama(nn.Module):
    """Token numbers [b, s] and labels [b, s] -> mean loss."""

    def __init__(self, sizes: ModelSizes, sequence: int, device: torch.device) -> None:
        super().__init__()
        with device:
            self.embedding = nn.Embedding(sizes.vocab, sizes.hidden)
            self.layers = nn.ModuleList(PlainLayer(sizes) for _ in range(sizes.layers))
            self.norm = nn.RMSNorm(sizes.hidden, eps=1e-5)
            self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
            # As deep as such models are initialised; torch's own numbers for embeddings are fifty times larger.
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=0.02)
            if sizes.tied:
                self.head.weight = self.embedding.weight
            frequencies = 10000.0 ** (-torch.arange(0, sizes.head_width, 2).float() / sizes.head_width)
            angles = torch.outer(torch.arange(sequence).float(), frequencies)
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class PlainLayer(nn.Module):
    """[b, s, h] -> [b, s, h]."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.sizes = sizes
        width = sizes.head_width
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(sizes.hidden, eps=1e-5) for _ in range(2))
        self.qkv = nn.Linear(sizes.hidden, (sizes.heads + 2 * sizes.groups) * width, bias=False)
        self.out = nn.Linear(sizes.heads * width, sizes.hidden, bias=False)
        self.gate_up = nn.Linear(sizes.hidden, 2 * sizes.ffn, bias=False)
        self.down = nn.Linear(sizes.ffn, sizes.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        sizes = self.sizes
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, sizes.head_width)).transpose(1, 2)
        query, key, value = heads.split((sizes.heads, sizes.groups, sizes.groups), dim=1)  # [b, heads, s, d]
        context = F.scaled_dot_product_attention(
            _rotate(query, cos, sin), _rotate(key, cos, sin), value, is_causal=True,
            enable_gqa=sizes.heads != sizes.groups,
        )  # fmt: skip
        x = x + self.out(context.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head's channels; x [b, heads, s, d]."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
