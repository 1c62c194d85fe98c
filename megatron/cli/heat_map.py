# SPDX-License-Identifier: Apache-2.0
"""Values of a run's metrics over iterations as shades: a row for each layer or operand, in the terminal or a picture.

File of metrics: metrics.jsonl of --metrics-dir, one object of names and values for each logged iteration.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.errors import ConfigError
from megatron.core.line_files import read_rows
from megatron.core.optional_deps import require
from megatron.report.series import average

FILE_NAME = "metrics.jsonl"
SHADES = " .:-=+*#%@"


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The rows of a file of metrics; prints a note of an unfinished last line. Raises ConfigError."""
    try:
        rows, note = read_rows(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; give the --metrics-dir of a run") from None
    except ValueError as error:
        raise ConfigError(f"{file} is no file of metrics: {error}") from None
    if note is not None:
        print(f"note: {note}", file=sys.stderr)
    return rows


def draw(iterations: Sequence[int], rows: Mapping[str, Sequence[float]], title: str, output: Path | None) -> None:
    """Print the map, or draw it into the file `output` (.png, .svg or .pdf) and say so.

    rows: label -> the value in each of the iterations.
    """
    if output is None:
        print(format_map(iterations, rows, title, shutil.get_terminal_size().columns))
        return
    draw_picture(iterations, rows, title, output)
    print(f"drawn into {output}")


def format_map(iterations: Sequence[int], rows: Mapping[str, Sequence[float]], title: str, width: int) -> str:
    """A character for each row and stretch of iterations, from the smallest value to the largest; ? where none is."""
    longest = max(map(len, rows))
    columns = min(len(iterations), max(10, width - longest - 15))
    drawn = {label: average(values, columns) for label, values in rows.items()}
    numbers = [value for values in drawn.values() for value in values if math.isfinite(value)] or [0.0]
    low, high = min(numbers), max(numbers)
    scale = (len(SHADES) - 1) / (high - low) if high > low else 0.0
    legend = f"'{SHADES[0]}' {low:.3g} to '{SHADES[-1]}' {high:.3g}"
    lines = [f"{title}: {legend}; iterations {iterations[0]} to {iterations[-1]}"]
    for label, values in drawn.items():
        cells = "".join("?" if math.isnan(value) else SHADES[round((value - low) * scale)] for value in values)
        lines.append(f"{label:<{longest}} |{cells}| {rows[label][-1]:.3g}")
    return "\n".join(lines)


def draw_picture(iterations: Sequence[int], rows: Mapping[str, Sequence[float]], title: str, output: Path) -> None:
    """The same as a heat map in a file."""
    matplotlib = require("matplotlib", needed_by=f"--output {output}")
    matplotlib.use("Agg")
    pyplot = require("matplotlib.pyplot", needed_by=f"--output {output}")
    figure, axes = pyplot.subplots(figsize=(10, 1.5 + 0.22 * len(rows)), layout="constrained")
    edges = [iterations[0] - 0.5, iterations[-1] + 0.5]
    image = axes.imshow(
        list(rows.values()), aspect="auto", cmap="viridis", interpolation="nearest",
        extent=(*edges, len(rows) - 0.5, -0.5),
    )  # fmt: skip
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set(xlabel="iteration", title=title.replace("_", " "))
    figure.colorbar(image, ax=axes)
    figure.savefig(output, dpi=120)
