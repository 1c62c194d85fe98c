# SPDX-License-Identifier: Apache-2.0
"""Each kernel against its plain reference in float64: values and gradients, odd sizes, three number formats.

A comparison is a function of the device that raises AssertionError. Under TRITON_INTERPRET=1 Triton runs kernels on the
CPU, one program after the other in numpy (`python -m tests.kernels`); on a GPU the same comparisons run what users run.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron.core.activations import (
    Activation,
    activation_reference,
    bias_activation,
    bias_gated_activation,
    find_activation,
    gated_activation_reference,
)
from megatron.core.fp8 import compute_scale, find_amax, quantise_tensor
from megatron.core.kernels import fp8_cast, fp8_weight_grad
from megatron.core.mesh import RankGrid
from megatron.core.process_groups_config import Group, ProcessGroupCollection
from megatron.core.tensor_parallel import cross_entropy
from megatron.core.tensor_parallel.cross_entropy import (
    fused_vocab_parallel_cross_entropy,
    vocab_parallel_cross_entropy,
)
from megatron.core.tensor_parallel.products import multiply_wide
from megatron.core.transformer.moe.grouped_products import GroupedMatmul
from megatron.core.transformer.moe.permutation import (
    pad_slots,
    permute,
    permute_reference,
    sort_slots,
    unpermute,
    unpermute_reference,
)
from megatron.core.transformer.rotary import (
    Rotation,
    apply_rotary,
    join_latent_heads,
    rotate_and_join_latent_heads,
    rotate_heads,
    split_and_rotate,
    split_qkv,
)
from tests.kernels.harness import (
    TOLERANCES,
    assert_backward_is_refused,
    assert_close,
    assert_overwriting_is_told,
    compared,
    kernels_chosen,
    randn,
    run,
)

# ---- activations

_PLAIN = [find_activation(name) for name in ("gelu", "gelu_tanh", "silu", "quick_gelu", "squared_relu")]
_GATED = [
    *_PLAIN,
    dataclasses.replace(_PLAIN[3], clamp_value=0.7, linear_offset=1.0),
    dataclasses.replace(_PLAIN[2], interleave_size=12),
]


def _compare_activation(
    activation: Activation,
    gated: bool,
    rows: int,
    width: int,
    extras: tuple[bool, bool],
    dtype: torch.dtype,
    device: str,
) -> None:
    """extras: whether there are a bias, and a weight for each row."""
    x = randn(rows, 2 * width if gated else width, dtype=dtype, device=device)
    bias = randn(x.shape[1], dtype=dtype, device=device) if extras[0] else None
    weights = randn(rows, 1, dtype=torch.float32, device=device) if extras[1] else None
    fused, plain = (
        (bias_gated_activation, gated_activation_reference) if gated else (bias_activation, activation_reference)
    )

    def reference(x: Tensor, bias: Tensor | None, weights: Tensor | None) -> Tensor:
        y = plain(x, bias, activation)
        return y if weights is None else y * weights

    expected = run(reference, [t if t is None else t.double() for t in (x, bias, weights)])
    with kernels_chosen() as launched:
        found = run(lambda x, bias, weights: fused(x, bias, activation, weights), [x, bias, weights], with_gaps=True)
    assert len(launched) == 2 and found[0].dtype == dtype
    # A bias's gradient adds the rounded gradients of all rows.
    assert_close(found, expected, TOLERANCES[dtype] * (2 if extras[0] else 1))


@compared
def activations(device: str) -> None:
    for activation in _PLAIN:
        _compare_activation(activation, False, 5, 72, (True, True), torch.float32, device)
    for activation in _GATED:
        _compare_activation(activation, True, 5, 72, (True, True), torch.float32, device)


@compared
def activations_of_odd_sizes(device: str) -> None:
    for dtype in TOLERANCES:
        for rows, width in ((1, 72), (3, 1030), (2, 1)):
            _compare_activation(_PLAIN[2], True, rows, width, (False, True), dtype, device)
            _compare_activation(_PLAIN[0], False, rows, width, (False, False), dtype, device)


@compared
def activations_without_rows(device: str) -> None:
    """An expert that no token chose."""
    _compare_activation(_PLAIN[2], True, 0, 72, (False, True), torch.bfloat16, device)


@compared
def activations_of_nan(device: str) -> None:
    """They stay NaN: a bound that made numbers of them would hide that a run has diverged."""
    x = torch.full((2, 32), torch.nan, device=device)
    with kernels_chosen():
        for activation in _PLAIN:
            assert bias_activation(x.clone(), None, activation).isnan().all(), activation.name
            for clamp in (None, 0.7):
                gated = dataclasses.replace(activation, clamp_value=clamp)
                assert bias_gated_activation(x.clone(), None, gated).isnan().all(), gated
        halves = [x.clone().index_fill_(1, torch.arange(16, device=device) + first, 1.0) for first in (0, 16)]
        for half in halves:  # gate or up alone
            assert bias_gated_activation(half, None, _GATED[-2]).isnan().all()


@compared
def activations_run_backward_once(device: str) -> None:
    x = randn(3, 32, dtype=torch.float32, device=device).requires_grad_()
    with kernels_chosen():
        y = bias_gated_activation(x * 1.0, None, _PLAIN[2]).sum()
        y.backward(retain_graph=True)
        assert_backward_is_refused(y)


# ---- cross entropy


def _compare_loss(
    shape: tuple[int, int], vocabulary: int, smoothing: float, dtype: torch.dtype, device: str, scale: float = 4.0,
    slope: float = 0.0,
) -> None:  # fmt: skip
    group = ProcessGroupCollection.single().tp
    logits = randn(*shape, vocabulary, dtype=dtype, device=device, scale=scale)
    logits += torch.linspace(0.0, slope, vocabulary, device=device)
    target = torch.arange(shape[0] * shape[1], device=device).mul_(7).remainder_(vocabulary).view(shape)
    expected = run(lambda x: vocab_parallel_cross_entropy(x, target, smoothing, group), [logits.double()])
    with kernels_chosen() as launched:
        found = run(lambda x: vocab_parallel_cross_entropy(x, target, smoothing, group), [logits], with_gaps=True)
    assert len(launched) == 2 and found[0].dtype == torch.float32 and found[1].dtype == dtype
    assert_close(found[:1], expected[:1], 2e-5)
    assert_close(found[1:], expected[1:], TOLERANCES[dtype])


@compared
def losses(device: str) -> None:
    for dtype in TOLERANCES:
        _compare_loss((3, 2), 1009, 0.0, dtype, device)
        _compare_loss((1, 1), 72, 0.1, dtype, device)
    _compare_loss((2, 2), 4096 + 72, 0.1, torch.float32, device)
    # The largest behind the first block, and not so much larger that the others vanish.
    _compare_loss((1, 1), 2 * 4096 + 72, 0.0, torch.float32, device, slope=3.0)
    _compare_loss((2, 1), 1, 0.0, torch.float32, device)


@compared
def losses_of_extreme_logits(device: str) -> None:
    """Beyond what exp can hold, a masked stretch longer than a block, and a logit that is not a number."""
    _compare_loss((2, 2), 300, 0.0, torch.float32, device, scale=1e4)
    group = ProcessGroupCollection.single().tp
    logits = randn(2, 1, 8192 + 5, dtype=torch.float32, device=device)
    logits[0, 0, :5000] = float("-inf")
    logits[1, 0, 3] = float("nan")
    target = torch.full((2, 1), 8000, device=device)
    with kernels_chosen():
        loss = fused_vocab_parallel_cross_entropy(logits.clone(), target, tp_group=group)
    expected = torch.nn.functional.cross_entropy(logits[0, 0].double(), target[0, 0])
    torch.testing.assert_close(loss[0, 0].double(), expected)
    assert loss[1, 0].isnan()


class _Unknown(Exception):
    """The result of an all-reduce to which other ranks have yet to contribute."""


def on_all_ranks(function: Callable[[Group], list[Tensor]], module: Any, ranks: int = 2) -> list[list[Tensor]]:
    """What the function returns on each rank of a group; they run in turn, again for each all-reduce of `module`."""
    known: list[Tensor] = []
    while True:
        results, contributed = [], []
        for rank in range(ranks):
            groups = ProcessGroupCollection.pretend(RankGrid(ranks, tp=ranks), rank)
            with mock.patch.object(module, "all_reduce", _Answers(known)):
                try:
                    results.append(function(groups.tp))
                except _Unknown as asked:
                    contributed.append(asked.args)
        if len(results) == ranks:
            return results
        joined = torch.stack([tensor for tensor, _ in contributed])
        known.append(joined.amax(0) if contributed[0][1] == "max" else joined.sum(0))


class _Answers:
    """An all-reduce that gives known results in their order, and then says what is contributed to the next."""

    def __init__(self, known: list[Tensor]) -> None:
        self.known = iter(known)

    def __call__(self, tensor: Tensor, group: Group, op: str = "sum") -> None:
        found = next(self.known, None)
        if found is None:
            raise _Unknown(tensor.clone(), op)
        tensor.copy_(found)


@compared
def losses_of_a_divided_vocabulary(device: str) -> None:
    """The last label stands for no token: its loss is weighted with zero by who asks for it."""
    logits = randn(6, 1, 2 * 504, dtype=torch.float32, device=device, scale=4.0)
    target = torch.tensor([3, 503, 504, 1000, 700, -100], device=device).view(6, 1)
    single = ProcessGroupCollection.single().tp
    for smoothing in (0.0, 0.1):
        expected = run(lambda x, s=smoothing: vocab_parallel_cross_entropy(x, target, s, single), [logits.double()])

        def own(group: Group, smoothing: float = smoothing) -> list[Tensor]:
            part = logits.chunk(2, dim=-1)[group.rank()].contiguous()
            return run(lambda x: vocab_parallel_cross_entropy(x, target, smoothing, group), [part])

        with kernels_chosen():
            found = on_all_ranks(own, cross_entropy)
        for rank, part in enumerate(found):
            assert_close(part, [expected[0], expected[1].chunk(2, dim=-1)[rank]], 2e-5)


# ---- rotary positions


def _compare_rotation(
    heads: int, width: int, rotated: int, interleaved: bool, dtype: torch.dtype, device: str, positions: int = 5
) -> None:
    """heads: of queries in each group."""
    angles = torch.outer(torch.arange(float(positions)), torch.linspace(0.1, 1.0, rotated // 2)).to(device)
    packed = randn(positions, 2, 3, heads + 2, width, dtype=dtype, device=device)

    def reference(x: Tensor) -> tuple[Tensor, ...]:
        rotation = Rotation(angles.double().cos(), angles.double().sin(), interleaved)
        query, key, value = split_qkv(x, heads)
        return apply_rotary(query, rotation), apply_rotary(key, rotation), value

    def fused(x: Tensor) -> tuple[Tensor, ...]:
        parts = split_and_rotate(x, heads, Rotation(angles.cos(), angles.sin(), interleaved))
        # As of attention: gradients come in other orders of dimensions.
        for part, order in zip(parts, ((1, 0), (2, 0), (3, 1)), strict=True):
            part.register_hook(lambda grad, order=order: grad.transpose(*order).contiguous().transpose(*order))
        return parts

    expected = run(reference, [packed.double()])
    with kernels_chosen() as launched:
        found = run(fused, [packed])
    assert len(launched) == 2 and found[0].dtype == dtype
    assert_close(found, expected, TOLERANCES[dtype])


@compared
def rotary_positions(device: str) -> None:
    for interleaved in (False, True):
        for heads, width, rotated in ((1, 16, 16), (3, 24, 12), (6, 72, 72), (2, 40, 40)):
            _compare_rotation(heads, width, rotated, interleaved, torch.float32, device)
    _compare_rotation(4, 128, 128, False, torch.bfloat16, device)
    _compare_rotation(1, 8, 4, True, torch.float16, device, positions=1)


@compared
def rotary_positions_of_heads(device: str) -> None:
    """Queries and keys that a norm has made."""
    angles = torch.outer(torch.arange(5.0), torch.linspace(0.1, 1.0, 6)).to(device)
    for interleaved, width in ((False, 12), (True, 12), (False, 24), (True, 20)):
        x = randn(5, 2, 3, width, dtype=torch.float32, device=device)
        exact = Rotation(angles.double().cos(), angles.double().sin(), interleaved)
        expected = run(lambda x, r=exact: apply_rotary(x, r), [x.double()])
        rounded = Rotation(angles.cos(), angles.sin(), interleaved)
        with kernels_chosen() as launched:
            found = run(lambda x, r=rounded: rotate_heads(x, r), [x], with_gaps=True)
        assert len(launched) == 2
        assert_close(found, expected, 2e-6)


@compared
def latent_heads(device: str) -> None:
    """Key channels that all heads share lie between others; gradients come in other orders of dimensions."""
    sizes = ((3, 24, 8, 16, torch.float32), (5, 8, 12, 40, torch.float32), (2, 1030, 16, 16, torch.float32),
             (1, 16, 16, 16, torch.bfloat16))  # fmt: skip
    for interleaved, (heads, plain, shared, width, dtype) in itertools.product((False, True), sizes):
        angles = torch.outer(torch.arange(4.0), torch.linspace(0.1, 1.0, shared // 2)).to(device)
        query = randn(4, 2, heads, plain + shared, dtype=dtype, device=device)
        expanded = randn(4, 2, heads, plain + width, dtype=dtype, device=device)
        packed = randn(4, 2, 1, 5 + shared, dtype=dtype, device=device)
        exact = Rotation(angles.double().cos(), angles.double().sin(), interleaved)
        rounded = Rotation(angles.cos(), angles.sin(), interleaved)

        def fused(q: Tensor, x: Tensor, p: Tensor, rotation: Rotation = rounded) -> tuple[Tensor, ...]:
            parts = rotate_and_join_latent_heads(q, x, p[..., 5:], rotation)
            for part, order in zip(parts, ((1, 0), (2, 0), (3, 1)), strict=True):
                part.register_hook(lambda grad, order=order: grad.transpose(*order).contiguous().transpose(*order))
            return parts

        inputs = [query, expanded, packed]
        expected = run(lambda q, x, p, r=exact: join_latent_heads(q, x, p[..., 5:], r), [t.double() for t in inputs])
        with kernels_chosen() as launched:
            found = run(fused, [*inputs])
        assert len(launched) == 2 and found[1].dtype == dtype
        assert_close(found, expected, TOLERANCES[dtype])


@compared
def rotations_tell_what_they_overwrite(device: str) -> None:
    angles = torch.zeros(4, 4, device=device)
    rotation = Rotation(angles.cos(), angles.sin(), False)
    packed, query, expanded, positions = (
        randn(4, 2, heads, *width, dtype=torch.float32, device=device)
        for heads, width in ((2, (3, 8)), (2, (16,)), (2, (24,)), (1, (8,)))
    )
    assert_overwriting_is_told(lambda x: split_and_rotate(x, 1, rotation), packed)
    assert_overwriting_is_told(lambda x: rotate_and_join_latent_heads(x, expanded, positions, rotation), query)


# ---- experts


@compared
def sums_of_experts_rows(device: str) -> None:
    """Some tokens have lost a slot, one expert has none, and rows without a slot stand between."""
    experts = torch.tensor([[0, 3], [3, 4], [1, 0], [4, 4], [3, 1]], device=device).flatten()  # 4: goes nowhere
    kept = 7
    found = sort_slots(experts, 4, kept)
    padded = pad_slots(found, len(experts), multiple=4)
    for order, is_padded in ((found.order, False), (padded.order, True)):
        for dtype, width in ((torch.float32, 72), (torch.bfloat16, 1032)):
            rows = randn(len(order), width, dtype=dtype, device=device)
            expected = run(lambda x, o=order, p=is_padded: unpermute_reference(x, o, 5, 2, p), [rows.double()])
            with kernels_chosen() as launched:
                result = run(lambda x, o=order, p=is_padded: unpermute(x, o, 5, 2, p), [rows])
            assert len(launched) == 3
            assert_close(result, expected, TOLERANCES[dtype])
    whole = sort_slots(experts, 5).order
    x = randn(5, 72, dtype=torch.float32, device=device)
    expected = run(lambda x: permute_reference(x, whole, 2), [x.double()])
    with kernels_chosen():
        assert_close(run(lambda x: permute(x, whole, 2), [x]), expected, 2e-6)
        nothing = run(lambda x: permute(x, whole[:0], 2), [x])
    assert nothing[0].shape == (0, 72) and not nothing[1].any()


@compared
def wide_products(device: str) -> None:
    """A router's logits: in float32 of bfloat16 numbers; no kernel of ours."""
    x, weight = (randn(*shape, dtype=torch.bfloat16, device=device) for shape in ((24, 72), (8, 72)))
    expected = run(lambda x, w: x @ w.t(), [x.double(), weight.double()])
    found = run(multiply_wide, [x, weight])
    assert found[0].dtype == torch.float32
    assert_close(found[:1], expected[:1], 2e-6)
    # One rounding of the result: half of a bfloat16 number's last digit.
    assert_close(found[1:], expected[1:], 2**-8)


@compared
def weight_gradients_of_experts(device: str) -> None:
    """The second expert has no rows; rows behind the last belong to none. The interpreter cannot multiply bfloat16."""
    ends = torch.tensor([5, 5, 140, 147], dtype=torch.int32, device=device)
    for dtype in (torch.float16, *([torch.bfloat16] if device != "cpu" else [])):
        for outputs, inputs in ((72, 40), (264, 16)):
            grad = randn(150, outputs, dtype=dtype, device=device)
            x = randn(150, inputs, dtype=dtype, device=device)
            found = randn(4, outputs, inputs, dtype=torch.float32, device=device)
            starts = [0, *ends.tolist()]
            expected = found.double()
            for expert, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)):
                expected[expert] += grad[start:stop].double().t() @ x[start:stop].double()
            unchanged = found[1].clone()
            with kernels_chosen() as launched:
                assert GroupedMatmul().weight_grad(grad, x, found, found, ends) is None
            assert len(launched) == 1
            assert_close([found], [expected], 1e-5)
            assert torch.equal(found[1], unchanged)


# ---- 8 bits


@compared
def weight_gradient_in_8_bits(device: str) -> None:
    """Added where it lies, of rows that lie apart, with sides that tiles do not divide."""
    for tokens in (300, 128):
        left = torch.randn(40, tokens, device=device).to(torch.float8_e5m2)
        right = torch.randn(136, tokens + 16, device=device).to(torch.float8_e4m3fn)[:, :tokens]
        into, scales = torch.ones(40, 136, device=device), (torch.tensor(0.5), torch.tensor(0.25))
        inverse = scales[0].to(device), scales[1].to(device)
        fp8_weight_grad.add_product(left, right, inverse, into)
        expected = 1 + 0.125 * (left.double() @ right.double().t())
        torch.testing.assert_close(into.double(), expected, rtol=1e-6, atol=1e-4)


@compared
def eight_bits_of_a_matrix(device: str) -> None:
    """Bit for bit: values, transposed values, and the factor; infinities, zeros and what is hardly a number.

    Triton's interpreter loses the carry where it rounds to 8 bits, and NaN in e4m3; so there, matrices have values that
    need no rounding. test_kernels.py finds the instruction that rounds on a GPU.
    """
    is_interpreted = device == "cpu"
    for (rows, columns), kind in itertools.product(
        ((1, 1), (5, 300), (130, 65), (64, 128)), (torch.float8_e4m3fn, torch.float8_e5m2)
    ):
        x = randn(rows, columns, dtype=torch.float32, device=device)
        if is_interpreted:  # of 8 and more, so that a margin leaves them exact, and with the greatest value among them
            largest = torch.finfo(kind).max
            # Not every release of torch bounds what it rounds to 8 bits.
            x = (x * 100).clamp(-largest, largest).to(kind).float()
            x = torch.where(x.abs() < 8, 8.0, x)
            x[0, 0] = largest
        infinite, undefined = x.clone(), x.clone()
        infinite[0, 0], infinite[-1, -1] = torch.inf, -torch.inf
        undefined[-1, 0] = torch.nan
        cases = [x, x.bfloat16(), x * 2.0**-20, torch.zeros_like(x), infinite]
        if not is_interpreted:
            cases += [x.half(), x * 1e-42, undefined]
        states, zeros = fp8_cast.LaunchStates(), torch.zeros((), device=device)
        for matrix, (margin, is_known) in itertools.product(cases, ((0, False), (3, False), (0, True), (3, True))):
            amax = find_amax(matrix)
            noted = torch.full((), 1, dtype=torch.int32, device=device)
            # What is not known of earlier steps is 0; what is, is multiplied by the number of replicas.
            known = {"earlier": amax / 4 if is_known else zeros, "factor": 4.0, "noted": noted}
            found, turned, inverse = fp8_cast.quantise_matrix(
                matrix, kind, states.take(matrix.device), **known, margin=margin, turns=True
            )
            largest = noted.view(torch.float32)
            torch.testing.assert_close(largest, amax.clamp_min(2.0**-149), rtol=0, atol=0, equal_nan=True)
            expected = quantise_tensor(matrix, kind, compute_scale(amax, kind, margin=margin))
            assert turned is not None and torch.equal(inverse, expected.inverse)
            again = fp8_cast.turn(found)
            for values, other in ((found, expected.values), (turned, expected.values.t()), (again, turned)):
                assert values.is_contiguous() and values.dtype == kind
                torch.testing.assert_close(values.float(), other.float(), rtol=0, atol=0, equal_nan=True)
