# SPDX-License-Identifier: Apache-2.0
"""Products of matrices with scales of rows and blocks: what the tensor cores are given means what emulation multiplies.

The stand-in for torch's operator lets the operator itself check dtypes, shapes and strides on a GPU without values, and
multiplies what the arguments mean by their documented layouts. Scales of rows are multiplied by the CPU's operator.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.core import device, device_kernels
from megatron.core.errors import ConfigError
from megatron.core.fp4 import _VALUES
from megatron.core.operation_table import EMULATED, OPERATIONS, Case, choose
from megatron.core.tensor_parallel.fp8_products import FP8Matmul, FP8Recipe, choose_way
from megatron.core.transformer.moe.grouped_products import FP8Experts
from tests.support.gpt_models import read_config

NATIVE = {name: next(way for way in OPERATIONS["linear"] if name in way.kinds) for name in EMULATED.kinds}
GPU = torch.device("cuda", 0)
KINDS: Any = F.ScalingType  # type: ignore[attr-defined]


def as_list(value: Any) -> list[Any]:
    return [*value] if isinstance(value, list) else [value]


def on_gpu(x: Tensor) -> Tensor:
    """The same dtype, shape and strides on a GPU, without values; called in FakeTensorMode."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=GPU)


def read_values(x: Tensor) -> Tensor:
    """float32 of 8-bit values [rows, k], or of pairs of 4-bit values [rows, k / 2]."""
    if x.dtype != torch.float4_e2m1fn_x2:
        return x.float()
    codes = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
    pairs = x.view(torch.uint8).int()
    return torch.stack((codes[pairs & 15], codes[pairs >> 4]), dim=-1).flatten(-2)


def read_scales(scales: list[Tensor], kinds: list[Any], rows: int, columns: int) -> Tensor:
    """The factor of each value [rows, columns]."""
    scale, kind = scales[0], kinds[0]
    if kind == KINDS.RowWise:
        return scale.reshape(rows, 1).expand(rows, columns)
    if kind == KINDS.BlockWise1x128:
        return scale.repeat_interleave(128, 1)
    if kind == KINDS.BlockWise128x128:  # with as many rows as blocks of the sum, rounded up to 4
        return scale.t().repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    length = {KINDS.BlockWise1x32: 32, KINDS.BlockWise1x16: 16}[kind]
    factors = torch.empty(rows, columns)
    blocks, flat = -(-columns // length), scale.float()
    in_a_row = -(-blocks // 4)
    for row in range(rows):
        for block in range(blocks):
            # A tile has 512 scales; in it a row's four are 16 from those of the next row, and 4 from those 32 below.
            tile = row // 128 * in_a_row + block // 4
            place = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
            factors[row, block * length : (block + 1) * length] = flat[place]
    return factors * scales[1] if len(scales) > 1 else factors


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Multiply what the operator's arguments mean; returns the kinds of scales of each call."""
    calls: list[tuple[Any, ...]] = []
    operator = F.scaled_mm  # type: ignore[attr-defined]

    def multiply(
        a: Tensor, b: Tensor, of_a: Any, kind_a: Any, of_b: Any, kind_b: Any, *orders: Any, output_dtype: torch.dtype,
        use_fast_accum: bool = False,
    ) -> Tensor:  # fmt: skip
        given = [as_list(value) for value in (of_a, kind_a, of_b, kind_b)]
        with FakeTensorMode():
            moved = [[on_gpu(value) if isinstance(value, Tensor) else value for value in values] for values in given]
            checked = operator(on_gpu(a), on_gpu(b), *moved, *orders, output_dtype=output_dtype)
        calls.append((*given[1], *given[3]))
        if given[1] == [KINDS.RowWise]:
            assert output_dtype != torch.float32, "on a GPU sums with scales of rows are rounded to 16 bits"
            return operator(a, b, of_a, kind_a, of_b, kind_b, output_dtype=output_dtype)
        left, right = read_values(a), read_values(b.t())
        left = left * read_scales(given[0], given[1], *left.shape)
        right = right * read_scales(given[2], given[3], *right.shape)
        product = (left @ right.t()).to(output_dtype)
        assert product.shape == checked.shape and product.dtype == checked.dtype
        return product

    monkeypatch.setattr(F, "scaled_mm", multiply)
    return calls


SHAPES = {"rowwise": (21, 160, 144), "blockwise": (21, 272, 400), "mxfp8": (37, 160, 96), "nvfp4": (21, 80, 144)}


@pytest.mark.parametrize(
    ("name", "hybrid"), [(name, hybrid) for name in SHAPES for hybrid in (False, name != "nvfp4")][:-1]
)
def test_the_three_products_are_those_of_emulation(name: str, hybrid: bool, asked: list[tuple[Any, ...]]) -> None:
    """Odd numbers of tokens, and widths that end in part of a block, as published models have them."""
    tokens, inputs, outputs = SHAPES[name]
    x, weight, grad = (torch.randn(*shape) for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs)))
    x[:, 3] *= 1000
    results = []
    for way in (NATIVE[name], EMULATED):
        product = FP8Matmul(FP8Recipe(name=name, hybrid=hybrid, way=way))
        main_grad = torch.ones(outputs, inputs)
        y, kept = product.forward_keeping(x, weight)
        dx = product.input_grad(grad, weight)
        product.weight_grad(grad, kept, weight, main_grad)
        results.append([y, dx, product.weight_grad(grad, kept, weight, None), main_grad])
        half = product.forward(x.bfloat16(), weight.bfloat16())
        assert half.dtype == torch.bfloat16
        results[-1].append(half.float())
    for found, expected in zip(*results, strict=True):
        tolerance = 2**-8 if expected is results[1][-1] else 1e-6
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * expected.abs().max().item())
    kinds = {
        "rowwise": {("RowWise", "RowWise")},
        "blockwise": {("BlockWise1x128", "BlockWise128x128"), ("BlockWise1x128", "BlockWise1x128")},
        "mxfp8": {("BlockWise1x32", "BlockWise1x32")},
        "nvfp4": {("BlockWise1x16", "TensorWise", "BlockWise1x16", "TensorWise")},
    }
    assert {tuple(kind.name for kind in call) for call in asked} == kinds[name]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.usefixtures("asked")
def test_experts_multiply_the_same(name: str) -> None:
    _, inputs, outputs = SHAPES[name]
    ends = torch.tensor([3, 3, 20], dtype=torch.int32)
    x, weight, grad = torch.randn(20, inputs), torch.randn(3, outputs, inputs), torch.randn(20, outputs)
    results = []
    for way in (NATIVE[name], EMULATED):
        product = FP8Experts(FP8Recipe(name=name, way=way))
        y, kept = product.forward_keeping(x, weight, ends=ends)
        results.append([y, product.input_grad(grad, weight, ends), product.weight_grad(grad, kept, weight, None, ends)])
    for found, expected in zip(*results, strict=True):
        assert found is not None and expected is not None
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * expected.abs().max().item())


@pytest.mark.flags("--fp8-emulation")
def test_what_a_gpu_multiplies_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_kernels, "device_name", lambda: "GPU")
    native = {
        (8, 0): (), (8, 9): ("delayed", "tensorwise"), (9, 0): ("delayed", "tensorwise", "rowwise", "blockwise"),
        (10, 0): ("delayed", "tensorwise", "rowwise", "mxfp8", "nvfp4"),
    }  # fmt: skip
    for capability, recipes in native.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        for name in EMULATED.kinds:
            emulates = read_config("--fp8-format e4m3 --fp8-emulation").model.fp8_emulation
            assert choose_way(name, emulates=emulates, device=GPU) is EMULATED
            assert choose_way(name, emulates=False, device=torch.device("cpu")) is EMULATED
            if name in recipes:
                assert choose_way(name, emulates=False, device=GPU) is NATIVE[name]
                assert FP8Recipe(name=name, way=NATIVE[name]).describe().endswith(NATIVE[name].name)
                continue
            with pytest.raises(ConfigError, match=f"{name} has no products on.*it needs a GPU of.*--fp8-emulation"):
                choose_way(name, emulates=False, device=GPU)
    assert device.is_cuda(GPU)


def test_an_older_pytorch_has_no_scales_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(F, "scaled_mm")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    said = choose("linear", Case("blockwise", GPU)).passed_over
    assert "PyTorch 2.10" in said[NATIVE["blockwise"].name]


def test_every_row_has_its_code() -> None:
    pytest.importorskip("triton")
    assert all(callable(way.load()) for ways in OPERATIONS.values() for way in ways)
