# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled for an H200 on a machine without one: what their machine code says.

Triton turns a kernel into PTX and, by the assembler it brings along, into code for a GPU that need not be there.
`capture` notes what an operation would launch; `compile_for_h200` compiles that.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron.core.kernels import launching

_TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64", torch.int32: "i32",
    torch.int64: "i64", torch.bool: "i1", torch.uint8: "u8", torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
}  # fmt: skip


class Launch(NamedTuple):
    """What an operation would start."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int


class MachineCode(NamedTuple):
    """What is known of a compiled kernel."""

    ttir: str
    """Triton's first form of it, before anything is optimised."""
    ptx: str
    registers: int
    """Of a thread."""
    stack_bytes: int
    """Of a thread: above 0 where registers did not suffice."""
    shared_bytes: int
    """Of a block of threads."""

    def count_wide(self, instruction: str) -> int:
        """How often it reads or writes 16 bytes at a time. instruction: ld or st."""
        return len(re.findall(rf"\b{instruction}\.global[.\w:]*\.(v4\.[bfu]32|v2\.[bfu]64|v8\.[bfu]16)\b", self.ptx))

    def count_accesses(self, instruction: str) -> int:
        """How often it reads or writes at all. instruction: ld or st."""
        return len(re.findall(rf"\b{instruction}\.global\b", self.ptx))


@contextlib.contextmanager
def capture() -> Iterator[list[Launch]]:
    """Inside, operations take their kernels and nothing is launched; yields what would be."""
    launches: list[Launch] = []

    def note(
        kernel: Any,
        grid: tuple[int, ...],
        *arguments: Any,
        num_warps: int = 4,
        cooperative: bool = False,
        **constants: Any,
    ) -> None:
        launches.append(Launch(kernel, arguments, constants, num_warps))

    with mock.patch.object(launching, "launch", note), mock.patch.object(launching, "uses_kernels", lambda *_: True):
        yield launches


def capture_variants(comparisons: Iterable[Callable[[str], None]]) -> list[Launch]:
    """What comparisons of kernels with their references start until they find that nothing was computed: a launch of
    each kernel, and of each combination of its dtypes, constants and kinds of sizes."""
    found: dict[Any, Launch] = {}

    def note(kernel: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
        constants.pop("cooperative", None)
        key = (kernel.__name__, *map(_describe, arguments), num_warps, *sorted(map(str, constants.items())))
        found.setdefault(key, Launch(kernel, arguments, constants, num_warps))

    modules = [module for name, module in sys.modules.items() if name.startswith("tests.kernels.")]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(launching, "launch", note))
        for module in modules:
            if hasattr(module, "assert_close"):
                stack.enter_context(mock.patch.object(module, "assert_close", lambda *_, **__: None))
        for compare in comparisons:
            with contextlib.suppress(AssertionError):
                compare("cpu")
    return list(found.values())


def _describe(argument: Any) -> str:
    """What Triton compiles anew for."""
    kind = "" if argument is None else _name_type(argument)
    return f"{kind} of 16" if isinstance(argument, int) and argument % 16 == 0 else kind


def compile_for_h200(launch: Launch, capability: int = 90) -> MachineCode:
    """Compile as Triton would for these arguments on a GPU of compute capability 9.0, or of another one, times ten."""
    signature: dict[str, str] = {}
    constants = dict(launch.constants)
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, (name, argument) in enumerate(
        zip(launch.kernel.arg_names, launch.arguments, strict=False)  # constants come last, and by name
    ):
        if argument is None:
            signature[name], constants[name] = "constexpr", None
            continue
        signature[name] = _name_type(argument)
        # The allocator's addresses are multiples of 16, and so are most sizes; Triton looks when it launches.
        if isinstance(argument, Tensor) or (isinstance(argument, int) and argument % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(launch.constants, "constexpr")
    source = ASTSource(launch.kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": launch.num_warps})
    asm = compiled.asm
    return MachineCode(asm["ttir"], asm["ptx"], *_read_resources(asm["cubin"]), compiled.metadata.shared)


def _name_type(argument: Any) -> str:
    if isinstance(argument, Tensor):
        return f"*{_TYPES[argument.dtype]}"
    if isinstance(argument, int):
        return "i32" if -(2**31) <= argument < 2**31 else "i64"
    return "fp32"


def _read_resources(code: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        said = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])
