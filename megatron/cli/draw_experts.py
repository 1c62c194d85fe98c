# SPDX-License-Identifier: Apache-2.0
"""Draw how evenly a run's experts were chosen: layers from top to bottom, iterations from left to right.

    python tools/draw_experts.py METRICS_DIR                        in the terminal
    python tools/draw_experts.py METRICS_DIR --output load.png      needs matplotlib
    python tools/draw_experts.py METRICS_DIR --metric expert_entropy

METRICS_DIR: of a run with --moe-per-layer-logging and --metrics-dir METRICS_DIR. Metrics: expert_load (choices of the
most chosen expert, in units of the mean), expert_rank_load (of the busiest rank), expert_entropy (1: all alike),
tokens_dropped, expert_bias, and the auxiliary losses, such as load_balancing_loss.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from megatron.core.errors import ConfigError, command_line
from megatron.core.optional_deps import require
from megatron.training.flags.parser import path

FILE_NAME = "metrics.jsonl"
SHADES = " .:-=+*#%@"


def read_history(file: Path, metric: str) -> tuple[list[int], dict[int, list[float]]]:
    """Iterations, and layer -> the metric's value in each of them. Raises ConfigError where the file has none."""
    iterations: list[int] = []
    layers: dict[int, list[float]] = {}
    found: set[str] = set()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; give the --metrics-dir of a run") from None
    except ValueError as error:
        raise ConfigError(f"{file} is no file of metrics: {error}") from None
    for row in rows:
        of_layers = {name: value for name, value in row.items() if " layer " in name}
        found |= {name.partition(" layer ")[0] for name in of_layers}
        values = {
            int(name.rpartition(" ")[2]): v for name, v in of_layers.items() if name.startswith(f"{metric} layer ")
        }
        if values and all(value is not None for value in values.values()):
            iterations.append(row["iteration"])
            for layer, value in values.items():
                layers.setdefault(layer, []).append(value)
    if not iterations:
        there = f"there are {', '.join(sorted(found))}" if found else "the run needs --moe-per-layer-logging"
        raise ConfigError(f"{file} has no {metric} of layers; {there}")
    return iterations, dict(sorted(layers.items()))


def average(values: list[float], columns: int) -> list[float]:
    """Means of as many stretches of equal length."""
    edges = [len(values) * column // columns for column in range(columns + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]


def format_map(iterations: list[int], layers: dict[int, list[float]], metric: str, width: int) -> str:
    """A character for each layer and stretch of iterations, from the smallest value to the largest."""
    columns = min(len(iterations), max(10, width - 24))
    drawn = {layer: average(values, columns) for layer, values in layers.items()}
    low, high = min(map(min, drawn.values())), max(map(max, drawn.values()))
    scale = (len(SHADES) - 1) / (high - low) if high > low else 0.0
    legend = f"'{SHADES[0]}' {low:.3g} to '{SHADES[-1]}' {high:.3g}"
    lines = [f"{metric}: {legend}; iterations {iterations[0]} to {iterations[-1]}"]
    for layer, values in drawn.items():
        cells = "".join(SHADES[round((value - low) * scale)] for value in values)
        lines.append(f"layer {layer:>3} |{cells}| {layers[layer][-1]:.3g}")
    return "\n".join(lines)


def draw_picture(iterations: list[int], layers: dict[int, list[float]], metric: str, output: Path) -> None:
    """The same as a heat map."""
    matplotlib = require("matplotlib", needed_by=f"--output {output}")
    matplotlib.use("Agg")
    pyplot = require("matplotlib.pyplot", needed_by=f"--output {output}")
    figure, axes = pyplot.subplots(figsize=(10, 1.5 + 0.22 * len(layers)), layout="constrained")
    edges = [iterations[0] - 0.5, iterations[-1] + 0.5]
    image = axes.imshow(
        list(layers.values()), aspect="auto", cmap="viridis", interpolation="nearest",
        extent=(*edges, len(layers) - 0.5, -0.5),
    )  # fmt: skip
    axes.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    axes.set(xlabel="iteration", ylabel="layer", title=metric.replace("_", " "))
    figure.colorbar(image, ax=axes)
    figure.savefig(output, dpi=120)


@command_line
def main() -> int:
    """Read, then draw in the terminal or into a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=path, metavar="METRICS_DIR")
    parser.add_argument("--metric", default="expert_load", help="default: expert_load")
    parser.add_argument("--output", type=path, metavar="FILE", help=".png, .svg or .pdf")
    arguments = parser.parse_args()
    iterations, layers = read_history(arguments.directory / FILE_NAME, arguments.metric)
    if arguments.output is None:
        print(format_map(iterations, layers, arguments.metric, shutil.get_terminal_size().columns))
    else:
        draw_picture(iterations, layers, arguments.metric, arguments.output)
        print(f"drawn into {arguments.output}")
    return 0
