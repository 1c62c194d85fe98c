# SPDX-License-Identifier: Apache-2.0
"""Layers with upstream's names and constructors are ours: the same numbers, and isinstance as upstream has it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.errors import ConfigError
from megatron.core.extensions import transformer_engine as te
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.parameters import normal
from megatron.core.transformer.norms import LayerNorm, RMSNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.pretend_groups import pretend

WIDTH, OUT = 72, 40


@pytest.fixture(autouse=True)
def groups() -> Iterator[None]:
    pretend(0).set_current()
    yield
    ProcessGroupCollection.clear_current()


def build(kind: Any, *sizes: int, normalization: str = "RMSNorm", **options: Any) -> Any:
    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=6, normalization=normalization)
    module = kind(*sizes, config=config, **{"init_method": normal(0.1), "bias": True, **options})
    # Filled as soon as it is built, as upstream's layers are.
    assert all(torch.isfinite(param).all() and param.std() < 0.2 for param in module.parameters())
    with torch.no_grad():
        for param in module.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    return module


def x(rows: int = 5) -> Tensor:
    return torch.randn(rows, 2, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (te.TEColumnParallelLinear, {"gather_output": False, "is_expert": False, "tp_comm_buffer_name": "fc1"}),
        (te.TERowParallelLinear, {"input_is_parallel": True, "is_expert": True, "tp_comm_buffer_name": "fc2"}),
        (te.TELinear, {"parallel_mode": "duplicated", "skip_weight_param_allocation": False}),
        (te.TELinear, {"parallel_mode": None, "is_expert": True}),
    ],
)
@pytest.mark.parametrize("skips", [False, True])
def test_products(kind: Any, options: dict[str, Any], skips: bool) -> None:
    layer = build(kind, WIDTH, OUT, skip_bias_add=skips, **options)
    output, bias = layer(x())
    torch.testing.assert_close(output, F.linear(x(), layer.weight, None if skips else layer.bias))
    assert (bias is layer.bias) if skips else bias is None
    assert isinstance(layer, te.TELinear)
    output.sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("init", [nn.init.zeros_, nn.init.normal_, functools.partial(nn.init.normal_, std=0.01)])
def test_initial_weights_by_torchs_functions(init: Any) -> None:
    sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": WIDTH, "num_attention_heads": 6, "num_moe_experts": 2}
    config = TransformerConfig(**sizes, moe_ffn_hidden_size=24, init_method=init, output_layer_init_method=init)
    layer = GPTModel(config, get_gpt_decoder_block_spec(config), 8, 8).decoder.layers[0]
    expected = 0.0 if init is nn.init.zeros_ else getattr(init, "keywords", {}).get("std", 1.0)
    for weight in (layer.self_attention.linear_qkv.weight, *layer.mlp.experts.parameters()):
        assert weight.ndim == 1 or float(weight.detach().std()) == pytest.approx(expected, rel=0.1)
    first, second = layer.mlp.experts.linear_fc1.weight
    assert expected == 0 or not torch.equal(first, second)


@pytest.mark.filterwarnings("ignore:layers are those of the local spec")
def test_kinds() -> None:
    column = build(te.TEColumnParallelLinear, WIDTH, OUT, gather_output=False, skip_bias_add=False, is_expert=False)
    norm = build(te.TELayerNormColumnParallelLinear, WIDTH, OUT, gather_output=False, skip_bias_add=False)
    assert isinstance(column, ColumnParallelLinear) and isinstance(norm, ColumnParallelLinear)
    assert not isinstance(norm, (te.TEColumnParallelLinear, te.TELinear)) and not isinstance(column, te.TEGroupedLinear)
    assert issubclass(te.TERowParallelLinear, RowParallelLinear)
    # Layers that a model builds for itself: adapters are chosen by these classes.
    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=6)
    layer = GPTModel(config, get_gpt_layer_with_transformer_engine_spec(), 8, 8).decoder.layers[0]
    attention, kinds = layer.self_attention, (te.TEColumnParallelLinear, te.TERowParallelLinear, te.TELinear)
    assert [isinstance(attention.linear_proj, kind) for kind in kinds] == [False, True, True]
    assert isinstance(attention.linear_qkv, te.TELayerNormColumnParallelLinear)
    assert not isinstance(attention.linear_qkv, kinds) and not isinstance(layer.mlp, kinds)
    assert isinstance(attention.core_attention, te.TEDotProductAttention)
    for options in ({"parallel_mode": "column"}, {"parallel_mode": None, "skip_weight_param_allocation": True}):
        with pytest.raises(ConfigError, match="TELinear"):
            build(te.TELinear, WIDTH, OUT, skip_bias_add=False, **options)
    with pytest.raises(ConfigError, match="stride 2"):
        build(te.TEColumnParallelLinear, WIDTH, OUT, stride=2)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_a_norm_and_a_product_in_one(normalization: str) -> None:
    options: dict[str, Any] = {"gather_output": False, "skip_bias_add": False, "normalization": normalization}
    layer = build(te.TELayerNormColumnParallelLinear, WIDTH, OUT, **options)
    names = {name for name, _ in layer.named_parameters()}
    with_bias = {"layer_norm_bias"} if normalization == "LayerNorm" else set()
    assert names == {"weight", "bias", "layer_norm_weight"} | with_bias
    eps = 1e-5
    normalised = (
        F.layer_norm(x(), (WIDTH,), layer.layer_norm_weight, layer.layer_norm_bias, eps)
        if with_bias
        else F.rms_norm(x(), (WIDTH,), layer.layer_norm_weight, eps)
    )
    output, _ = layer(x())
    torch.testing.assert_close(output, F.linear(normalised, layer.weight, layer.bias))
    # Replaced parameters count, as where a model has been given memory after it was built.
    layer.layer_norm_weight = torch.nn.Parameter(torch.zeros(WIDTH))
    if with_bias:
        layer.layer_norm_bias = torch.nn.Parameter(torch.zeros(WIDTH))
    torch.testing.assert_close(layer(x())[0], layer.bias.expand_as(output))


@pytest.mark.parametrize("kind", [te.TEColumnParallelGroupedLinear, te.TERowParallelGroupedLinear])
@pytest.mark.parametrize("skips", [False, True])
def test_experts(kind: Any, skips: bool) -> None:
    layer = build(kind, 3, WIDTH, OUT, skip_bias_add=skips, is_expert=True)
    assert isinstance(layer, te.TEGroupedLinear) and layer.num_gemms == 3
    rows, counts = x().flatten(0, 1), [4, 0, 6]
    output, biases = layer(rows, torch.tensor(counts))
    expected = [
        F.linear(part, getattr(layer, f"weight{i}"), None if skips else getattr(layer, f"bias{i}"))
        for i, part in enumerate(rows.split(counts))
    ]
    torch.testing.assert_close(output, torch.cat(expected))
    assert (biases is None) != skips and (not skips or biases[1] is layer.bias1)


def test_norms_attention_and_functions() -> None:
    for name, kind in (("LayerNorm", LayerNorm), ("RMSNorm", RMSNorm)):
        config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=6, normalization=name)
        norm = te.TENorm(config, WIDTH, 1e-3)
        assert isinstance(norm, kind) and norm.eps == 1e-3
        with pytest.raises(ConfigError, match="the config says"):
            te.TENorm(config, WIDTH, normalization="other")
    attention = te.TEDotProductAttention(config, 1, te.AttnMaskType.causal, k_channels=12, v_channels=12)
    q = torch.randn(5, 2, 6, 12)
    causal = F.scaled_dot_product_attention(*(q.permute(1, 2, 0, 3),) * 3, is_causal=True)
    output = attention.eval()(q, q, q, None)
    torch.testing.assert_close(output, causal.permute(2, 0, 1, 3).flatten(2))
    first, second = te.SplitAlongDim(q, 1, [1, 1])
    assert torch.equal(torch.cat((first, second), 1), q)
    leaf = torch.randn(3, requires_grad=True)
    te.te_checkpoint(lambda a, *, power: (a**power).sum(), False, None, None, leaf, power=3).backward()
    torch.testing.assert_close(leaf.grad, 3 * leaf.detach() ** 2)
    assert te._get_extra_te_kwargs(config)["params_dtype"] == torch.float32
