# SPDX-License-Identifier: Apache-2.0
"""One table of the ways in which the operations of a model are computed, and the choice among them.

A row has the words of the log, the code, the kinds of work that it does, and what must not stand in its way: device,
dtype, shapes, packages. The first row of an operation that does the kind and has no obstacle is taken; where several
are left and a measurement says how long they take, the fastest of them. A way that is new is a row here.

| operation   | kinds                                                                                             |
|-------------|---------------------------------------------------------------------------------------------------|
| `linear`    | a recipe of --fp8-recipe or --fp4-recipe; accumulated or autograd, for full precision             |
| `attention` | whole: sequences; two widths: of keys and of values; bands: documents, windows, chunks, and fewer |
|             | queries than keys; bounds: on scores                                                              |
| the others  | fused, compiled, elementary                                                                       |
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.device import find_kernel_obstacle, find_widest_flash_heads, is_cuda
from megatron.core.device_kernels import find_flash_package_obstacle, find_product_obstacle
from megatron.core.kernels import launching


@dataclass(frozen=True)
class Case:
    """The work of one operation in one layer on one process."""

    kind: str
    """Of the table above."""
    device: torch.device
    dtype: torch.dtype = torch.float32
    """Of the operands."""
    widths: tuple[int, ...] = ()
    """Of the last dimensions of operands: channels of a norm; of queries and of values."""
    asked: frozenset[str] = frozenset()
    """Settings that exclude or allow ways: emulation, dropout, deterministic, local, sinks."""


FLASH_DTYPES = frozenset({torch.bfloat16, torch.float16})
"""Dtypes that torch's flash kernel multiplies."""
WIDEST_FLASH = 256
"""Channels of a head that it takes, at most."""

Obstacle = Callable[[Case], str | None]


@dataclass(frozen=True)
class OperationWay:
    """One implementation of an operation."""

    name: str
    """As the log shows it."""
    place: str
    """Module and name of the code."""
    kinds: tuple[str, ...]
    obstacles: tuple[Obstacle, ...] = ()
    """Each returns why the way cannot be taken, in words; None where nothing is in its way."""
    on_trial: bool = False
    """True if it is only taken where a trial has shown that it works here, and how fast."""

    @property
    def is_fused(self) -> bool:
        """True where it is one operation with a hand-written derivative."""
        return self.kinds == ("fused",)

    def find_obstacle(self, case: Case) -> str | None:
        """Return the first obstacle; None where there is none."""
        return next((found for obstacle in self.obstacles if (found := obstacle(case)) is not None), None)

    def load(self) -> Any:
        """Import the code."""
        module, _, name = self.place.partition(":")
        return getattr(importlib.import_module(module), name)


@dataclass(frozen=True)
class Choice:
    """The ways that are left of an operation, and what stands against the others."""

    ways: tuple[OperationWay, ...]
    """In order of preference."""
    passed_over: Mapping[str, str]
    """Name of a way -> its obstacle."""

    seconds: Mapping[str, float] | None = None
    """Name of a way -> measured time of one call."""

    @property
    def way(self) -> OperationWay:
        """The fastest of those that were measured; without measurements the first one that needs no trial. Raises
        StopIteration where none is left."""
        seconds = self.seconds
        if seconds:
            return min((way for way in self.ways if way.name in seconds), key=lambda way: seconds[way.name])
        return next(way for way in self.ways if not way.on_trial)


def choose(operation: str, case: Case, seconds: Mapping[str, float] | None = None) -> Choice:
    """Return the ways of doing what the case says, those that are preferred first. seconds: see Choice."""
    rows = [way for way in OPERATIONS[operation] if case.kind in way.kinds]
    found = {way.name: way.find_obstacle(case) for way in rows}
    passed_over = {name: text for name, text in found.items() if text is not None}
    return Choice(tuple(way for way in rows if found[way.name] is None), passed_over, seconds)


# ---- obstacles


def _needs_capability(lowest: tuple[int, int], *, below: tuple[int, int] | None = None) -> Obstacle:
    return lambda case: find_product_obstacle(case.device, lowest, below)


def _not_asked(word: str, sentence: str) -> Obstacle:
    return lambda case: sentence if word in case.asked else None


def _needs_scaled_mm(case: Case) -> str | None:
    return None if hasattr(torch.nn.functional, "scaled_mm") else "it needs PyTorch 2.10 or later"


def _may_emulate(case: Case) -> str | None:
    is_wanted = not is_cuda(case.device) or "emulation" in case.asked
    return None if is_wanted else "--fp8-emulation is not given"


def _needs_triton(case: Case) -> str | None:
    return None if launching.kernels_work(case.device) else launching.find_obstacle(case.device)


def _needs_channels(most: int) -> Obstacle:
    return lambda case: None if max(case.widths) <= most else f"it takes up to {most} channels, not {max(case.widths)}"


def find_flash_problem(dtype: torch.dtype, *widths: int, widest: int = WIDEST_FLASH) -> str | None:
    """Return why torch's flash kernel cannot take operands of this dtype and these widths; None where it can. widest:
    channels of a head that it takes on the device."""
    if widest == 0:
        return "it needs a GPU of compute capability 8.0"
    if dtype not in FLASH_DTYPES:
        return f"it takes 16-bit numbers, not {str(dtype).removeprefix('torch.')}"
    if max(widths) > widest:
        return f"it takes heads of up to {widest} channels there, not {max(widths)}"
    return None


def _needs_flash(case: Case) -> str | None:
    return find_flash_problem(case.dtype, *case.widths, widest=find_widest_flash_heads(case.device))


def _needs_package(version: int) -> Obstacle:
    return lambda case: find_flash_package_obstacle(version)


def _needs_half(case: Case) -> str | None:
    return find_flash_problem(case.dtype, 0)


def find_compiler_obstacle(case: Case) -> str | None:
    """Return why flex attention cannot be compiled on the device; None where it can."""
    return find_kernel_obstacle(case.device)


def _needs_bands(case: Case) -> str | None:
    # Compiling takes most of a minute.
    is_needed = case.kind != "bands" or "no bands" not in case.asked
    return None if is_needed else "the run has no documents, windows or chunks"


_NOT_EMULATED = _not_asked("emulation", "--fp8-emulation is given")
_NOT_WITH_DROPOUT = _not_asked("dropout", "it has no dropout")
_NOT_DETERMINISTIC = _not_asked("deterministic", "its gradients are not the same in every run")
WIDEST_NORM = 8192
"""Channels that a kernel of ours normalises: all of a token's lie in the registers of one program."""
ONE_SCALE = ("delayed", "tensorwise")
"""Recipes with one scale for a matrix."""
_SCALED, _PRODUCTS = "torch.nn.functional.scaled_mm", "megatron.core.scaled_products"
_ATTENTION = "megatron.core.transformer.core_attention"
_MATMUL = "megatron.core.tensor_parallel.products:Matmul"
EMULATED = OperationWay(
    "emulated in float32",
    "megatron.core.fp8:multiply_emulated",
    (*ONE_SCALE, "rowwise", "blockwise", "mxfp8", "nvfp4"),
    (_may_emulate,),
)
"""On every device, and what the other ways of these recipes are compared with."""


def _forms(module: str, fused: str, plain: str, name: str, by_kernel: str | None = None) -> tuple[OperationWay, ...]:
    """The ways of an operation that is fused by hand, by a compiler, or not at all.

    fused, plain: its function in the module, by kind. name, by_kernel: of the fused form, and where it is a kernel.
    """
    kernel = () if by_kernel is None else (OperationWay(by_kernel, f"{module}:{fused}", ("fused",), (_needs_triton,)),)
    return (
        *kernel,
        OperationWay(name, f"{module}:{fused}", ("fused",)),
        OperationWay("compiled by torch.compile", f"{module}:{plain}", ("compiled",)),
        OperationWay("elementary operations", f"{module}:{plain}", ("elementary",)),
    )


def _in_place(what: str) -> tuple[str, str]:
    return f"fused with the {what}, in place", f"one kernel each way with the {what}, in place"


_ONE_PASS = "fused, keeps only its input", "one kernel each way, keeps only its input"
_MOVED = "one differentiable operation each, without atomic adds"
_LAYER, _ACTIVATIONS = "megatron.core.transformer", "megatron.core.activations"
_ROTARY, _LOSS = f"{_LAYER}.rotary", "megatron.core.tensor_parallel.cross_entropy"

OPERATIONS: Mapping[str, tuple[OperationWay, ...]] = {
    "linear": (
        OperationWay(
            "torch._scaled_mm", "megatron.core.fp8:multiply_natively", ONE_SCALE,
            (_NOT_EMULATED, _needs_capability((8, 9))),
        ),
        OperationWay(
            f"{_SCALED} with scales of rows", f"{_PRODUCTS}:multiply_rows", ("rowwise",),
            (_NOT_EMULATED, _needs_scaled_mm, _needs_capability((9, 0))),
        ),
        OperationWay(
            f"{_SCALED} with scales of 1x128 and 128x128", f"{_PRODUCTS}:multiply_blocks", ("blockwise",),
            (_NOT_EMULATED, _needs_scaled_mm, _needs_capability((9, 0), below=(10, 0))),
        ),
        OperationWay(
            f"{_SCALED} with scales of 1x32", f"{_PRODUCTS}:multiply_mxfp8", ("mxfp8",),
            (_NOT_EMULATED, _needs_scaled_mm, _needs_capability((10, 0))),
        ),
        OperationWay(
            f"{_SCALED} with scales of 1x16", f"{_PRODUCTS}:multiply_nvfp4", ("nvfp4",),
            (_NOT_EMULATED, _needs_scaled_mm, _needs_capability((10, 0))),
        ),
        EMULATED,
        OperationWay("torch matmul, weight gradient added into main_grad", _MATMUL, ("accumulated",)),
        OperationWay("torch matmul, weight gradient by autograd", _MATMUL, ("autograd",)),
    ),
    "norm": (
        OperationWay(
            "one kernel each way, with sums of the residual stream", "megatron.core.kernels.norm:normalise", ("fused",),
            (_needs_triton, _needs_channels(WIDEST_NORM), _not_asked("fewer parameters", "it has a weight and a bias")),
        ),
        *_forms(f"{_LAYER}.norms", "rms_norm", "rms_norm_reference", "one fused operation"),
    ),
    "activation": _forms(_ACTIVATIONS, "bias_activation", "activation_reference", *_ONE_PASS),
    "gated activation": _forms(_ACTIVATIONS, "bias_gated_activation", "gated_activation_reference", *_ONE_PASS),
    "rotary positions": _forms(
        _ROTARY, "split_and_rotate", "split_and_rotate_reference", *_in_place("query-key-value split")
    ),
    "latent rotary positions": _forms(
        _ROTARY, "rotate_and_join_latent_heads", "join_latent_heads", *_in_place("joining of latent heads")
    ),
    "residual": _forms(f"{_LAYER}.residual_branch", "bias_dropout_add", "bias_dropout_add_reference", "in place"),
    "permutation": _forms(f"{_LAYER}.moe.permutation", "permute", "permute_reference", _MOVED),
    "cross entropy": (
        OperationWay(
            "one kernel each way, from logits as they are", f"{_LOSS}:kernel_vocab_parallel_cross_entropy",
            ("fused", "elementary"), (_needs_triton,),
        ),
        OperationWay("from logits as they are", f"{_LOSS}:fused_vocab_parallel_cross_entropy", ("fused",)),
        OperationWay(
            "gradient formed in the logits' memory", f"{_LOSS}:vocab_parallel_cross_entropy", ("elementary",)
        ),
    ),
    "attention": (
        OperationWay("torch's operator", f"{_ATTENTION}.sdpa:SDPAttention", ("whole",)),
        OperationWay(
            "cuDNN with two widths", f"{_ATTENTION}.sdpa:SDPAttention", ("two widths",),
            (_needs_half, _NOT_DETERMINISTIC, _needs_capability((9, 0))), on_trial=True,
        ),
        OperationWay(
            "flash attention 3", f"{_ATTENTION}.flash:flash_attention", ("two widths", "bands"),
            (_needs_flash, _NOT_WITH_DROPOUT, _needs_package(3)), on_trial=True,
        ),
        OperationWay(
            "flash attention 4", f"{_ATTENTION}.flash:flash_attention", ("two widths", "bands"),
            (_needs_flash, _NOT_WITH_DROPOUT, _needs_package(4)), on_trial=True,
        ),
        OperationWay(
            "flex attention", f"{_ATTENTION}.flex:FlexAttention", ("two widths", "bands"),
            (
                find_compiler_obstacle, _NOT_WITH_DROPOUT, _not_asked("ring", "a ring merges sums of many kernels"),
                _needs_bands,
            ), on_trial=True,
        ),
        OperationWay("flash attention 2", f"{_ATTENTION}.flash:flash_attention", ("bands",), (_needs_flash,)),
        OperationWay("flex attention", f"{_ATTENTION}.flex:FlexAttention", ("bounds",), (find_compiler_obstacle,)),
        OperationWay("torch's operator, values padded", f"{_ATTENTION}.sdpa:SDPAttention", ("two widths",)),
        OperationWay("blocks of queries", f"{_ATTENTION}.query_blocks:QueryBlocksAttention", ("bands", "bounds")),
    ),
}  # fmt: skip
