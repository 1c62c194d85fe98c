# SPDX-License-Identifier: Apache-2.0
"""Draw what rounding to 8 or 4 bits did in a run: linear layers from top to bottom, iterations from left to right.

    python tools/draw_fp8.py METRICS_DIR                               signal to noise in dB, in the terminal
    python tools/draw_fp8.py METRICS_DIR --output noise.png            needs matplotlib
    python tools/draw_fp8.py METRICS_DIR --operand grad --layers '*.linear_fc2'
    python tools/draw_fp8.py METRICS_DIR --by kind                     the lowest of all layers of a kind

METRICS_DIR: of a run with --log-fp8-stats and --metrics-dir METRICS_DIR. Metrics: fp8_sqnr, fp8_amax, fp8_overflow,
fp8_underflow. A layer that fell back to 16 bits has no values from there on, and its row ends.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.cli.heat_map import FILE_NAME, draw, read_metrics
from megatron.core.errors import ConfigError, command_line
from megatron.training.flags.argument import ProgramParser, path

METRICS = ("fp8_sqnr", "fp8_amax", "fp8_overflow", "fp8_underflow")
OPERANDS = ("input", "weight", "grad")


def read_history(
    file: Path, metric: str, operands: Sequence[str], layers: str, *, by_kind: bool
) -> tuple[list[int], dict[str, list[float]]]:
    """Iterations, and `LAYER OPERAND` -> the metric in each; by_kind: `KIND OPERAND` -> the worst of its layers.

    layers: a pattern of their names. Raises ConfigError where the file has none of them.
    """
    logged = [row for row in read_metrics(file) if any(name.startswith(f"{metric} ") for name in row)]
    names = dict.fromkeys(name for row in logged for name in row if name.startswith(f"{metric} "))
    if not names:
        raise ConfigError(f"{file} has no {metric} of layers; the run needs --log-fp8-stats")
    rows: dict[str, list[list[float]]] = {}
    for name in names:
        _, layer, operand = name.split(" ")
        if operand in operands and fnmatch.fnmatchcase(layer, layers):
            label = f"{layer.rpartition('.')[2] if by_kind else layer} {operand}"
            rows.setdefault(label, []).append([_read_number(row.get(name)) for row in logged])
    if not rows:
        found = ", ".join(sorted({name.split(" ")[1] for name in names}))
        raise ConfigError(f"{file} has no layer {layers}; there are {found}")
    # The worst of a kind: the lowest ratio, else the greatest value. Where no layer has a value there is none.
    worst = min if metric == "fp8_sqnr" else max
    return [row["iteration"] for row in logged], {
        label: [
            worst((v for v in values if not math.isnan(v)), default=math.nan) for values in zip(*of_layers, strict=True)
        ]
        for label, of_layers in rows.items()
    }


def _read_number(value: Any) -> float:
    return math.nan if value is None else float(value)


@command_line
def main() -> int:
    """Read, then draw in the terminal or into a file."""
    parser = ProgramParser(__doc__)
    parser.add_argument("directory", type=path, metavar="METRICS_DIR")
    parser.add_argument("--metric", default="fp8_sqnr", choices=METRICS, help="default: fp8_sqnr")
    parser.add_argument("--operand", choices=OPERANDS, help="default: all three")
    parser.add_argument("--layers", default="*", metavar="PATTERN", help="of names of layers; default: all")
    parser.add_argument("--by", default="layer", choices=("layer", "kind"), help="a row for each; default: layer")
    parser.add_argument("--output", type=path, metavar="FILE", help=".png, .svg or .pdf")
    arguments = parser.parse_args()
    operands = OPERANDS if arguments.operand is None else (arguments.operand,)
    iterations, rows = read_history(
        arguments.directory / FILE_NAME, arguments.metric, operands, arguments.layers, by_kind=arguments.by == "kind"
    )
    draw(iterations, rows, arguments.metric, arguments.output)
    return 0
