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

from pathlib import Path

from megatron.cli.heat_map import FILE_NAME, draw, read_metrics
from megatron.core.errors import ConfigError, command_line
from megatron.training.flags.argument import ProgramParser, path


def read_history(file: Path, metric: str) -> tuple[list[int], dict[int, list[float]]]:
    """Iterations, and layer -> the metric's value in each of them. Raises ConfigError where the file has none."""
    iterations: list[int] = []
    layers: dict[int, list[float]] = {}
    found: set[str] = set()
    for row in read_metrics(file):
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


@command_line
def main() -> int:
    """Read, then draw in the terminal or into a file."""
    parser = ProgramParser(__doc__)
    parser.add_argument("directory", type=path, metavar="METRICS_DIR")
    parser.add_argument("--metric", default="expert_load", help="default: expert_load")
    parser.add_argument("--output", type=path, metavar="FILE", help=".png, .svg or .pdf")
    arguments = parser.parse_args()
    iterations, layers = read_history(arguments.directory / FILE_NAME, arguments.metric)
    rows = {f"layer {layer:>3}": values for layer, values in layers.items()}
    draw(iterations, rows, arguments.metric, arguments.output)
    return 0
