# SPDX-License-Identifier: Apache-2.0
"""Runners, which compute the residual branches of a layer, each around what is named below it.

    RecordedLayer, Within                one CUDA graph of all branches; a context around them (Transformer Engine's)
    Parallel, OneNorm                    all branches read the same x, or one norm of it
    RecordedBranch, RecordedRouter       one CUDA graph of a branch, or of what it does before its experts
    JoinedBranches                       one kernel adds a branch's output and normalises the sum for the next branch
    ResidualBranch.add                   the branch itself, the only runner where nothing is asked for
      around its norm                    what the norm keeps is offloaded
      NormalisedAgain                    backward computes the norm's output again
      InChunks                           the body computes some tokens after the others
      ComputedAgain                      backward computes the body again
      the module                         or another one in its place (Transformer Engine's MLP)

A runner is called with x [s, b, h] and the layer's inputs, and returns x after its branches; in a parallel layer also
with the stream that the output is added to. The last four are bodies (ResidualBranch.body). Execution chooses and nests
them when a layer is built; none refers to the layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from megatron.core.tensor_parallel.kept_activations import Recomputed, keep_as
from megatron.core.tensor_parallel.layers import LayerOutput
from megatron.core.tensor_parallel.offloaded_activations import hold, offload
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.execution.cuda_graphs import Region
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.residual_branch import Body, ResidualBranch

Runner = Callable[..., Tensor]


# ---- bodies


class ComputedAgain:
    """A body of which only the input is kept, the input of the first product."""

    def __init__(self, body: Body) -> None:
        self.body = body

    def __call__(self, normed: Tensor, inputs: LayerInputs, norm_input: Tensor) -> LayerOutput:
        with offload("mlp_fc1"):
            output: LayerOutput = checkpoint(lambda normed: self.body(normed, inputs, normed), False, normed)
        return output


class InChunks:
    """A body that in training computes one stretch of tokens after the other."""

    def __init__(self, body: Body, branch: str, parts: Mapping[str, Any], number: int) -> None:
        self.body, self.branch, self.parts, self.number = body, branch, parts, number

    def __call__(self, normed: Tensor, inputs: LayerInputs, norm_input: Tensor) -> LayerOutput:
        if not self.parts[self.branch].training:
            return self.body(normed, inputs, norm_input)
        found = [self.body(part, inputs, norm_input) for part in normed.chunk(self.number)]
        return torch.cat([output for output, _ in found]), found[0][1]


class NormalisedAgain:
    """A body for which x is normalised again in backward. part: name of the norm where x is offloaded."""

    def __init__(self, body: Body, norm: str, parts: Mapping[str, Any], part: str) -> None:
        self.body, self.norm, self.parts, self.part = body, norm, parts, part

    def __call__(self, normed: Tensor, inputs: LayerInputs, norm_input: Tensor) -> LayerOutput:
        norm = self.parts[self.norm]
        # The norm's input is saved for backward anyway: the norm itself and the residual stream need it.
        get_input = hold(self.part, norm_input)
        with keep_as(normed, Recomputed(lambda: norm(get_input()))):
            return self.body(normed, inputs, norm_input)


# ---- branches


class RecordedBranch:
    """A branch that a CUDA graph launches, in passes that have recordings of it."""

    def __init__(self, branch: ResidualBranch, part: Region) -> None:
        self.branch, self.part = branch, part

    def __call__(self, x: Tensor, inputs: LayerInputs, stream: Tensor | None = None) -> Tensor:
        tensors, add = ((x,), self._add) if stream is None else ((x, stream), self._add_to)
        result: Tensor = self.part(add, tensors, inputs)
        return result

    def _add(self, x: Tensor, *inputs: Any) -> Tensor:
        return self.branch.add(x, LayerInputs(*inputs))

    def _add_to(self, x: Tensor, stream: Tensor, *inputs: Any) -> Tensor:
        return self.branch.add(x, LayerInputs(*inputs), stream)


class RecordedRouter:
    """A branch of experts whose norm and router a CUDA graph launches."""

    def __init__(self, branch: ResidualBranch, part: Region) -> None:
        self.branch, self.part = branch, part

    def __call__(self, x: Tensor, inputs: LayerInputs, stream: Tensor | None = None) -> Tensor:
        branch, experts = self.branch, self.branch.parts[self.branch.name]
        normed, *routed = self.part(self._route, (x,))
        if stream is None:
            stream = x if branch.norm is None else branch.choose_residual(normed, x)
        output, bias = experts(normed, experts.take_routing(normed, routed))
        return branch.leave(output, bias, stream)

    def _route(self, x: Tensor) -> tuple[Tensor, ...]:
        normed, *_ = self.branch.enter(x)
        return normed, *self.branch.parts[self.branch.name].route(normed)


# ---- all branches of a layer


class Parallel:
    """All branches read x; what each returns is added to one stream."""

    def __init__(self, runners: Sequence[Runner]) -> None:
        self.runners = runners

    def __call__(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        first, *others = self.runners
        stream = first(x, inputs)
        for add in others:
            stream = add(x, inputs, stream)
        return stream


class OneNorm:
    """All branches read one norm of x; what each returns is added to one stream."""

    def __init__(self, branches: Sequence[ResidualBranch]) -> None:
        self.branches = branches

    def __call__(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        normed, norm_input, stream = self.branches[0].enter(x)
        for branch in self.branches:
            stream = branch.leave(*branch.body(normed, inputs, norm_input), stream)
        return stream


class Within:
    """Runners inside of a context."""

    def __init__(self, around: Callable[[], AbstractContextManager[Any]], runners: Sequence[Runner]) -> None:
        self.around, self.runners = around, runners

    def __call__(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        with self.around():
            for add in self.runners:
                x = add(x, inputs)
        return x


class RecordedLayer:
    """All of a layer as one CUDA graph. is_recomputed: the recording keeps only the layer's input."""

    def __init__(self, runners: Sequence[Runner], part: Region, *, is_recomputed: bool) -> None:
        self.runners, self.part, self.is_recomputed = runners, part, is_recomputed

    def __call__(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        again = functools.partial(checkpoint, self._run, False) if self.is_recomputed else None
        output: Tensor = self.part(self._run, (x,), inputs, recorded=again)
        return output

    def _run(self, x: Tensor, *inputs: Any) -> Tensor:
        for add in self.runners:
            x = add(x, LayerInputs(*inputs))
        return x
