# SPDX-License-Identifier: Apache-2.0
"""Each kernel against its plain reference in float64: values and gradients, odd sizes, three number formats.

A comparison is a function of the device that raises AssertionError. Under TRITON_INTERPRET=1 Triton runs kernels on the
CPU, one program after the other in numpy (`python -m tests.kernels`); on a GPU the same comparisons run what users run.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
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
from megatron.core.kernels import launching

COMPARISONS: dict[str, Callable[[str], None]] = {}
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""A rounding or two of the result; everything before it is in float32."""


def compared(check: Callable[[str], None]) -> Callable[[str], None]:
    """Enter a comparison under its name."""
    COMPARISONS[check.__name__] = check
    return check


@contextlib.contextmanager
def kernels_chosen() -> Iterator[list[Any]]:
    """Operations take their kernels on whatever device; yields the kernels that are launched."""
    launched: list[Any] = []
    launch = launching.launch

    def note(kernel: Any, *arguments: Any, **constants: Any) -> None:
        launched.append(kernel)
        launch(kernel, *arguments, **constants)

    with mock.patch.object(launching, "launch", note), mock.patch.object(launching, "uses_kernels", lambda *_: True):
        yield launched


def run(function: Callable[..., Any], inputs: list[Tensor | None], weights: Tensor | None = None) -> list[Tensor]:
    """The function's outputs and the gradients of a weighted sum of them; inputs may be overwritten."""
    leaves = [x if x is None else x.clone().requires_grad_() for x in inputs]
    result = function(*(x if x is None else x * 1.0 for x in leaves))  # not leaves: fusions work in place
    outputs = result if isinstance(result, tuple) else (result,)
    loss = sum(
        (y.double() * torch.linspace(-1, 1, y.numel(), dtype=torch.float64, device=y.device).view(y.shape)).sum()
        for y in outputs
    )
    wanted = [x for x in leaves if x is not None]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(loss, wanted)]  # type: ignore[arg-type]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Each within `tolerance` of its expected value, or of the largest one where it is small beside it."""
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape
        scale = y.double().abs().max().item() if y.numel() else 0.0
        torch.testing.assert_close(x.double(), y.double(), rtol=tolerance, atol=tolerance * max(scale, 1e-30))


def randn(*shape: int, dtype: torch.dtype, device: str, scale: float = 1.0) -> Tensor:
    """The same numbers on every device."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return (scale * torch.randn(*shape, generator=generator)).to(device=device, dtype=dtype)


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
        found = run(lambda x, bias, weights: fused(x, bias, activation, weights), [x, bias, weights])
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
def activations_run_backward_once(device: str) -> None:
    x = randn(3, 32, dtype=torch.float32, device=device).requires_grad_()
    with kernels_chosen():
        y = bias_gated_activation(x * 1.0, None, _PLAIN[2]).sum()
        y.backward(retain_graph=True)
        try:
            y.backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
        else:
            raise AssertionError("backward ran twice through an input that the first run had overwritten")
