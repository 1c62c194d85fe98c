# SPDX-License-Identifier: Apache-2.0
"""NVFP4: values, ties and scales equal their definitions in float64 bit for bit, rounding at random has the right mean,
the transform cancels in products, and products are those of the rounded operands."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.core import fp4
from megatron.core.errors import ConfigError
from megatron.core.fp4 import quantise_nvfp4, round_to_e2m1, transform
from megatron.core.fp8 import quantise_blocks
from megatron.core.tensor_parallel.fp8_products import FP8Matmul, FP8Recipe
from megatron.core.transformer.moe.grouped_products import FP8Experts
from tests.support.gpt_models import build_model, read_config
from tests.unit.tensor_parallel.test_fp8_layers import WIDE, list_fp8, losses_and_grads, saved_bytes

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
RECIPE = FP8Recipe(name="nvfp4")


def test_all_sixteen_values_stay_and_ties_go_to_even() -> None:
    values = torch.tensor([*VALUES, *(-value for value in VALUES)])
    assert torch.equal(round_to_e2m1(values), values) and torch.equal(round_to_e2m1(values).signbit(), values.signbit())
    low, high = torch.tensor(VALUES[:-1]), torch.tensor(VALUES[1:])
    middle = (low + high) / 2
    # Codes count the values from 0: the last bit of a code is that of its mantissa.
    expected = torch.where(torch.arange(7) % 2 == 0, low, high)
    infinity = torch.full_like(middle, torch.inf)
    for sign in (1, -1):
        assert torch.equal(round_to_e2m1(sign * middle), sign * expected)
        assert torch.equal(round_to_e2m1(sign * torch.nextafter(middle, infinity)), sign * high)
        assert torch.equal(round_to_e2m1(sign * torch.nextafter(middle, -infinity)), sign * low)
    beyond = torch.tensor([6.5, 7.0, 1e30, torch.inf, -torch.inf])
    assert round_to_e2m1(beyond).tolist() == [6.0, 6.0, 6.0, 6.0, -6.0]
    assert round_to_e2m1(torch.tensor([torch.nan])).isnan().all()


def nearest_e4m3(x: float) -> float:
    """By its definition, in float64: 3 bits of mantissa, exponents from -6, ties to even, up to 448."""
    if x == 0:
        return 0.0
    unit = 2.0 ** (max(np.floor(np.log2(x)), -6) - 3)
    return float(min(np.round(x / unit) * unit, 448.0))


def definition(x: Tensor, block: tuple[int, int]) -> np.ndarray:
    """A matrix as NVFP4 rounds it to nearest values. Appendix C of the paper, in float64 between what is stored."""
    matrix, result = x.double().numpy(), np.zeros(x.shape)
    largest = np.finfo(np.float32).max
    factor = float(np.float32(1) / min(np.float32(6 * 448) / np.float32(abs(matrix).max()), largest))
    table = np.array(VALUES)
    for row in range(0, x.shape[0], block[0]):
        for column in range(0, x.shape[1], block[1]):
            place = np.s_[row : row + block[0], column : column + block[1]]
            part = matrix[place]
            scale = nearest_e4m3(float(np.float32(np.float32(abs(part).max()) / np.float32(6)) / np.float32(factor)))
            if scale == 0:
                continue
            encode = min(np.float32(1) / np.float32(scale * factor), largest)
            scaled = (abs(part).astype(np.float32) * encode).astype(np.float64)
            distance = abs(table - np.minimum(scaled, 6.0)[..., None])
            # Of two values at the same distance that with the even code.
            code = (distance + 1e-12 * (np.arange(8) % 2)).argmin(-1)
            result[place] = np.copysign(table[code], part) * scale
    return result * factor


@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
@pytest.mark.parametrize("spread", [0, 30])
def test_scales_are_those_of_the_definition(block: tuple[int, int], spread: int) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(32, 48, generator=generator) * 2.0 ** torch.randint(-spread, 1, (32, 1), generator=generator)
    x[3], x[:16, :16] = 0, 0
    found = quantise_nvfp4(x.bfloat16(), block)
    expected = torch.from_numpy(definition(x.bfloat16(), block))
    assert torch.equal(found.dequantise(), expected.float())
    assert found.inverse.amax() == 448 and found.values.float().abs().max() == 6
    assert torch.equal(found.transposed.dequantise(), found.dequantise().t())
    stack = quantise_nvfp4(torch.stack((x, x)), block)
    assert torch.equal(stack.select_matrix(1).dequantise(), quantise_nvfp4(x, block).dequantise())
    # Blocks that are not full.
    assert torch.equal(quantise_nvfp4(x[:, :40], (1, 16)).inverse[:, :2], quantise_nvfp4(x, (1, 16)).inverse[:, :2])


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("amax", [1e-30, 1e-33, 1e-36, 3e-38, 1e-38, 1e-40, 1e-45])
def test_tiny_values_stay_near_and_zeros_beside_them_stay_zeros(amax: float) -> None:
    x = torch.zeros(4, 32)
    x[0, 0], x[1, 20], x[2, :], x[3, 0] = amax, -amax / 3, amax, amax / 400
    found = quantise_nvfp4(x, (1, 16)).dequantise()
    assert torch.equal(found, torch.from_numpy(definition(x, (1, 16))).float())
    assert not found[x == 0].any()
    # Below that float32 itself has fewer bits.
    assert amax < 2.0**-125 or (found - x).abs()[:3].max() <= amax / 5


def test_what_is_no_number_stays_so_and_infinities_are_cut_off() -> None:
    x = torch.ones(2, 32)
    x[0, 3] = torch.nan
    found = quantise_nvfp4(x, (1, 16)).dequantise()
    assert found[0, :16].isnan().any() and found[0, 16:].isfinite().all()
    kept = fp4.unpack(fp4.pack(quantise_nvfp4(x, (1, 16))), (1, 16)).dequantise()
    assert kept[0, :16].isnan().any() and torch.equal(kept[:, 16:], found[:, 16:])
    x[0, 3] = torch.inf
    assert quantise_nvfp4(x, (1, 16)).dequantise().isfinite().all()
    assert not quantise_nvfp4(torch.zeros(3, 16), (1, 16)).dequantise().any()
    assert quantise_nvfp4(torch.zeros(0, 16), (1, 16)).dequantise().shape == (0, 16)


def test_rounding_at_random_has_the_right_mean() -> None:
    x = torch.rand(64, 256, generator=torch.Generator().manual_seed(1))
    amax = x.max()
    mean = torch.zeros_like(x, dtype=torch.float64)
    nearest = quantise_nvfp4(x, (1, 16)).dequantise()
    scales = quantise_nvfp4(x, (1, 16)).inverse.repeat_interleave(16, 1) * (amax / 6 / 448)
    rounds = 400
    for number in range(rounds):
        fractions = fp4._draw_fractions(x, torch.tensor(float(number)))
        assert fractions.min() >= 0 and fractions.max() < 1
        mean += round_to_e2m1(x / scales, fractions).double() / rounds
    error = (mean - (x / scales).clamp(max=6).double()).abs()
    # A step is at most 2; of 400 draws the mean deviates by 2 * 0.5 / 20, five times that is never seen.
    assert error.max() < 0.25 and (mean * scales - x).mean().abs() < 1e-3
    once, again = (quantise_nvfp4(x, (1, 16), at_random=True).dequantise() for _ in range(2))
    assert torch.equal(once, again) and not torch.equal(once, nearest), "a step that is repeated is the same step"
    of_steps = [fp4._draw_fractions(x, torch.tensor(amax)) for amax in (1.0, 1.0000001)]
    assert (of_steps[0] - of_steps[1]).abs().mean() > 0.3, "another step has other numbers"


def test_a_matrix_is_rounded_the_same_however_it_lies_in_memory() -> None:
    x = torch.randn(37, 48, generator=torch.Generator().manual_seed(6)).bfloat16()
    pairs: list[tuple[Tensor, Tensor]] = [(transform(x.t()), transform(x.t().contiguous()))]
    for matrix in (x.t(), torch.stack((x, -x)).transpose(-2, -1)):
        lying = matrix, matrix.contiguous()
        for at_random in (False, True):
            found = [quantise_nvfp4(one, (1, 16), at_random=at_random).dequantise() for one in lying]
            pairs.append((found[0], found[1]))
        for block, mx in (((1, 32), True), ((1, 128), False), ((128, 128), False)):
            found = [quantise_blocks(one, torch.float8_e4m3fn, block, mx=mx).dequantise() for one in lying]
            pairs.append((found[0], found[1]))
    assert all(torch.equal(*pair) for pair in pairs)


def test_the_transform_is_orthogonal_and_the_same_everywhere() -> None:
    identity = transform(torch.eye(16))
    assert torch.equal(identity.abs(), torch.full((16, 16), 0.25)), "of a Hadamard matrix, scaled"
    assert torch.equal(identity @ identity.t(), torch.eye(16))
    assert len(identity[:, 0].unique()) == 2, "with random signs"
    whole = torch.randint(-8, 9, (3, 40)).float()
    found = transform(whole)
    assert found.shape == (3, 48)
    assert torch.equal(found[:, :16], whole[:, :16] @ identity)
    assert torch.equal(found @ found.t(), whole @ whole.t()), "the fill cancels"


def test_values_wait_in_half_a_byte() -> None:
    x = torch.randn(48, 64)
    operand = quantise_nvfp4(x, (16, 1))
    kept = fp4.pack(operand)
    assert [(t.dtype, t.shape) for t in kept] == [
        (torch.uint8, (48, 32)), (torch.float8_e4m3fn, (3, 64)), (torch.float32, ()),
    ]  # fmt: skip
    assert torch.equal(fp4.unpack(kept, (16, 1)).dequantise(), operand.dequantise())


# ---- products


def rounded(x: Tensor, *, weight: bool = False, at_random: bool = False) -> Tensor:
    return quantise_nvfp4(x, (16 if weight else 1, 16), at_random=at_random).dequantise()


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return rounded(transform(grad.t()), at_random=True) @ rounded(transform(x.t())).t()


def test_three_products() -> None:
    x, weight, grad = torch.randn(3, 7, 64), torch.randn(48, 64), torch.randn(21, 48)
    product, rows, close = FP8Matmul(RECIPE), x.flatten(0, 1), {"rtol": 1e-5, "atol": 1e-4}
    y, kept = product.forward_keeping(x, weight)
    torch.testing.assert_close(y.flatten(0, 1), rounded(rows) @ rounded(weight, weight=True).t(), **close)
    expected = rounded(grad, at_random=True) @ rounded(weight, weight=True)
    torch.testing.assert_close(product.input_grad(grad, weight), expected, **close)
    found = product.weight_grad(grad, x, weight, None)
    torch.testing.assert_close(found, weight_gradient(grad, rows), **close)
    assert found is not None and torch.equal(product.weight_grad(grad, kept, weight, None), found)  # type: ignore[arg-type]
    assert sum(t.untyped_storage().nbytes() for t in kept) == 32 * 64 / 2 + 2 * 64 + 4, "21 tokens, filled up to 32"


def test_experts() -> None:
    ends = torch.tensor([21, 21, 30], dtype=torch.int32)
    x, weight, grad = torch.randn(30, 64), torch.randn(3, 48, 64), torch.randn(30, 48)
    product, close = FP8Experts(RECIPE), {"rtol": 1e-5, "atol": 1e-4}
    y, kept = product.forward_keeping(x, weight, ends=ends)
    dw = product.weight_grad(grad, x, weight, None, ends)
    again = product.weight_grad(grad, kept, weight, None, ends)
    assert dw is not None and again is not None and torch.equal(dw, again) and not dw[1].any()
    matrices = rounded(weight, weight=True)
    for expert, rows in ((0, slice(0, 21)), (2, slice(21, 30))):
        torch.testing.assert_close(y[rows], rounded(x)[rows] @ matrices[expert].t(), **close)
        torch.testing.assert_close(dw[expert], weight_gradient(grad[rows], x[rows]), **close)


# ---- in a model


@pytest.mark.flags("--fp4-format", "--fp4-recipe")
def test_a_model_in_fp4() -> None:
    exact, flags = losses_and_grads(WIDE), f"{WIDE} --fp4-format e2m1 --fp4-recipe nvfp4"
    found = losses_and_grads(flags)
    assert len(list_fp8(flags)) == 8
    assert len(list_fp8(f"{flags} --num-layers 4 --first-last-layers-bf16 --num-layers-at-end-in-bf16 2")) == 4
    torch.testing.assert_close(found[0], exact[0], rtol=0.1, atol=0.0)
    assert not torch.equal(found[0], exact[0])
    again = f"{flags} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert all(map(torch.equal, found, losses_and_grads(again)))
    kept, whole = (
        saved_bytes(build_model(f"{WIDE} --bf16 --fp4-format e2m1 {more}"))[0] for more in ("", "--no-fp8-wgrad")
    )
    bytes_of_one = read_config(flags).model.rounded_input_bytes
    assert bytes_of_one == 0.5625
    assert whole - kept == 32 * (2 * 128 + 512) * 2 * (2 - bytes_of_one) - 2 * 3 * 4


@pytest.mark.flags("--fp4-param-gather")
def test_parameters_are_gathered_as_they_are() -> None:
    config = read_config("--bf16 --fp4-format e2m1 --fp4-param-gather --use-distributed-optimizer")
    assert any("--fp4-param-gather has no effect" in note for note in config.notes)
    with pytest.raises(ConfigError, match="--fp4-param-gather needs --fp4-format"):
        read_config("--fp4-param-gather --use-distributed-optimizer")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--fp8-format hybrid", "--fp8-format hybrid and --fp4-format e2m1 contradict each other"),
        ("--hidden-size 72 --num-attention-heads 4", "--hidden-size 72 is no multiple of 16, as --fp4-recipe nvfp4"),
        ("--fp4-recipe custom", "--fp4-recipe custom is not supported"),
        ("--fp4-param-gather", "--fp4-param-gather needs --use-distributed-optimizer"),
    ],
)
def test_what_does_not_fit_is_one_sentence(flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(f"--fp4-format e2m1 {flags}")
    assert sum(sentence in line for line in str(caught.value).splitlines()) == 1
