# SPDX-License-Identifier: Apache-2.0
"""oneDNN's float32 products, and on which processors and shapes they are taken."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.process_groups_config import SingleRankGroup
from megatron.core.tensor_parallel import products
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.parameters import initialise_parameters, normal
from tests.support.gpt_models import build_model, losses_and_grads

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@pytest.fixture(autouse=True)
def forget_processor() -> Iterator[None]:
    products.onednn_is_faster.cache_clear()
    yield
    products.onednn_is_faster.cache_clear()


def choose(monkeypatch: pytest.MonkeyPatch, *, onednn: bool) -> None:
    monkeypatch.setattr(products, "onednn_is_faster", lambda: onednn)


@pytest.mark.parametrize(
    ("maker", "vectors", "libraries", "expected"),
    [
        ("AuthenticAMD", "AVX512", (True, True), True),
        ("HygonGenuine", "AVX512", (True, True), True),
        ("GenuineIntel", "AVX512", (True, True), False),
        ("AuthenticAMD", "AVX2", (True, True), False),
        ("AuthenticAMD", "AVX512", (False, True), False),
        # Without MKL torch has another library, of which nothing is known.
        ("AuthenticAMD", "AVX512", (True, False), False),
        (None, "AVX512", (True, True), False),
    ],
)
def test_of_which_processors(
    monkeypatch: pytest.MonkeyPatch, maker: str | None, vectors: str, libraries: tuple[bool, bool], expected: bool
) -> None:
    lines = ["processor\t: 0", *([f"vendor_id\t: {maker}"] if maker else []), "model name\t: a: b", ""]
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "\n".join(lines * 2))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: vectors)
    for library, is_there in zip((torch.backends.mkldnn, torch.backends.mkl), libraries, strict=True):
        monkeypatch.setattr(library, "is_available", lambda is_there=is_there: is_there)
    assert products.onednn_is_faster() == expected


@pytest.mark.parametrize(
    ("processor", "maker"),
    [("AMD64 Family 25 Model 97 Stepping 2, AuthenticAMD", "AuthenticAMD"), ("arm", "arm"), ("", "")],
)
def test_maker_without_cpuinfo(monkeypatch: pytest.MonkeyPatch, processor: str, maker: str) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(platform, "processor", lambda: processor)
    assert products._find_maker() == maker


def test_of_which_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    def takes(rows: int, k: int, n: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> bool:
        a = torch.empty(1, rows, k, dtype=dtype, device=device)
        return products.takes_onednn(a, torch.empty(k, n, dtype=dtype, device=device))

    choose(monkeypatch, onednn=True)
    assert takes(128, 128, 128) and takes(64, 128, 256) and takes(65, 1009, 72)
    assert not takes(127, 128, 128) and not takes(63, 4096, 4096) and not takes(4096, 63, 64)
    assert not takes(4096, 64, 63) and not takes(0, 64, 64) and not takes(64, 0, 64)
    assert not takes(512, 512, 512, torch.bfloat16) and not takes(512, 512, 512, device="meta")
    choose(monkeypatch, onednn=False)
    assert not takes(512, 512, 512)


def far(found: Tensor, expected: Tensor) -> float:
    """Largest difference, in roundings of the largest expected value."""
    assert found.shape == expected.shape and found.dtype == torch.float32
    largest = expected.abs().max() * torch.finfo(torch.float32).eps
    return float((found.double() - expected).abs().max() / largest)


@needs_onednn
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("batch", "k", "n"), [((65, 3), 72, 1009), ((128,), 128, 128), ((2, 50, 2), 1009, 66)])
def test_products_have_the_accuracy_of_float32(batch: tuple[int, ...], k: int, n: int, with_bias: bool) -> None:
    torch.manual_seed(1)
    # Parameters are views into flat buffers: any multiple of 4 bytes.
    weight = torch.randn(n * k + 1)[1:].view(n, k)
    a, bias = torch.randn(*batch, k), torch.randn(n) if with_bias else None
    expected = a.double() @ weight.double().t() + (bias.double() if bias is not None else 0.0)
    found = products.multiply_by_onednn(a, weight.t(), bias)
    assert far(found, expected) < 20 and found.is_contiguous()
    assert torch.equal(found, products.multiply_by_onednn(a, weight.t(), bias)), "two calls differ"
    grad = torch.randn(*batch, n).flatten(0, -2)
    assert far(products.multiply_by_onednn(grad, weight), grad.double() @ weight.double()) < 20
    rows = a.flatten(0, -2)
    assert far(products.multiply_by_onednn(grad.t(), rows), grad.double().t() @ rows.double()) < 20


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes [..., k, n] of oneDNN's products from now on."""
    calls: list[tuple[int, ...]] = []
    multiply = products.multiply_by_onednn

    def counting(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        calls.append((*a.shape, b.shape[1]))
        return multiply(a, b, bias)

    monkeypatch.setattr(products, "multiply_by_onednn", counting)
    return calls


@needs_onednn
@pytest.mark.parametrize("has_main_grad", [False, True])
def test_a_layer_takes_it_for_all_three_products(
    monkeypatch: pytest.MonkeyPatch, calls: list[tuple[int, ...]], has_main_grad: bool
) -> None:
    layer = ColumnParallelLinear(
        128, 130, config=ModelParallelConfig(), init_method=normal(1.0), bias=False, tp_group=SingleRankGroup()
    )
    initialise_parameters(layer, seed=3)
    x, results = torch.randn(64, 2, 128), []
    for onednn in (False, True):
        choose(monkeypatch, onednn=onednn)
        layer.weight.grad = None
        if has_main_grad:
            layer.weight.main_grad = torch.ones_like(layer.weight)
        own = x.clone().requires_grad_()
        y, _ = layer(own)
        y.mul_(2.0).square().sum().backward()  # in place: not a view
        weight_grad = layer.weight.main_grad if has_main_grad else layer.weight.grad
        results.append([y.detach(), own.grad, weight_grad])
    assert calls == [(64, 2, 128, 130), (128, 130, 128), (130, 128, 128)]
    for plain, found in zip(*results, strict=True):
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5 * float(plain.abs().max()))


@needs_onednn
def test_what_autograd_differentiates_stays_with_torch(
    monkeypatch: pytest.MonkeyPatch, calls: list[tuple[int, ...]]
) -> None:
    config = ModelParallelConfig(gradient_accumulation_fusion=False)
    layer = ColumnParallelLinear(
        128, 130, config=config, init_method=normal(1.0), bias=False, tp_group=SingleRankGroup()
    )
    initialise_parameters(layer, seed=3)
    choose(monkeypatch, onednn=True)
    x = torch.randn(64, 2, 128, requires_grad=True)
    layer(x)[0].sum().backward()
    assert calls == [] and x.grad is not None and layer.weight.grad is not None


@needs_onednn
def test_a_whole_model(monkeypatch: pytest.MonkeyPatch, calls: list[tuple[int, ...]]) -> None:
    monkeypatch.setattr(products, "_LEAST_LENGTH", 1)
    monkeypatch.setattr(products, "_LEAST_MULTIPLICATIONS", 1)
    found = []
    for onednn in (False, True):
        choose(monkeypatch, onednn=onednn)
        losses, grads = losses_and_grads(build_model("--swiglu --num-query-groups 2"))
        found.append([losses, *grads.values()])
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(other, plain, rtol=1e-4, atol=1e-6)
    # QKV, projection and both of the MLP in each of two layers, and the output layer; three products of each.
    assert len(calls) == 3 * (4 * 2 + 1)
