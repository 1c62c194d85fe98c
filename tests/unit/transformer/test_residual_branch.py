# SPDX-License-Identifier: Apache-2.0
"""Layers are made of residual branches: of one, of two in turn or side by side; and of a branch of another kind."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref

import pytest
import torch
from torch import Tensor

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.residual_branch import JoinedBranches, ResidualBranch
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_layer import TransformerLayer
from tests.support.gpt_models import build_model, first_layer, read_config

RECOMPUTED = "--recompute-granularity selective --recompute-modules layernorm mlp"


def build_layer(flags: str, **left_out: None) -> TransformerLayer:
    spec = get_gpt_layer_local_spec()
    spec.submodules = dataclasses.replace(spec.submodules, **left_out)
    layer: TransformerLayer = build_module(spec, config=read_config(flags).model)
    torch.manual_seed(1)
    for param in layer.parameters():
        torch.nn.init.normal_(param, std=0.3)
    return layer


@pytest.mark.parametrize("flags", ["", RECOMPUTED, "--norm-placement both --parallel-residual"])
def test_layers_of_one_branch(flags: str) -> None:
    x = torch.randn(5, 2, 32, requires_grad=True)
    for layer, name in ((build_layer(flags, mlp=None, moe=None), "self_attention"),
                        (build_layer(flags, self_attention=None), "mlp")):  # fmt: skip
        (branch,) = layer.branches
        assert {key.split(".")[0] for key, _ in layer.named_parameters()} == {
            key for key in (branch.norm_name, branch.name, branch.output_norm_name) if key in branch.parts
        }
        assert branch.norm is not None
        output, bias = getattr(layer, name)(branch.norm(x))
        output = output + bias
        expected = x + (output if branch.output_norm_name not in branch.parts else
                        branch.parts[branch.output_norm_name](output))  # fmt: skip
        found = layer(x)
        torch.testing.assert_close(found, expected)
        grads = [torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]) for y in (found, expected)]
        for grad, of_formula in zip(*grads, strict=True):
            torch.testing.assert_close(grad, of_formula)


class TwoStreams(ResidualBranch):
    """A branch of two residual streams [s, b, 2 h]: it reads their mean, and adds to the second after swapping them."""

    joins = False

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, second = x.chunk(2, dim=-1)
        normed, norm_input, _ = super().enter((first + second) / 2)
        return normed, norm_input, x

    def leave(self, output: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        first, second = residual.chunk(2, dim=-1)
        return torch.cat([second, super().leave(output, bias, first)], dim=-1)


@pytest.mark.parametrize("flags", ["", RECOMPUTED])
def test_a_branch_may_be_added_to_several_streams(flags: str) -> None:
    layer = build_layer(flags)
    for branch in layer.branches:
        branch.__class__ = TwoStreams
    layer.execution.choose_runners(layer)
    assert not any(isinstance(runner, JoinedBranches) for runner in layer.runners)
    x = torch.randn(5, 2, 64, requires_grad=True)
    first, second = x.chunk(2, dim=-1)
    for norm, module in ((layer.input_layernorm, layer.self_attention), (layer.pre_mlp_layernorm, layer.mlp)):
        output, bias = module(norm((first + second) / 2))
        first, second = second, first + output + bias
    found, expected = layer(x), torch.cat([first, second], dim=-1)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected)))


@pytest.mark.parametrize("flags", ["", RECOMPUTED])
def test_branches_see_the_parts_that_a_layer_has_now(flags: str) -> None:
    layer = first_layer(build_model(flags))
    copied, x = copy.deepcopy(layer), torch.randn(5, 2, 32)
    with torch.no_grad():
        before = layer(x)
        for param in layer.parameters():
            param.add_(1.0)
        assert torch.equal(copied(x), before) and not torch.equal(layer(x), before)
        layer.mlp, layer.self_attention = copied.mlp, copied.self_attention
        layer.input_layernorm, layer.pre_mlp_layernorm = copied.input_layernorm, copied.pre_mlp_layernorm
        assert torch.equal(layer(x), before)


def test_a_layer_that_nobody_holds_is_freed_at_once() -> None:
    layer = build_layer(RECOMPUTED)
    alive = weakref.ref(layer)
    gc.disable()
    try:
        del layer
        assert alive() is None
    finally:
        gc.enable()
