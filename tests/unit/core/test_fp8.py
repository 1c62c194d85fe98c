# SPDX-License-Identifier: Apache-2.0
"""FP8: rounding and scales equal their definitions bit for bit, and products are those of the rounded operands."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.fp8 import (
    E4M3,
    E5M2,
    Operand,
    compute_mx_scale,
    compute_scale,
    find_amax,
    multiply_emulated,
    multiply_natively,
    pack_rows,
    quantise_blocks,
    quantise_tensor,
    round_to,
    unpack_rows,
    widen,
)
from megatron.core.operation_table import EMULATED, OPERATIONS, Case, choose
from megatron.core.process_groups_config import SingleRankGroup
from megatron.core.tensor_parallel.fp8_products import (
    GRAD,
    INPUT,
    OPERANDS,
    WEIGHT,
    FP8Matmul,
    FP8Recipe,
    end_step,
)
from megatron.core.transformer.moe.grouped_products import FP8Experts

FORMATS = [E4M3, E5M2]
RECIPES = ["delayed", "tensorwise", "blockwise", "mxfp8", "rowwise"]
NATIVE = OPERATIONS["linear"][0]
ONE = torch.ones(())


def all_finite(dtype: torch.dtype) -> Tensor:
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    return values[values.isfinite()].unique()


# ---- rounding


@pytest.mark.parametrize("dtype", FORMATS)
def test_rounding_is_to_the_nearest_value_and_to_even_between_two(dtype: torch.dtype) -> None:
    values = all_finite(dtype)
    assert torch.equal(round_to(values, ONE, dtype).float(), values)
    low, high = values[:-1], values[1:]
    middle = (low + high) / 2  # exact: one bit more
    expected = torch.where(low.to(dtype).view(torch.uint8) % 2 == 0, low, high)
    assert torch.equal(round_to(middle, ONE, dtype).float(), expected)
    infinity = torch.full_like(middle, torch.inf)
    assert torch.equal(round_to(torch.nextafter(middle, infinity), ONE, dtype).float(), high)
    assert torch.equal(round_to(torch.nextafter(middle, -infinity), ONE, dtype).float(), low)


@pytest.mark.parametrize("dtype", FORMATS)
def test_rounding_is_that_of_torch_and_saturates(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.randn(1000).mul(torch.logspace(-6, 3, 1000)).to(torch.bfloat16)
    scale = torch.tensor(3.7)
    inside = x[(x.float() * scale).abs() <= largest]
    assert torch.equal(
        round_to(inside, scale, dtype).view(torch.uint8), (inside.float() * scale).to(dtype).view(torch.uint8)
    )
    beyond = torch.tensor([largest * 1.01, -2 * largest, torch.inf, -torch.inf, 3e38])
    assert round_to(beyond, ONE, dtype).float().tolist() == [largest, -largest, largest, -largest, largest]
    assert round_to(torch.tensor([torch.nan]), ONE, dtype).float().isnan().all()


@pytest.mark.parametrize("dtype", FORMATS)
def test_widening_is_exact_for_every_value_and_memory_order(dtype: torch.dtype) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(16, 16).view(dtype)
    for view in (values, values.t(), values[:, ::2], values[3:5], values[:0]):
        torch.testing.assert_close(widen(view), view.float(), rtol=0, atol=0, equal_nan=True)


# ---- scales


def test_scale_of_a_tensor() -> None:
    amax = torch.tensor([1.0, 3.0, 448.0, 1e30, 0.0, torch.inf, torch.nan, 1e-45])
    found = compute_scale(amax, E4M3)
    expected = torch.cat((torch.full((4,), 448.0) / amax[:4], torch.ones(3), torch.tensor([3.4028234663852886e38])))
    assert torch.equal(found, expected)
    assert torch.equal(compute_scale(amax[:4], E5M2, margin=3), torch.full((4,), 57344.0) / amax[:4] / 8)
    power = compute_scale(amax, E4M3, power_of_two=True)
    assert torch.equal(power[:4], 2.0 ** expected[:4].log2().floor()) and torch.equal(power[4:7], ONE.expand(3))


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_microscaling_factor_is_the_largest_that_saturates_nothing_and_fits_e8m0(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    exact = largest * 2.0 ** torch.arange(-9.0, 9.0)
    beside = (torch.nextafter(exact, torch.tensor(end)) for end in (0.0, torch.inf))
    amax = torch.cat((torch.rand(500) * torch.logspace(-20, 20, 500), exact, *beside))
    scale = compute_mx_scale(amax, dtype)
    assert (amax * scale <= largest).all() and (amax * scale * 2 > largest).all()
    stored = (1 / scale).to(torch.float8_e8m0fnu)
    assert torch.equal(1 / stored.float(), scale)
    assert compute_mx_scale(torch.tensor([0.0, torch.inf]), dtype).tolist() == [1.0, 1.0]
    # The exponents that 8 bits hold end at -127.
    assert compute_mx_scale(torch.tensor([1e-44]), dtype).item() == 2.0**127


@pytest.mark.parametrize(("block", "mx"), [((1, 128), False), ((128, 128), False), ((1, 32), True)])
@pytest.mark.parametrize("shape", [(5, 300), (130, 128), (2, 3, 64), (0, 64)])
def test_blocks_have_scales_of_their_own(shape: tuple[int, ...], block: tuple[int, int], mx: bool) -> None:
    x = torch.randn(shape).mul(torch.rand(shape[-1]) * 100).to(torch.bfloat16)
    found = quantise_blocks(x, E4M3, block, mx=mx)
    assert found.values.shape == x.shape
    whole = found.dequantise()
    for index in torch.cartesian_prod(*(torch.arange(size) for size in shape[:-2])) if len(shape) > 2 else [()]:
        matrix, values, result = x[index], found.values[index], whole[index]
        for row in range(0, shape[-2], block[0]):
            for column in range(0, shape[-1], block[1]):
                place = (slice(row, row + block[0]), slice(column, column + block[1]))
                amax = matrix[place].abs().max().float()
                scale = compute_mx_scale(amax, E4M3) if mx else compute_scale(amax, E4M3, power_of_two=True)
                assert torch.equal(values[place].float(), round_to(matrix[place], scale, E4M3).float())
                assert torch.equal(result[place], values[place].float() / scale)
    assert torch.equal(found.transposed.dequantise(), whole.transpose(-2, -1))


@pytest.mark.parametrize("mx", [False, True])
def test_blocks_of_float16_have_scales_beyond_its_range(mx: bool) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(6)).mul_(1e-4).half()
    found, expected = (quantise_blocks(values, torch.float8_e4m3fn, (1, 32), mx=mx) for values in (x, x.float()))
    assert (1 / expected.inverse > torch.finfo(torch.float16).max).all()
    assert torch.equal(found.dequantise(), expected.dequantise())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_that_travel_as_bytes_are_rounded_once(dtype: torch.dtype) -> None:
    rows = torch.randn(5, 96).mul(torch.logspace(-38, 4, 96)).to(dtype)
    rows[1] = 0
    packed = pack_rows(rows)
    assert packed.dtype == torch.uint8 and packed.shape == (5, 96 + 3)
    found = unpack_rows(packed, dtype)
    assert found.dtype == dtype and torch.equal(
        found, quantise_blocks(rows, E4M3, (1, 32), mx=True).dequantise().to(dtype)
    )
    assert unpack_rows(pack_rows(rows[:0]), dtype).shape == (0, 96)
    # A number that is none must not arrive as one; other blocks know nothing of it.
    rows[0, 3], rows[2, 40] = torch.inf, torch.nan
    found = unpack_rows(pack_rows(rows), dtype)
    assert found[0, :32].isnan().all() and found[2, 32:64].isnan().all() and int(found.isnan().sum()) == 64


# ---- products


def rounded(x: Tensor, dtype: torch.dtype) -> Operand:
    return quantise_tensor(x, dtype, compute_scale(find_amax(x), dtype))


@pytest.fixture(scope="module")
def native_products() -> None:
    """torch._scaled_mm computes on CPUs as well. On those with matrix units (AMX) it asks oneDNN, which refuses where
    ONEDNN_MAX_CPU_ISA has it do without them; without that setting a refusal is a failure."""
    operand = rounded(torch.ones(16, 16), E4M3)
    try:
        multiply_natively(operand, operand, torch.float32)
    except RuntimeError:
        if "ONEDNN_MAX_CPU_ISA" not in os.environ:
            raise
        pytest.skip("ONEDNN_MAX_CPU_ISA keeps oneDNN from this processor's matrix units")


@pytest.mark.usefixtures("native_products")
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3)])
@pytest.mark.parametrize("columns", [32, 27])
def test_the_device_multiplies_what_emulation_multiplies(
    formats: tuple[torch.dtype, torch.dtype], columns: int
) -> None:
    """A sum over 27 columns, of an expert's rows, is padded to 32."""
    a, b = rounded(torch.randn(12, columns), formats[0]), rounded(torch.randn(48, columns), formats[1])
    exact = a.dequantise().double() @ b.dequantise().double().t()
    for found in (multiply_emulated(a, b), multiply_natively(a, b, torch.float32)):
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)
    turned = rounded(torch.randn(columns, 48), formats[1]).transposed
    torch.testing.assert_close(multiply_natively(a, turned, torch.float32), multiply_emulated(a, turned))


@pytest.mark.usefixtures("native_products")
def test_weight_gradients_alone_are_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward products and input gradients are sums of a layer's width; tensor cores do those faster by themselves."""
    multiply, asked = torch._scaled_mm, []

    def ask(*operands: Any, use_fast_accum: bool, **options: Any) -> Any:
        asked.append(use_fast_accum)
        return multiply(*operands, **options)

    monkeypatch.setattr(torch, "_scaled_mm", ask)
    product = FP8Matmul(recipe("tensorwise", way=NATIVE))
    x, weight, grad = torch.randn(32, 16), torch.randn(48, 16), torch.randn(32, 48)
    product.forward(x, weight)
    product.input_grad(grad, weight)
    product.weight_grad(grad, x, weight, torch.zeros(48, 16))
    product.weight_grad(grad, x, weight, None)
    assert asked == [True, True, False, False]


def test_the_precision_of_products_is_left_as_it_was() -> None:
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, (a, b) = matmul.fp32_precision, (rounded(torch.randn(32, 32), E4M3) for _ in range(2))
    multiply_emulated(a, b)
    with pytest.raises(RuntimeError):
        multiply_emulated(a, rounded(torch.randn(32, 16), E4M3))
    assert matmul.fp32_precision == before


def recipe(name: str, **changes: object) -> FP8Recipe:
    return dataclasses.replace(FP8Recipe(name=name, hybrid=True), **changes)  # type: ignore[arg-type]


def definition(name: str, operand: int, matrix: Tensor) -> Tensor:
    """A matrix as its recipe rounds it, summed over its last dimension; float32."""
    dtype = E5M2 if operand == GRAD else E4M3
    if name in ("blockwise", "mxfp8", "rowwise"):
        of_blocks = (128, 128) if operand == WEIGHT else (1, 128)
        block = {"mxfp8": (1, 32), "blockwise": of_blocks, "rowwise": (1, matrix.shape[-1])}[name]
        return quantise_blocks(matrix, dtype, block, mx=name == "mxfp8").dequantise()
    return rounded(matrix, dtype).dequantise()


def expected_products(name: str, x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
    """Y, dX, dW from their definitions, operands rounded along what is summed."""
    y = definition(name, INPUT, x) @ definition(name, WEIGHT, weight).t()
    along_out = definition(name, WEIGHT, weight.t())
    return [
        y,
        definition(name, GRAD, grad) @ along_out.t(),
        definition(name, GRAD, grad.t()) @ definition(name, INPUT, x.t()).t(),
    ]


@pytest.mark.parametrize(
    ("name", "native"), [*((name, False) for name in RECIPES), *((name, True) for name in NATIVE.kinds)]
)
def test_three_products(name: str, native: bool, request: pytest.FixtureRequest) -> None:
    if native:
        request.getfixturevalue("native_products")
    x, weight, grad = torch.randn(3, 7, 128), torch.randn(256, 128), torch.randn(21, 256)
    product, bias = FP8Matmul(recipe(name, way=NATIVE if native else EMULATED)), torch.randn(256)
    main_grad = torch.ones(256, 128)
    y, dx, dw = expected_products(name, x.flatten(0, 1), weight, grad)
    torch.testing.assert_close(product.forward(x, weight, bias), (y + bias).view(3, 7, 256), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(product.input_grad(grad, weight), dx, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(product.weight_grad(grad, x, weight, None), dw, rtol=1e-5, atol=1e-4)
    assert product.weight_grad(grad, x, weight, main_grad) is None
    torch.testing.assert_close(main_grad, dw + 1, rtol=1e-5, atol=1e-4)
    exact = FP8Matmul(recipe(name, rounds_weight_grad=False)).weight_grad(grad, x, weight, None)
    assert torch.equal(exact, grad.t() @ x.flatten(0, 1))
    half = product.forward(x.bfloat16(), weight.bfloat16())
    assert half.dtype == torch.bfloat16 and not half._is_view()


@pytest.mark.parametrize("name", RECIPES)
def test_experts(name: str) -> None:
    """Rows of an expert are rounded as if they stood alone; scales of whole matrices are those of all rows."""
    ends = torch.tensor([21, 21, 30], dtype=torch.int32)
    x, weight, grad = torch.randn(30, 128), torch.randn(3, 256, 128), torch.randn(30, 256)
    product, main_grad = FP8Experts(recipe(name)), torch.zeros(3, 256, 128)
    has_one_scale = name in ("delayed", "tensorwise")

    def of_expert(operand: int, whole: Tensor, part: Tensor) -> Tensor:
        if not has_one_scale:
            return definition(name, operand, part)
        dtype = E5M2 if operand == GRAD else E4M3
        return quantise_tensor(part, dtype, compute_scale(find_amax(whole), dtype)).dequantise()

    y, dx = product.forward(x, weight, ends=ends), product.input_grad(grad, weight, ends)
    dw = product.weight_grad(grad, x, weight, None, ends)
    assert product.weight_grad(grad, x, weight, main_grad, ends) is None and dw is not None
    assert torch.equal(dw, main_grad)
    for expert, rows in enumerate((slice(0, 21), slice(21, 21), slice(21, 30))):
        w = weight[expert]
        close = {"rtol": 1e-5, "atol": 1e-4}
        forward = of_expert(INPUT, x, x[rows]) @ of_expert(WEIGHT, weight, w).t()
        torch.testing.assert_close(y[rows], forward, **close)
        backward = of_expert(GRAD, grad, grad[rows]) @ of_expert(WEIGHT, weight, w.t()).t()
        torch.testing.assert_close(dx[rows], backward, **close)
        if rows.start == rows.stop:
            assert not dw[expert].any()
            continue
        gradient = of_expert(GRAD, grad, grad[rows].t()) @ of_expert(INPUT, x, x[rows].t()).t()
        torch.testing.assert_close(dw[expert], gradient, **close)


def test_a_weight_is_rounded_once_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    product, weight = FP8Matmul(recipe("tensorwise")), torch.randn(32, 16)
    original = FP8Matmul._round_along_columns

    def counted(self: FP8Matmul, operand: int, matrix: Tensor, **options: bool) -> Operand:
        asked.append(operand)
        return original(self, operand, matrix, **options)

    monkeypatch.setattr(FP8Matmul, "_round_along_columns", counted)

    def microbatch() -> int:
        asked.clear()
        product.forward(torch.randn(4, 16), weight)
        product.input_grad(torch.randn(4, 32), weight)
        return asked.count(WEIGHT)

    assert [microbatch(), microbatch()] == [2, 2], "without a gradient buffer nobody says when the weight changes"
    weight.main_grad = torch.zeros(32, 16)  # type: ignore[attr-defined]
    assert [microbatch(), microbatch()] == [1, 0]
    end_step([product], SingleRankGroup())
    assert [microbatch(), microbatch()] == [1, 0]
    weight.mul_(2)
    assert microbatch() == 1, "a weight that was loaded is another one"


# ---- delayed scaling


def list_histories(
    steps: int, changes: dict[str, object]
) -> Iterator[tuple[FP8Matmul, list[list[float]], list[float]]]:
    """After each step: the product, and by definition the history of each operand and its scale."""
    torch.manual_seed(3)
    product, weight = FP8Matmul(recipe("delayed", **changes)), torch.randn(32, 16)
    weight.main_grad = torch.zeros(32, 16)  # type: ignore[attr-defined]
    length, margin = product.recipe.history_length, product.recipe.margin
    histories: list[list[float]] = [[] for _ in OPERANDS]
    scales = [0.0] * len(OPERANDS)
    for step in range(steps):
        weight.mul_(1 + 0.1 * math.sin(step))
        # An evaluation between two steps leaves no trace.
        product.eval()
        product.forward(torch.full((1, 16), 1e6), weight)
        product.train()
        amax = [0.0] * len(OPERANDS)
        for _ in range(2):
            x, grad = torch.randn(4, 16) * (1 + step % 7), torch.randn(4, 32) * 2.0 ** -(step % 5)
            product.forward(x, weight)
            product.input_grad(grad, weight)
            product.weight_grad(grad, x, weight, None)
            amax = [max(a, m.abs().max().item()) for a, m in zip(amax, (x, weight, grad), strict=True)]
        end_step([product], SingleRankGroup())
        for operand, history in enumerate(histories):
            history.insert(0, amax[operand])
            del history[length:]
            if step % product.recipe.interval == 0:
                chosen = max(history) if product.recipe.takes_largest else history[0]
                largest = 57344.0 if operand == GRAD else 448.0
                scales[operand] = (torch.tensor(largest) / torch.tensor(chosen) / 2.0**margin).item()
        yield product, histories, scales


@pytest.mark.parametrize(
    "changes",
    [{}, {"history_length": 16, "takes_largest": True}, {"history_length": 4, "margin": 2}, {"interval": 3}],
    ids=str,
)
def test_fifty_steps_of_delayed_scaling(changes: dict[str, object]) -> None:
    for product, histories, scales in list_histories(50, changes):
        found_scales = [
            compute_scale(amax, product.recipe.format_of(operand), margin=product.recipe.margin).item()
            for operand, amax in enumerate(product.amax)
        ]
        assert found_scales == scales
        ones = product._round_along_columns(GRAD, torch.ones(1, 16))
        assert ones.inverse == 1 / torch.tensor(scales[GRAD]), "which the next step rounds with"
        product.take_amax()
        for found, expected in zip(product.amax_history.tolist(), histories, strict=True):
            assert found == expected + [0.0] * (len(found) - len(expected))


def test_an_overflow_leaves_the_scales_alone() -> None:
    product, weight = FP8Matmul(recipe("delayed", history_length=3, takes_largest=True)), torch.randn(32, 16)
    for x in (torch.ones(4, 16), torch.full((4, 16), torch.inf)):
        product.forward(x, weight)
        end_step([product], SingleRankGroup())
    assert product.amax_history[INPUT].tolist() == [0.0, 1.0, 0.0] and product.amax[INPUT] == 1.0


def test_gradients_are_rounded_once_for_both_products(monkeypatch: pytest.MonkeyPatch) -> None:
    rounded: list[int] = []
    original = FP8Matmul._round_along_columns

    def counted(self: FP8Matmul, operand: int, matrix: Tensor, **options: bool) -> Operand:
        rounded.append(operand)
        return original(self, operand, matrix, **options)

    monkeypatch.setattr(FP8Matmul, "_round_along_columns", counted)
    for name, times in (("tensorwise", 1), ("delayed", 1), ("mxfp8", 2)):
        product, weight, x, grad = FP8Matmul(recipe(name)), torch.randn(32, 64), torch.randn(8, 64), torch.randn(8, 32)
        expected = FP8Matmul(recipe(name)).weight_grad(grad, x, weight, None)
        rounded.clear()
        product.input_grad(grad, weight)
        found = product.weight_grad(grad, x, weight, None)
        assert rounded.count(GRAD) == times and torch.equal(found, expected)  # type: ignore[arg-type]
        # Other gradients in the meantime, in the same memory: what was rounded is no longer theirs.
        product.input_grad(grad, weight)
        grad.mul_(4)
        found = product.weight_grad(grad, x, weight, None)
        torch.testing.assert_close(found, expected * 4, rtol=1e-5, atol=1e-4)  # type: ignore[operator]
        product.input_grad(grad, weight)
        end_step([product], SingleRankGroup())
        assert product._grad is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", EMULATED.kinds)
def test_a_gpu_multiplies_what_emulation_multiplies(name: str) -> None:
    """The same 8-bit values on the device's own kernel: results differ by the order of sums, and are rounded once."""
    gpu = torch.device("cuda", 0)
    ways = choose("linear", Case(name, gpu)).ways
    if not ways:
        pytest.skip("this GPU has no such products")
    generator = torch.Generator().manual_seed(4)
    x, weight, grad = (
        torch.randn(*shape, generator=generator).to("cuda", torch.bfloat16)
        for shape in ((21, 256), (512, 256), (21, 512))
    )
    results = []
    for way in (ways[0], EMULATED):
        product, main_grad = FP8Matmul(recipe(name, hybrid=name != "nvfp4", way=way)), torch.zeros(512, 256, device=gpu)
        y, kept = product.forward_keeping(x, weight)
        dx = product.input_grad(grad, weight)
        product.weight_grad(grad, kept, weight, main_grad)
        results.append((y, dx, main_grad, kept[0].view(torch.uint8)))
    for found, expected, tolerance in zip(*results, (2**-7, 2**-7, 1e-3, 0), strict=True):
        scale = expected.abs().max().item()
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * scale)
