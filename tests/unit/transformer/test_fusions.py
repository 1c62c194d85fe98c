# SPDX-License-Identifier: Apache-2.0
"""Every hand-written fusion against its plain reference: same output, same gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.activations import (
    Activation,
    activation_reference,
    bias_activation,
    bias_gated_activation,
    find_activation,
    gated_activation_reference,
)
from megatron.core.errors import ConfigError
from megatron.core.tensor_parallel.products import TableLookup, multiply
from megatron.core.transformer.core_attention.local import scaled_masked_softmax, scaled_masked_softmax_reference
from megatron.core.transformer.core_attention.query_blocks import blocked_causal_attention
from megatron.core.transformer.norms import layer_norm, layer_norm_reference, rms_norm, rms_norm_reference
from megatron.core.transformer.residual_branch import bias_dropout_add, bias_dropout_add_reference
from megatron.core.transformer.rotary import Rotation, apply_rotary, split_and_rotate, split_qkv

ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "quick_gelu", "squared_relu")


def outputs_and_grads(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The function's output and the gradients of a weighted sum of it; inputs may be overwritten by the function."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    output = function(*(leaf * 1.0 for leaf in leaves))  # not leaves themselves: fusions work in place
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), leaves)]


def assert_same(fused: Callable[..., Tensor], reference: Callable[..., Tensor], *inputs: Tensor) -> None:
    for found, expected in zip(outputs_and_grads(fused, *inputs), outputs_and_grads(reference, *inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_rms_norm() -> None:
    x, weight = torch.randn(5, 3, 48), torch.rand(48) + 0.5
    assert_same(lambda x, w: rms_norm(x, w, 1e-5), lambda x, w: rms_norm_reference(x, w, 1e-5), x, weight)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), F.rms_norm(x, (48,), weight, 1e-5))


def test_layer_norm() -> None:
    inputs = torch.randn(5, 3, 48), torch.rand(48) + 0.5, torch.randn(48)
    assert_same(lambda *a: layer_norm(*a, 1e-5), lambda *a: layer_norm_reference(*a, 1e-5), *inputs)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name: str, gated: bool, with_bias: bool) -> None:
    activation = find_activation(name)
    fused, reference = (
        (bias_gated_activation, gated_activation_reference) if gated else (bias_activation, activation_reference)
    )
    inputs = [torch.randn(4, 3, 32)] + ([torch.randn(32)] if with_bias else [])

    def call(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, bias=None: function(x, bias, activation)

    assert_same(call(fused), call(reference), *inputs)


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("squared_relu", lambda x: torch.where(x > 0, x * x, 0.0)),
        ("quick_gelu", lambda x: x / (1 + torch.exp(-1.702 * x))),
        ("gelu_tanh", lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))),
        ("gelu", lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5))),
        ("silu", lambda x: x / (1 + torch.exp(-x))),
    ],
)
def test_activation_formulas(name: str, formula: Callable[[Tensor], Tensor]) -> None:
    x = torch.linspace(-4, 4, 101)
    torch.testing.assert_close(find_activation(name).forward(x), formula(x))


def test_find_activation() -> None:
    assert find_activation(F.silu).name == "silu"
    assert find_activation(torch.tanh) == Activation("tanh", torch.tanh)
    with pytest.raises(ConfigError, match="'gelou'"):
        find_activation("gelou")


@pytest.mark.parametrize("with_bias", [True, False])
def test_bias_dropout_add(with_bias: bool) -> None:
    inputs = [torch.randn(4, 3, 8), torch.randn(4, 3, 8)] + ([torch.randn(8)] if with_bias else [])
    for prob, training in ((0.0, True), (0.5, False), (0.5, True)):

        def call(
            function: Callable[..., Tensor], prob: float = prob, training: bool = training
        ) -> Callable[..., Tensor]:
            def seeded(x: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
                torch.manual_seed(3)
                return function(x, bias, residual, prob, training)

            return seeded

        assert_same(call(bias_dropout_add), call(bias_dropout_add_reference), *inputs)


@pytest.mark.parametrize("in_fp32", [True, False])
def test_softmax(in_fp32: bool) -> None:
    scores = torch.randn(2, 3, 8, 8)
    mask = torch.ones(8, 8, dtype=torch.bool).triu(1)
    for used in (mask, None):
        assert_same(
            lambda s, m=used: scaled_masked_softmax(s, m, 3.0, in_fp32),
            lambda s, m=used: scaled_masked_softmax_reference(s, m, 3.0, in_fp32),
            scores,
        )
    probabilities = scaled_masked_softmax(scores, mask, 1.0, in_fp32)
    assert (probabilities[..., mask] == 0).all()
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(2, 3, 8))


@pytest.mark.parametrize("sequence", [1, 7, 64, 65, 200])
def test_blocked_causal_attention(sequence: int) -> None:
    packed = torch.randn(sequence, 2, 3, 3, 8)  # queries, keys and values lie as in the packed projection

    def reference(x: Tensor) -> Tensor:
        q, k, v = (part.permute(1, 2, 0, 3) for part in x.unbind(3))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3).permute(2, 0, 1, 3)

    assert_same(lambda x: blocked_causal_attention(*x.unbind(3), 0.3), reference, packed)


def test_softmax_in_fp32_is_more_exact() -> None:
    scores = torch.randn(1, 1, 4, 64, generator=torch.Generator().manual_seed(0)).bfloat16() * 4
    exact = torch.softmax(scores.double() * 3.0, -1)
    wide, narrow = (scaled_masked_softmax(scores, None, 3.0, in_fp32).double() for in_fp32 in (True, False))
    assert (wide - exact).abs().max() < (narrow - exact).abs().max()


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotated", [8, 4])
@pytest.mark.parametrize("heads_per_group", [1, 3])
def test_split_and_rotate(heads_per_group: int, rotated: int, interleaved: bool) -> None:
    angles = torch.outer(torch.arange(5.0), torch.rand(rotated // 2))
    rotation = Rotation(angles.cos(), angles.sin(), interleaved)
    packed = torch.randn(5, 2, 2, heads_per_group + 2, 8)

    def joined(parts: tuple[Tensor, ...]) -> Tensor:
        return torch.cat([part.flatten(1) for part in parts], dim=1)

    def reference(packed: Tensor) -> Tensor:
        query, key, value = split_qkv(packed, heads_per_group)
        return joined((apply_rotary(query, rotation), apply_rotary(key, rotation), value))

    assert_same(lambda p: joined(split_and_rotate(p, heads_per_group, rotation)), reference, packed)
    assert_same(
        lambda p: joined(split_and_rotate(p, heads_per_group, None)),
        lambda p: joined(split_qkv(p, heads_per_group)),
        packed,
    )


def test_rotation_depends_on_distance_only() -> None:
    """<rotated q at i, rotated k at j> is a function of i - j: the point of rotary positions."""
    angles = torch.outer(torch.arange(12.0), torch.rand(4))
    rotation = Rotation(angles.cos(), angles.sin(), False)
    q, k = (apply_rotary(torch.randn(1, 8).expand(12, 8), rotation) for _ in range(2))
    products = q @ k.t()
    torch.testing.assert_close(products[3, 1], products[11, 9])
    torch.testing.assert_close(products[2, 7], products[5, 10])


def test_fusions_refuse_to_be_used_twice() -> None:
    """Backward works in the saved input's memory: a second backward must fail loudly, not give other gradients."""
    x = torch.randn(3, 8, requires_grad=True)
    y = bias_gated_activation(x * 1.0, None, find_activation("silu")).sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_embedding_gradient() -> None:
    weight = torch.nn.Parameter(torch.randn(10, 4))
    ids = torch.tensor([[1, 3], [3, 9]])
    grad = torch.randn(2, 2, 4)
    (expected,) = torch.autograd.grad(F.embedding(ids, weight), weight, grad)
    (found,) = torch.autograd.grad(multiply(TableLookup(), ids, weight), weight, grad)
    torch.testing.assert_close(found, expected)
    weight.main_grad = torch.ones(10, 4)
    multiply(TableLookup(), ids, weight).backward(grad)
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad, expected + 1)
