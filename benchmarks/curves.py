# SPDX-License-Identifier: Apache-2.0
"""Loss curves of this process's device against those of the CPU, and runs that must repeat bit for bit.

Weights are drawn on the CPU, so that both begin with the same. The CPU's curves are computed here and now, in the same
number format; what changes no number (recomputation, determinism) is compared with the same curve.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.forms import FULL
from benchmarks.packed_documents import build_packed_datasets
from benchmarks.plain_llama import ModelSizes
from benchmarks.training import Preset, StepClock, build_flags, describe_error, train_here
from megatron.core.errors import MegatronError

GRAPHS = "--cuda-graph-impl local --cuda-graph-warmup-steps 1"


@dataclass(frozen=True)
class Curve:
    """A run, and the CPU's run that it is compared with."""

    name: str
    flags: str = ""
    reference: str | None = None
    """Flags of the CPU's run; the same when None."""
    tolerance: float = 0.02
    """Greatest relative difference of a loss."""
    experts: int = 0
    packed: bool = False


CURVES = (
    Curve("float32", tolerance=1e-3),
    Curve("bfloat16", "--bf16"),
    Curve("full recomputation", f"--bf16 {FULL}", "--bf16"),
    Curve("selective recomputation", "--bf16 --recompute-granularity selective", "--bf16"),
    Curve("fused cross entropy", "--bf16 --cross-entropy-loss-fusion", "--bf16"),
    Curve("graphs", f"--bf16 {GRAPHS}", "--bf16"),
    Curve("experts", "--bf16 --moe-grouped-gemm --moe-permute-fusion", experts=4),
    Curve("graphs beside experts", f"--bf16 {GRAPHS} --cuda-graph-modules attn moe_router", "--bf16", experts=4),
    Curve("documents", "--bf16", packed=True),
    Curve("window", "--bf16 --window-size 31,0"),
    Curve("sinks", "--bf16 --softmax-type learnable"),
    Curve("float16", "--fp16 --initial-loss-scale 65536", ""),
)


def compare_curves(*, is_tiny: bool, deadline: float = math.inf) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name, and losses with the largest relative difference, `is_right` and `said`, of one curve after the other.

    deadline: of time.monotonic(), after which no further one is begun.
    """
    # cuBLAS reads it once, long before the runs that need it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    draw = _Drawing(is_tiny)
    for curve in CURVES:
        if time.monotonic() > deadline:
            return
        try:
            yield curve.name, draw.compare(curve)
        except (RuntimeError, MegatronError) as error:
            yield curve.name, {"is_right": False, "said": describe_error(error)}
    for name, repeat in (("twice", draw.repeat), ("saved and resumed", draw.resume)):
        if time.monotonic() > deadline:
            return
        try:
            yield name, repeat()
        except (RuntimeError, MegatronError) as error:
            yield name, {"is_right": False, "said": describe_error(error)}


class _Drawing:
    def __init__(self, is_tiny: bool) -> None:
        self.steps = 4 if is_tiny else 50
        self.is_tiny = is_tiny
        self.references: dict[tuple[str, int, bool], list[float]] = {}

    def preset(self, experts: int) -> Preset:
        """The model of all curves."""
        if self.is_tiny:
            return Preset("", ModelSizes(2, 32, 48, 4, 2, 128, experts=experts), 64, 2, 4)
        return Preset("", ModelSizes(4, 256, 704, 8, 4, 4096, experts=experts), 128, 4, 8)

    def train(self, flags: str, experts: int = 0, packed: bool = False, more: str = "") -> list[float]:
        """Losses of all steps."""
        preset, clock = self.preset(experts), StepClock()
        words = build_flags(preset, torch.float32, self.steps, [*flags.split(), *more.split()])
        parts: dict[str, Callable[..., Any]] = {}
        if packed:
            parts["build_datasets"] = build_packed_datasets(preset.sequence, preset.sizes.vocab, whole=False)
        train_here([*words, "--use-cpu-initialization", "--lr", "1e-3"], [clock], **parts)
        names = 1 if not experts else len(clock.losses) // len(clock.marks)
        # With experts there are losses of the router beside the language model's.
        return [float(loss) for loss in clock.losses[::names]]

    def compare(self, curve: Curve) -> dict[str, Any]:
        """A curve of this device with that of the CPU."""
        flags = curve.flags if curve.reference is None else curve.reference
        key = (flags, curve.experts, curve.packed)
        if key not in self.references:
            with _on_cpu():
                self.references[key] = self.train(*key)
        own = self.train(curve.flags, curve.experts, curve.packed)
        expected = self.references[key]
        pairs = zip(own, expected, strict=True)
        # Written so that a loss that is no number is not taken for equal.
        error = max((abs(a - b) / max(abs(b), 1e-9) for a, b in pairs), default=math.inf)
        is_right = error <= curve.tolerance and not any(math.isnan(loss) for loss in own)
        said = f"losses differ by {error:.2g} at most, {curve.tolerance:g} is allowed"
        return {"is_right": is_right, "said": said, "losses": own, "expected": expected}

    def repeat(self) -> dict[str, Any]:
        """Twice with --deterministic-mode."""
        first, second = (self.train("--bf16", more="--deterministic-mode") for _ in range(2))
        return {"is_right": first == second, "said": "two runs with --deterministic-mode", "losses": [first, second]}

    def resume(self) -> dict[str, Any]:
        """One run that is saved and resumed in the middle, and one without a stop."""
        middle = self.steps // 2
        with tempfile.TemporaryDirectory(prefix="curves-") as directory:
            end = f"--lr-decay-iters {self.steps} --deterministic-mode"
            whole = self.train("--bf16", more=end)
            save = f"{end} --save {directory} --save-interval {middle}"
            first = self.train("--bf16", more=f"{save} --exit-interval {middle}")
            rest = self.train("--bf16", more=f"{end} --load {directory}")
        is_right = first == whole[:middle] and rest == whole[middle:]
        return {"is_right": is_right, "said": f"resumed after {middle} steps", "losses": [whole, first + rest]}


@contextlib.contextmanager
def _on_cpu() -> Iterator[None]:
    """This process computes on the CPU meanwhile."""
    before = os.environ.get("MEGATRON_DEVICE")
    os.environ["MEGATRON_DEVICE"] = "cpu"
    try:
        yield
    finally:
        if before is None:
            del os.environ["MEGATRON_DEVICE"]
        else:
            os.environ["MEGATRON_DEVICE"] = before
