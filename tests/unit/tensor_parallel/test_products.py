# SPDX-License-Identifier: Apache-2.0
"""Any product in any layer: its three gemms, deferral, recomputation, and a state of its own, without the layers
knowing which one it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.weight_grad_queue import WeightGradQueue, attach_queue
from megatron.core.process_groups_config import SingleRankGroup
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.parameters import initialise_parameters, normal
from megatron.core.tensor_parallel.products import multiply
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.moe.grouped_products import ExpertByExpert
from tests.support.gpt_models import build_model, token_batch
from tests.support.rounded_product import RoundedProduct, on_grid, round_products

ALONE = SingleRankGroup()
ENDS = torch.tensor([3, 3, 10], dtype=torch.int32)
"""Of three experts; the second has no rows."""


class Grouped(nn.Module):
    """The products of three experts, as ExpertLinear calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.product = ExpertByExpert()
        self.weight = nn.Parameter(torch.randn(3, 12, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return multiply(self.product, x, self.weight, ends=ENDS), None


def linear(kind: type, **options: object) -> nn.Module:
    layer: nn.Module = kind(
        8, 12, config=ModelParallelConfig(), init_method=normal(1.0), bias=False, tp_group=ALONE, **options
    )
    initialise_parameters(layer, seed=3)
    return layer


class Output(nn.Module):
    """An output layer with the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(ColumnParallelLinear, skip_weight_param_allocation=True)
        self.weight = nn.Parameter(torch.randn(12, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        output: tuple[Tensor, None] = self.layer(x, self.weight)
        return output


def expected_of_experts(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = [slice(0, 3), slice(3, 3), slice(3, 10)]
    return (
        torch.cat([x[r] @ w.t() for r, w in zip(rows, weight, strict=True)]),
        torch.cat([grad[r] @ w for r, w in zip(rows, weight, strict=True)]),
        torch.stack([grad[r].t() @ x[r] for r in rows]),
    )


def expected_of_one(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x @ weight.t(), grad @ weight, grad.t() @ x


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[..., tuple[Tensor, Tensor, Tensor]]]] = {
    "column": (lambda: linear(ColumnParallelLinear), expected_of_one),
    "row": (lambda: linear(RowParallelLinear), expected_of_one),
    "output": (Output, expected_of_one),
    "experts": (Grouped, expected_of_experts),
}


@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_runs_the_products_it_owns(name: str, is_late: bool, is_recomputed: bool) -> None:
    build, expected = LAYERS[name]
    layer = build()
    (product,) = round_products(layer)
    (weight,) = layer.parameters()
    weight.main_grad = torch.ones_like(weight)  # type: ignore[attr-defined]
    x, grad = torch.randn(10, 8, requires_grad=True), torch.randn(10, 12)
    queue = WeightGradQueue()
    attach_queue(layer.parameters(), queue)
    output = checkpoint(lambda x: layer(x)[0], False, x) if is_recomputed else layer(x)[0]
    with queue.collect("backward") if is_late else nullcontext():
        output.backward(grad)
    if is_late:
        assert product.calls["weight_grad"] == 0 and torch.equal(weight.main_grad, torch.ones_like(weight))
        queue.run("backward")
    y, grad_x, grad_weight = expected(on_grid(x), on_grid(weight), on_grid(grad))
    torch.testing.assert_close(output, y)
    torch.testing.assert_close(x.grad, grad_x)
    torch.testing.assert_close(weight.main_grad, grad_weight + 1)
    assert weight.grad is None
    assert product.calls == {"forward": 1 + is_recomputed, "input_grad": 1, "weight_grad": 1}
    assert product.largest.tolist() == [value.abs().max().item() for value in (x, weight, grad)]
    assert any(key.endswith("product.largest") for key in layer.state_dict()), "a checkpoint has the product's state"


@pytest.mark.parametrize("is_late", [False, True])
def test_an_embedding_is_a_product_that_is_never_late(is_late: bool) -> None:
    layer = VocabParallelEmbedding(12, 8, config=ModelParallelConfig(), init_method=normal(1.0), tp_group=ALONE)
    initialise_parameters(layer, seed=3)
    (product,) = round_products(layer)
    layer.weight.main_grad = torch.ones(12, 8)
    queue = WeightGradQueue()
    attach_queue(layer.parameters(), queue)
    ids, grad = torch.tensor([[1, 5], [5, 11]]), torch.randn(2, 2, 8)
    output = layer(ids)
    with queue.collect("backward") if is_late else nullcontext():
        output.backward(grad)
    assert torch.equal(output, on_grid(layer.weight)[ids])
    torch.testing.assert_close(
        layer.weight.main_grad, torch.ones(12, 8).index_add_(0, ids.flatten(), on_grid(grad).flatten(0, 1))
    )
    assert product.calls == {"forward": 1, "input_grad": 0, "weight_grad": 1}


def losses_and_grads(model: GPTModel) -> list[Tensor]:
    ids, positions, labels = token_batch()
    torch.manual_seed(5)
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
    losses = model(ids, positions, labels=labels)
    losses.mean().backward()
    grads = [grad for p in model.parameters() for grad in (p.grad, p.main_grad) if grad is not None]  # type: ignore[attr-defined]
    return [losses.detach(), *grads]


@pytest.mark.parametrize(
    "flags", ["", "--num-experts 4 --disable-bias-linear", "--untie-embeddings-and-output-weights"]
)
def test_a_whole_model_of_other_products(flags: str) -> None:
    """Also recomputed, to the last bit; and other numbers than those of torch's product."""
    flags = f"--num-layers 2 {flags}"
    plain, rounded = build_model(flags), build_model(flags)
    recomputed = build_model(f"{flags} --recompute-granularity selective --recompute-modules core_attn layernorm mlp")
    products = round_products(rounded)
    round_products(recomputed)
    usual, found, again = losses_and_grads(plain), losses_and_grads(rounded), losses_and_grads(recomputed)
    torch.testing.assert_close(found[0], usual[0], rtol=0.1, atol=0.1)
    assert not torch.equal(found[0], usual[0])
    assert all(map(torch.equal, found, again)) and len(found) == len(usual)
    assert all(isinstance(product, RoundedProduct) and product.calls["weight_grad"] for product in products)
