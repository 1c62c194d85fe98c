# SPDX-License-Identifier: Apache-2.0
"""One description of every layer of a model, for all that build, count, divide, convert or log layers.

layer of a GPT                  two branches: x = x + attention(norm(x)); x = x + mlp(norm(x))
letter of a hybrid pattern      one branch
multi-token prediction          a layer, in letters one or several, for each depth that has weights, numbered on from
                                the decoder's last one
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Literal, NamedTuple

RotaryKind = Literal["global", "local", "none"]


class BranchOptions(NamedTuple):
    """Settings of a branch that may differ from layer to layer."""

    window: int | None = None
    """Tokens before itself that a token sees; None for all."""
    chunk: int | None = None
    """Tokens of a chunk; a token sees only tokens of its chunk. None for no chunks."""
    rotary: RotaryKind = "global"
    """Rotary angles: the model's, the ones of layers with a window, or none."""
    norm: str = "input"
    """Place of the norm: on the branch's input, its output, or both, as --norm-placement has it; "shared" where the
    branch reads the norm of the one beside it."""
    query_groups: int | None = None
    """Key-value heads of attention; the model's when None."""
    ffn_hidden_size: int | None = None
    """Inner width of an MLP; the model's when None."""
    multiplier: float = 1.0
    """Factor on the branch's output, beside the model's."""
    chooser: int | None = None
    """Of sparse attention the layer whose choice of keys it takes; None where it chooses."""
    compress_ratio: int = 0
    """Of compressed attention the tokens of a window that becomes one entry; 0 for no entries."""
    chooses: bool = False
    """True where compressed attention chooses among entries, which overlap then."""
    context_exchange: str = "p2p"
    """Exchange of keys and values among context-parallel ranks, as in --cp-comm-type."""


class Branch(NamedTuple):
    """One residual branch: x + f(norm(x))."""

    kind: str
    """The name of a row in kinds.py."""
    options: BranchOptions = BranchOptions()
    low_precision: bool = False
    """True where its linear layers multiply in FP8 or FP4."""


class LayerPlan(NamedTuple):
    """One layer."""

    number: int
    """From 1 in the whole model."""
    name: str
    """Of its module in the whole model: decoder.layers.6, mtp.layers.0.mtp_model_layer."""
    branches: tuple[Branch, ...]
    parallel: bool = False
    """True where all branches read the same x."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its branches."""
        return tuple(branch.kind for branch in self.branches)

    def has(self, kind: str) -> bool:
        """Return True if one of the branches is of this kind."""
        return kind in self.kinds

    @property
    def options(self) -> BranchOptions:
        """The options of the first branch, which in a GPT is attention."""
        return self.branches[0].options if self.branches else BranchOptions()

    @property
    def low_precision(self) -> bool:
        """True where linear layers of any branch multiply in FP8 or FP4."""
        return any(branch.low_precision for branch in self.branches)


class ModelPlan(NamedTuple):
    """All layers of a model."""

    decoder: tuple[LayerPlan, ...]
    prediction: tuple[LayerPlan, ...]
    """Layers of multi-token prediction that have weights."""

    @property
    def layers(self) -> tuple[LayerPlan, ...]:
        """The decoder's layers, then the layers of multi-token prediction."""
        return self.decoder + self.prediction

    def layer(self, number: int) -> LayerPlan:
        """Return the layer with this number, from 1. A number behind the last layer, of a layer that a program builds
        by itself, gets a copy of the last one."""
        layers = self.layers
        return layers[number - 1] if number <= len(layers) else layers[-1]._replace(number=number)

    def depth(self, number: int) -> tuple[LayerPlan, ...]:
        """Return the layers of a depth of multi-token prediction that has weights, counted from 1. A number behind the
        last one gets a copy of the last layer, as above."""
        depths = self.list_depths()
        return depths[number - 1] if number <= len(depths) else (self.layer(len(self.decoder) + number),)

    def list_depths(self) -> list[tuple[LayerPlan, ...]]:
        """List the layers of each depth of multi-token prediction that has weights."""
        return [tuple(layers) for _, layers in groupby(self.prediction, lambda layer: layer.name.split(".")[2])]

    def find(self, parameter: str) -> LayerPlan | None:
        """Return the layer of a parameter, by its name in the whole model; None where it is in no layer."""
        return next((layer for layer in self.layers if parameter.startswith(f"{layer.name}.")), None)

    def branches(self, kind: str | None = None) -> Iterator[Branch]:
        """Yield the branches of all layers, or only of one kind."""
        for layer in self.layers:
            yield from (branch for branch in layer.branches if kind in (None, branch.kind))
