# SPDX-License-Identifier: Apache-2.0
"""Parallel layers in one process: their arithmetic, what they declare, and the vocabulary-parallel loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.placement import Part, get_placement
from megatron.core.process_groups_config import SingleRankGroup
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.parameters import (
    declare_parameter,
    derive_parameter_seed,
    initialise_parameters,
    normal,
    parameter_dtype,
)
from megatron.core.tensor_parallel.products import Matmul, finish_weight_grad, multiply
from tests.support.gpt_models import build_model, token_batch
from tests.support.pretend_groups import pretend

ALONE = SingleRankGroup()


def filled(layer: nn.Module) -> nn.Module:
    initialise_parameters(layer, seed=3)
    return layer


@pytest.mark.parametrize("skip_bias_add", [True, False])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_linear_layers(kind: type, skip_bias_add: bool) -> None:
    layer = filled(
        kind(8, 12, config=ModelParallelConfig(), init_method=normal(1.0), skip_bias_add=skip_bias_add, tp_group=ALONE)
    )
    with torch.no_grad():
        layer.bias.normal_()
    x = torch.randn(5, 2, 8)
    output, bias = layer(x)
    assert (bias is layer.bias) if skip_bias_add else (bias is None)
    torch.testing.assert_close(output, F.linear(x, layer.weight, None if skip_bias_add else layer.bias))


def test_output_layer_with_a_borrowed_weight() -> None:
    layer = ColumnParallelLinear(
        4, 6, config=ModelParallelConfig(), init_method=normal(1.0), bias=False, skip_weight_param_allocation=True,
        tp_group=ALONE,
    )  # fmt: skip
    assert list(layer.parameters()) == []
    weight, x = torch.randn(6, 4), torch.randn(2, 1, 4)
    torch.testing.assert_close(layer(x, weight)[0], x @ weight.t())


@pytest.mark.flags("--no-gradient-accumulation-fusion")
def test_gradient_accumulation_fusion() -> None:
    """With the fusion weight gradients arrive in main_grad, without it in grad; their values are the same."""
    fused, plain = build_model(""), build_model("--no-gradient-accumulation-fusion")
    ids, positions, labels = token_batch()
    for model in (fused, plain):
        for param in model.parameters():
            param.main_grad = torch.zeros_like(param)
        model(ids, positions, labels=labels).mean().backward()
    for (name, ours), other in zip(fused.named_parameters(), plain.parameters(), strict=True):
        assert other.grad is not None and not other.main_grad.any(), name
        if ours.dim() == 2:
            assert ours.grad is None, name
            torch.testing.assert_close(ours.main_grad, other.grad, rtol=1e-4, atol=1e-6)


def test_a_product_accumulates_into_main_grad() -> None:
    weight = nn.Parameter(torch.randn(6, 4))
    bias = nn.Parameter(torch.randn(6))
    weight.main_grad = torch.full((6, 4), 2.0)
    x = torch.randn(3, 2, 4, requires_grad=True)
    grad = torch.randn(3, 2, 6)
    expected = torch.autograd.grad(F.linear(x, weight, bias), (x, weight, bias), grad)
    multiply(Matmul(), x, weight, bias).backward(grad)
    torch.testing.assert_close(x.grad, expected[0])
    torch.testing.assert_close(weight.main_grad, expected[1] + 2.0)
    torch.testing.assert_close(bias.grad, expected[2])
    assert weight.grad is None


def test_weight_gradient_in_a_wider_format() -> None:
    weight = nn.Parameter(torch.randn(6, 4, dtype=torch.bfloat16))
    weight.main_grad = torch.zeros(6, 4)
    grad_rows, x_rows = torch.randn(5, 6).bfloat16(), torch.randn(5, 4).bfloat16()
    assert finish_weight_grad(Matmul(), weight, grad_rows, x_rows) is None
    torch.testing.assert_close(weight.main_grad, (grad_rows.t() @ x_rows).float())


# ---- declared parameters


def test_placements() -> None:
    group = pretend(1, tp=4).tp
    config = ModelParallelConfig()
    column = ColumnParallelLinear(
        8, 24, config=config, init_method=normal(1.0), parts=(Part(16, name="a"), Part(8, name="b")), tp_group=group
    )
    row = RowParallelLinear(8, 12, config=config, init_method=normal(1.0), tp_group=group)
    embedding = VocabParallelEmbedding(16, 8, config=config, init_method=normal(1.0), tp_group=group)
    assert get_placement(column.weight).boxes() == [((4, 4), (0, 8)), ((18, 2), (0, 8))]
    assert get_placement(row.weight).boxes() == [((0, 12), (2, 2))]
    assert get_placement(row.bias).boxes() == [((0, 12),)]
    assert get_placement(embedding.weight).boxes() == [((4, 4), (0, 8))]
    assert [tuple(p.shape) for p in (column.weight, column.bias, row.weight, embedding.weight)] == [
        (6, 8), (6,), (12, 2), (4, 8),
    ]  # fmt: skip


def test_declared_parameters_start_at_zero_and_keep_their_format() -> None:
    module = nn.Module()
    module.p = declare_parameter((3, 2), dtype=torch.bfloat16)
    initialise_parameters(module, seed=1)
    assert module.p.dtype == torch.bfloat16 and not module.p.any()
    assert get_placement(module.p).name == "p"


def test_seed_is_stable() -> None:
    """Changing this number changes every initial weight of every run."""
    assert derive_parameter_seed(1234, "decoder.layers.0.mlp.linear_fc1.weight") == 2385181098404303716


def test_parameter_dtype() -> None:
    assert parameter_dtype(ModelParallelConfig()) == torch.float32
    assert parameter_dtype(ModelParallelConfig(bf16=True)) == torch.bfloat16
    assert parameter_dtype(ModelParallelConfig(bf16=True, params_dtype=torch.float64)) == torch.float64


# ---- cross entropy


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_cross_entropy(label_smoothing: float) -> None:
    logits, target = torch.randn(5, 2, 11) * 4, torch.randint(11, (5, 2))
    weights = torch.rand(5, 2)
    x = logits.clone().requires_grad_()
    # torch spreads the mass over all entries, Megatron over the others: eps * v / (v - 1) makes them equal.
    expected = F.cross_entropy(
        x.flatten(0, 1), target.flatten(), reduction="none", label_smoothing=label_smoothing * 11 / 10
    ).view(5, 2)
    (expected_grad,) = torch.autograd.grad((expected * weights).sum(), x)
    loss = vocab_parallel_cross_entropy(x * 1.0, target, label_smoothing, tp_group=ALONE)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad((loss * weights).sum(), x)[0], expected_grad)


def test_cross_entropy_of_a_hopeless_prediction() -> None:
    """The target's probability underflows float32; the loss is still exact."""
    logits = torch.tensor([[[0.0, 500.0, 499.0]]])
    expected = 500 + torch.tensor(-1.0).exp().log1p().item()
    assert vocab_parallel_cross_entropy(logits, torch.tensor([[0]]), tp_group=ALONE).item() == pytest.approx(expected)
