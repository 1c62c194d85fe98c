# SPDX-License-Identifier: Apache-2.0
"""Pruning of a trained transformer: what its parts add, which are kept, and the rows and columns of those.

The importance of a part is the mean length of what it adds to the residual stream, over the tokens of some texts:

    MLP channel j      |x_j| |W_2[:, j]|                  of each layer by itself
    query head j       |W_o[:, j] x_j|                    of each layer by itself; a group's is the sum of its heads'
    hidden channel j   |y_j|, y behind each norm          summed over all norms
    layer              1 - cos(its input, its output)     (Men et al., "ShortGPT", 2024)

Widths by what is active on data: Muralidharan et al., "Compact language models via pruning and knowledge distillation",
2024. The pruned model computes what the whole one does with the removed parts zero.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.errors import ConfigError

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_AXES: dict[str, tuple[str | None, ...]] = {
    "embedding.word_embeddings.weight": (None, "hidden"),
    "embedding.position_embeddings.weight": (None, "hidden"),
    "self_attention.linear_qkv.weight": ("qkv", "hidden"),
    "self_attention.linear_qkv.bias": ("qkv",),
    "self_attention.linear_proj.weight": ("hidden", "context"),
    "self_attention.linear_proj.bias": ("hidden",),
    "self_attention.q_layernorm.weight": ("head",),
    "self_attention.k_layernorm.weight": ("head",),
    "mlp.linear_fc1.weight": ("fc1", "hidden"),
    "mlp.linear_fc1.bias": ("fc1",),
    "mlp.linear_fc2.weight": ("hidden", "ffn"),
    "mlp.linear_fc2.bias": ("hidden",),
    "output_layer.weight": (None, "hidden"),
}
"""Dimensions of every parameter that is not a norm's of the hidden size, by its name in the model or in its layer."""
_NORM = re.compile(r"(?:decoder\.final_layernorm|\w+_layernorm)\.(?:weight|bias)")


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model with dense MLPs and grouped attention."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head_width: int
    is_gated: bool

    @property
    def full(self) -> dict[str, int]:
        """Length of each axis of _AXES."""
        return {
            "hidden": self.hidden, "ffn": self.ffn, "fc1": self.ffn * (2 if self.is_gated else 1),
            "head": self.head_width, "context": self.heads * self.head_width,
            "qkv": (self.heads + 2 * self.groups) * self.head_width,
        }  # fmt: skip


@dataclass(frozen=True)
class Importance:
    """Importance of the parts of a model of L layers, float64."""

    layers: Tensor
    """[L]"""
    ffn: Tensor
    """[L, f]"""
    heads: Tensor
    """[L, n]"""
    hidden: Tensor
    """[h]"""


@dataclass(frozen=True)
class KeptParts:
    """The parts that stay, each in the order that it had."""

    layers: Tensor
    """int64 [l]"""
    ffn: Tensor
    """int64 [L, f']"""
    heads: Tensor
    """int64 [L, g', n' / g']: query heads of each group that stays; all of a row are of one group."""
    hidden: Tensor
    """int64 [h']"""


def choose_kept(importance: Importance, full: ModelSizes, wanted: ModelSizes) -> KeptParts:
    """Choose the most important parts; of groups of query heads the best ones, and in each its best heads."""
    by_group = importance.heads.view(full.layers, full.groups, -1)
    groups = _choose(by_group.sum(-1), wanted.groups)
    inside = by_group.gather(1, groups.unsqueeze(-1).expand(-1, -1, by_group.shape[-1]))
    heads = _choose(inside, wanted.heads // wanted.groups) + groups.unsqueeze(-1) * by_group.shape[-1]
    return KeptParts(
        _choose(importance.layers, wanted.layers), _choose(importance.ffn, wanted.ffn), heads,
        _choose(importance.hidden, wanted.hidden),
    )  # fmt: skip


def rename(name: str, kept: KeptParts) -> str | None:
    """A parameter's name in the pruned model; None where its layer goes."""
    found = _LAYER.fullmatch(name)
    if found is None:
        return name
    places = kept.layers.tolist()
    number = int(found[1])
    return f"decoder.layers.{places.index(number)}.{found[2]}" if number in places else None


def find_axes(name: str, shape: Sequence[int], sizes: ModelSizes) -> tuple[str | None, ...]:
    """The axis of each dimension of a parameter; None for the vocabulary and positions.

    Raises ConfigError for a parameter that pruning does not know, or that has other sizes.
    """
    found = _LAYER.fullmatch(name)
    own = name if found is None else found[2]
    axes = ("hidden",) if _NORM.fullmatch(own) else _AXES.get(own)
    if axes is None:
        raise ConfigError(
            f"{name} cannot be pruned; only transformers of plain attention and dense MLPs can be, with adapters merged"
        )
    expected = [sizes.full.get(axis or "", length) for axis, length in zip(axes, shape, strict=True)]
    if list(shape) != expected:
        raise ConfigError(f"{name} is {list(shape)}, and only models where it is {expected} can be pruned")
    return axes


def find_indices(axis: str | None, layer: int, kept: KeptParts, full: ModelSizes) -> Tensor | None:
    """Indices that stay along an axis of a parameter of a layer (0 for one outside of layers); None for all."""
    if axis in (None, "head"):
        return None
    if axis == "hidden":
        return kept.hidden
    if axis in ("ffn", "fc1"):
        channels = kept.ffn[layer]
        return torch.cat([channels, channels + full.ffn]) if axis == "fc1" and full.is_gated else channels
    heads, per_group = kept.heads[layer], full.heads // full.groups
    if axis == "qkv":
        # A group's query heads, its key, its value: per_group + 2 heads.
        group = heads[:, :1] // per_group
        first = group * (per_group + 2)
        heads = torch.cat([first + heads - group * per_group, first + per_group, first + per_group + 1], 1)
    return (heads.reshape(-1, 1) * full.head_width + torch.arange(full.head_width)).flatten()


def prune(name: str, value: Tensor, kept: KeptParts, full: ModelSizes, norm_offset: float = 0.0) -> Tensor:
    """The rows and columns of a parameter that stay.

    A norm's weights grow where channels go, as its mean of squares is over those that stay: with an
    epsilon that grows as much, it gives what it gave with zeros in the others. norm_offset: what is added to its
    weights when they are used.
    """
    layer, axes = _find_layer(name), find_axes(name, value.shape, full)
    for dim, axis in enumerate(axes):
        indices = find_indices(axis, layer, kept, full)
        value = value if indices is None else value.index_select(dim, indices)
    if axes == ("hidden",) and name.endswith("layernorm.weight") and len(kept.hidden) < full.hidden:
        factor = math.sqrt(full.hidden / len(kept.hidden))
        value = ((value.float() + norm_offset) * factor - norm_offset).to(value.dtype)
    return value


@torch.no_grad()
def zero_removed(name: str, value: Tensor, kept: KeptParts, full: ModelSizes) -> None:
    """Set a parameter of the whole model to zero, in place, where it does not stay."""
    layer = _find_layer(name)
    if rename(name, kept) is None:
        value.zero_()
        return
    for dim, axis in enumerate(find_axes(name, value.shape, full)):
        indices = find_indices(axis, layer, kept, full)
        if indices is not None:
            goes = torch.ones(value.shape[dim], dtype=torch.bool)
            goes[indices] = False
            value.index_fill_(dim, goes.nonzero().flatten().to(value.device), 0)


def _find_layer(name: str) -> int:
    found = _LAYER.fullmatch(name)
    return 0 if found is None else int(found[1])


def _choose(importance: Tensor, count: int) -> Tensor:
    """Indices of the largest ones along the last dimension, in rising order."""
    return importance.topk(count, dim=-1).indices.sort(dim=-1).values
