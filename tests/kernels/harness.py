# SPDX-License-Identifier: Apache-2.0
"""What comparisons of kernels with their references are made of: how kernels are chosen and watched, how results and
gradients are found and compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron.core.kernels import launching

COMPARISONS: dict[str, Callable[[str], None]] = {}
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""A rounding or two of the result; everything before it is in float32."""
_GUARD, _GUARD_BYTES = 0x5A, 1024
"""A byte that makes large numbers in every format, and how many of them."""


def compared(check: Callable[[str], None]) -> Callable[[str], None]:
    """Enter a comparison under its name."""
    COMPARISONS[check.__name__] = check
    return check


@contextlib.contextmanager
def kernels_chosen() -> Iterator[list[Any]]:
    """Operations take their kernels on whatever device; yields the kernels that are launched."""
    launched: list[Any] = []
    launch = launching.launch

    def note(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        launched.append(kernel)
        with between_guards(arguments) as guarded:
            launch(kernel, grid, *guarded, **constants)

    def fit(*tensors: Tensor | None) -> bool:
        return all(x is None or (x.dtype in launching.FORMATS and x.is_contiguous()) for x in tensors)

    with mock.patch.object(launching, "launch", note), mock.patch.object(launching, "uses_kernels", fit):
        yield launched


@contextlib.contextmanager
def between_guards(arguments: tuple[Any, ...]) -> Iterator[list[Any]]:
    """The arguments with tensors in other memory, whose ends are guarded: what a kernel reads there is far from all
    values, and what it writes there is found."""
    memory: dict[int, tuple[Tensor, Tensor]] = {}
    guarded: list[Any] = []
    for argument in arguments:
        if not isinstance(argument, Tensor):
            guarded.append(argument)
            continue
        # Tensors that share memory must go on sharing it.
        storage = argument.untyped_storage()
        if storage.data_ptr() not in memory:
            own = argument.new_empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
            guard = own.new_full((_GUARD_BYTES,), _GUARD)
            memory[storage.data_ptr()] = own, torch.cat((guard, own, guard))
        size = argument.itemsize
        larger = memory[storage.data_ptr()][1]
        larger = larger[: len(larger) // size * size].view(argument.dtype)
        offset = argument.storage_offset() + _GUARD_BYTES // size
        guarded.append(larger.as_strided(argument.shape, argument.stride(), offset))
    yield guarded
    for own, larger in memory.values():
        before, inside, behind = larger.split((_GUARD_BYTES, len(own), _GUARD_BYTES))
        own.copy_(inside)
        assert (before == _GUARD).all() and (behind == _GUARD).all(), "a kernel wrote outside of a tensor"


def without_kernels() -> contextlib.AbstractContextManager[Any]:
    """Operations take their other form, on a GPU as well."""
    return mock.patch.object(launching, "uses_kernels", lambda *_: False)


def run(function: Callable[..., Any], inputs: list[Tensor | None], *, with_gaps: bool = False) -> list[Tensor]:
    """The function's outputs and the gradients of a weighted sum of them; inputs may be overwritten.

    with_gaps: gradients of the outputs come in memory that is not contiguous.
    """
    leaves = [x if x is None else x.clone().requires_grad_() for x in inputs]
    result = function(*(x if x is None else x * 1.0 for x in leaves))  # not leaves: fusions work in place
    outputs = result if isinstance(result, tuple) else (result,)
    if with_gaps:
        for y in outputs:
            y.register_hook(lambda grad: torch.stack((grad, torch.full_like(grad, torch.nan)), dim=-1)[..., 0])
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


def assert_backward_is_refused(loss: Tensor) -> None:
    """Autograd has heard that a kernel has overwritten what backward would read."""
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        raise AssertionError("backward read what a kernel had overwritten")


def assert_overwriting_is_told(function: Callable[[Tensor], Any], x: Tensor) -> None:
    """Whoever else has kept the function's input for backward is refused it."""
    y = x.clone().requires_grad_() * 1.0
    kept = y.square().sum()
    with kernels_chosen():
        function(y)
    assert_backward_is_refused(kept)


def randn(*shape: int, dtype: torch.dtype, device: str, scale: float = 1.0) -> Tensor:
    """The same numbers on every device."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return (scale * torch.randn(*shape, generator=generator)).to(device=device, dtype=dtype)
