# SPDX-License-Identifier: Apache-2.0
"""Times on the device, ceilings measured in the same run, and a report of both: table, JSON and a roofline picture.

Two ceilings say what the machine can do at best: one large matrix product, in FLOP/s, and the copy of a large tensor,
in bytes per second (read and written). A measurement says how many operations it is and how many bytes it has to move
at least, and its report says which share of either ceiling that is.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.conditions import describe_conditions
from megatron.core import device as device_module
from megatron.core.optional_deps import available, require

FLOP_FORMULA = (
    "FLOP: 2 for each multiplication and addition of the matrix products that the model needs, once forward and twice "
    "backward (6 for each matrix parameter and token; the output layer counts, the embedding's look-up does not); "
    "attention counted causally, half of the full square; recomputation does not count"
)
_WARM_UPS = 2


@dataclass(frozen=True)
class Measurement:
    """How long something took, and what it is compared with."""

    name: str
    seconds: float
    """Median of the rounds."""
    shortest: float
    flops: float | None = None
    """Floating-point operations of one round."""
    moved_bytes: float | None = None
    """Bytes that have to be read and written at least in one round."""
    baseline: str = ""
    """Name of the measurement of the same run that this one is compared with; empty for none."""
    details: dict[str, Any] = field(default_factory=dict)
    """Further values, for the JSON file and the last column."""


@dataclass(frozen=True)
class Ceilings:
    """What the device reached in this run."""

    product_flops: float
    """FLOP/s of the fastest of several large square matrix products."""
    copy_bytes_per_second: float
    """Bytes read and written by the copy of a large tensor, per second."""
    dtype: str
    product_size: int


@dataclass
class Report:
    """All measurements of one benchmark."""

    title: str
    measurements: list[Measurement]
    ceilings: Ceilings | None = None
    notes: list[str] = field(default_factory=list)
    """Formulas, and what was left out."""

    def as_dict(self) -> dict[str, Any]:
        """What the JSON file has."""
        return dataclasses.asdict(self) | {"conditions": describe_conditions()}

    def find_ratio(self, measurement: Measurement) -> float | None:
        """Time of the baseline / time of the measurement: above 1 it is faster than its baseline; None without one."""
        base = next((other for other in self.measurements if other.name == measurement.baseline), None)
        return None if base is None else base.seconds / measurement.seconds

    def print(self) -> None:
        """A table: milliseconds, TFLOP/s and GB/s with their shares of the ceilings, ratio to the baseline."""
        print(f"\n{self.title}")
        if self.ceilings is not None:
            print(
                f"ceilings, measured now: product of {self.ceilings.product_size} x {self.ceilings.product_size} "
                f"{self.ceilings.dtype}: {self.ceilings.product_flops / 1e12:.4g} TFLOP/s; "
                f"copy: {self.ceilings.copy_bytes_per_second / 1e9:.4g} GB/s"
            )
        width = max([20, *(len(m.name) for m in self.measurements)])
        head = ("ms", "TFLOP/s", "of product", "GB/s", "of copy")
        print(
            f"{'':<{width}}" + "".join(f"{word:>{max(11, len(word) + 2)}}" for word in head) + "  baseline time / this"
        )
        for measurement in self.measurements:
            print(f"{measurement.name:<{width}}" + self._format(measurement))
        for note in self.notes:
            print(f"note: {note}")

    def _format(self, measurement: Measurement) -> str:
        seconds, ceilings = measurement.seconds, self.ceilings
        cells = [f"{seconds * 1e3:.4g}"]
        for amount, ceiling, unit in (
            (measurement.flops, ceilings and ceilings.product_flops, 1e12),
            (measurement.moved_bytes, ceilings and ceilings.copy_bytes_per_second, 1e9),
        ):
            rate = None if amount is None else amount / seconds
            cells.append("" if rate is None else f"{rate / unit:.4g}")
            cells.append("" if rate is None or not ceiling else f"{100 * rate / ceiling:.1f} %")
        ratio = self.find_ratio(measurement)
        cells.append("" if ratio is None else f"{ratio:.3f} ({measurement.baseline})")
        *numbers, compared = cells
        text = "".join(f"{cell:>{width}}" for cell, width in zip(numbers, (11, 11, 12, 11, 11), strict=True))
        text += f"  {compared:<42}"
        said = ", ".join(f"{key} {value}" for key, value in measurement.details.items() if not isinstance(value, list))
        return f"{text}  {said}".rstrip()


def time_rounds(function: Callable[[], object], rounds: int, warm_ups: int = _WARM_UPS) -> list[float]:
    """Seconds of each round, by the device's clock on a GPU; the first calls are not counted."""
    for _ in range(warm_ups):
        function()
    marks = [device_module.mark()]
    for _ in range(rounds):
        function()
        marks.append(device_module.mark())
    # Once, at the end: a wait after each round would let the device run dry between them.
    device_module.synchronize()
    pairs = zip(marks, marks[1:], strict=False)
    # A clock may see no time pass in a round of microseconds.
    return [max(device_module.measure_seconds_between(earlier, later), 1e-9) for earlier, later in pairs]


def measure(name: str, function: Callable[[], object], rounds: int, **facts: Any) -> Measurement:
    """Time `function`; facts: the other fields of Measurement."""
    seconds = time_rounds(function, rounds)
    return Measurement(name, statistics.median(seconds), min(seconds), **facts)


def choose_dtype() -> torch.dtype:
    """The number format in which this device trains: bfloat16 on a GPU, float32 on a CPU."""
    return torch.float32 if device_module.is_cpu(device_module.current_device()) else torch.bfloat16


def measure_ceilings(dtype: torch.dtype, *, is_tiny: bool = False) -> Ceilings:
    """Ceilings of this process's device; takes about a second. is_tiny: of small tensors, to try it."""
    device = device_module.current_device()
    on_cpu = device_module.is_cpu(device)
    size = 64 if is_tiny else 1024 if on_cpu else 8192
    # Random values: a GPU draws less power for zeros and ones, and then runs faster than it can in training.
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = min(time_rounds(lambda: torch.mm(a, b), 10))
    elements = 2**12 if is_tiny else 2**25 if on_cpu else 2**30
    source = torch.zeros(elements, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = min(time_rounds(lambda: target.copy_(source), 10))
    return Ceilings(2 * size**3 / product, 2 * elements / copy, str(dtype).removeprefix("torch."), size)


def write_json(path: Path, reports: Sequence[Report]) -> None:
    """All reports of this call."""
    path.write_text(json.dumps([report.as_dict() for report in reports], indent=2) + "\n", encoding="utf-8")


def draw_roofline(path: Path, reports: Sequence[Report]) -> str:
    """Draw what was measured under the two ceilings; returns a sentence about it.

    Horizontally FLOP for each byte that has to be moved, vertically TFLOP/s: below the slope the copy bounds a
    measurement, below the flat line the product does (Williams et al., "Roofline", 2009).
    """
    if not available("matplotlib"):
        return f"--picture {path} is left out: matplotlib is not installed; pip install matplotlib"
    matplotlib = require("matplotlib", needed_by="--picture")
    matplotlib.use("Agg")
    plt = require("matplotlib.pyplot", needed_by="--picture")
    points = [(r, m) for r in reports for m in r.measurements if r.ceilings and m.flops and m.moved_bytes]
    if not points:
        return f"--picture {path} is left out: nothing that was measured has both operations and bytes"
    figure, axes = plt.subplots(figsize=(8, 5))
    ceilings = points[0][0].ceilings
    assert ceilings is not None
    intensities = [m.flops / m.moved_bytes for _, m in points]
    ridge = ceilings.product_flops / ceilings.copy_bytes_per_second
    grid = sorted({min(*intensities, ridge) / 4, ridge, max(*intensities, ridge) * 4})
    roof = [min(ceilings.product_flops, ceilings.copy_bytes_per_second * x) / 1e12 for x in grid]
    axes.loglog(grid, roof, color="black", label=f"product and copy, {ceilings.dtype}")
    for (_, measurement), intensity in zip(points, intensities, strict=True):
        axes.plot(intensity, measurement.flops / measurement.seconds / 1e12, "o", label=measurement.name)
    axes.set_xlabel("FLOP for each byte that has to be moved")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(str(describe_conditions()["device"]))
    axes.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return f"{path}: a roofline of {len(points)} measurements"
