# SPDX-License-Identifier: Apache-2.0
"""Launching of kernels, and the test of whether they run on a tensor's device.

A kernel is a function under `@triton.jit` whose parameters are tensors (pointers in the kernel), numbers, and
constants, annotated `tl.constexpr`; a function beside it takes and returns tensors, allocates, and calls `launch`. All
arithmetic is in float32, whatever the tensors' dtypes are.

Tests put another function in the place of `launch`: to compile what would be launched, or to count it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from megatron.core.device import find_kernel_obstacle, is_cpu

FORMATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that kernels read and write."""

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def by_kernel(
    place: str, *tensors: str, fits: Callable[..., bool] = lambda *_, **__: True
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Decorate a function of tensors: where kernels take its arguments, another one of the same parameters is called.

    place: the module and name of that one, imported when it is first needed. tensors: names of the parameters that
    `uses_kernels` is asked about. fits: called with the arguments, False where the kernel has no such form.
    """

    @functools.cache
    def load() -> Callable[..., Any]:
        module, _, name = place.partition(":")
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return found

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        names = list(inspect.signature(function).parameters)
        places = [names.index(name) for name in tensors]

        @functools.wraps(function)
        def compute(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
            asked: list[Any] = [arguments[place] for place in places]
            takes = uses_kernels(*asked) and fits(*arguments, **options)
            return load()(*arguments, **options) if takes else function(*arguments, **options)

        return compute

    return decorate


def uses_kernels(*tensors: Tensor | None) -> bool:
    """Return whether kernels take these tensors: on a GPU for which Triton compiles, contiguous, in one of
    `FORMATS`."""
    # Asked in every call of every operation: what sends the CPU away comes first. A compiler generates kernels.
    if tensors[0] is not None and is_cpu(tensors[0]):
        return False
    present = [tensor for tensor in tensors if tensor is not None]
    if is_cpu(present[0]) or torch.compiler.is_compiling():
        return False
    fit = all(tensor.dtype in FORMATS and tensor.is_contiguous() for tensor in present)
    return fit and kernels_work(present[0].device)


def kernels_work(device: torch.device) -> bool:
    """Return whether Triton's kernels run on the device; asked once, then remembered."""
    return find_obstacle(device) is None


@functools.cache
def find_obstacle(device: torch.device) -> str | None:
    """Return why Triton's kernels do not run on the device, in words for the log; None where they do."""
    obstacle = find_kernel_obstacle(device)
    if obstacle is not None:
        return obstacle
    try:
        from megatron.core.kernels.probe import add_one

        # Triton builds its launcher with the system's C compiler, and only a launch shows whether there is one.
        launch(add_one, (1,), torch.zeros(1, device=device))
    except Exception as error:
        return f"Triton fails here ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
    return None


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int = 4, cooperative: bool = False, **constants: Any
) -> None:
    """Start a kernel, as many programs as the grid has points; none for an empty grid.

    arguments: tensors, None for a tensor that is left out, and numbers, in the kernel's order. cooperative: programs
    wait for each other, so that all must run at once. constants: its `constexpr` parameters by name.
    """
    if 0 not in grid:
        where = next(argument.device for argument in arguments if isinstance(argument, Tensor))
        # Triton's interpreter knows no such option.
        options = {"launch_cooperative_grid": True} if cooperative and not is_cpu(where) else {}
        # Triton launches on the current device, which need not be the tensors' device where a process has several.
        with _make_current(where):
            kernel[grid](*arguments, num_warps=num_warps, **options, **constants)


def _make_current(device: torch.device) -> AbstractContextManager[Any]:
    """In which a GPU is the current one; nothing where it is already, and for the CPU of Triton's interpreter."""
    if device.index is None:
        return nullcontext()
    module = torch.get_device_module(device)
    return nullcontext() if module.current_device() == device.index else module.device(device)  # type: ignore[no-any-return]


def choose_block(elements: int, largest: int) -> int:
    """Elements that a program works on at a time: a power of two, enough for `elements` or `largest`."""
    return max(16, min(largest, 1 << (elements - 1).bit_length()))
