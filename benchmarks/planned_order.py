# SPDX-License-Identifier: Apache-2.0
"""Order of twelve layouts: as the planner predicts it from a measured device row, and as this machine trains them.

    python -m benchmarks.planned_order

`probe` measures the device row for 1, 2 and 4 processes at once, so that cores they share count as shared. The layouts
are trained in turns, and the shortest step of each counts, once a second turn comes near it: whatever else the machine
does makes steps longer. Times within 5 % are ties. Kendall's tau-b compares the two orders: 1 for the same, 0 for none
in common. About seven minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.cli.plan_search import Judge
from megatron.planner.devices import Device, read_device

MODEL = """--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256
    --vocab-size 4000 --global-batch-size 8 --hidden-dropout 0 --attention-dropout 0 --lr 1e-4 --train-iters 4
    --mock-data --tokenizer-type NullTokenizer --untie-embeddings-and-output-weights --eval-iters 0 --num-workers 0"""
_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_TP, _PP = "--sequence-parallel --tensor-model-parallel-size", "--pipeline-model-parallel-size"
LAYOUTS = (
    (1, "alone", "--micro-batch-size 4"),
    (1, "alone, recomputed", f"--micro-batch-size 4 {_FULL}"),
    (2, "DP 2", "--micro-batch-size 4"),
    (2, "DP 2, recomputed", f"--micro-batch-size 4 {_FULL}"),
    (2, "TP 2", f"--micro-batch-size 4 {_TP} 2"),
    (2, "PP 2, 8 microbatches", f"--micro-batch-size 1 {_PP} 2"),
    (2, "PP 2, 2 microbatches", f"--micro-batch-size 4 {_PP} 2"),
    (2, "PP 2, 1 microbatch", f"--micro-batch-size 8 {_PP} 2"),
    (2, "PP 2, 1 microbatch, recomputed", f"--micro-batch-size 8 {_PP} 2 {_FULL}"),
    (4, "DP 4", "--micro-batch-size 2"),
    (4, "DP 4, recomputed", f"--micro-batch-size 2 {_FULL}"),
    (4, "TP 4", f"--micro-batch-size 4 {_TP} 4"),
)
"""Processes, name and flags."""
TIE = 0.05
_TURNS, _MOST_SECONDS = 4, 900.0
_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
"""A process computes on one core, in probe as in training."""


def measure_rows(directory: Path) -> dict[int, Device]:
    """Processes -> the row that probe measures for so many at once."""
    found = {}
    for world_size in sorted({layout[0] for layout in LAYOUTS}):
        file = directory / f"{world_size}.json"
        words = ["probe", "--world-size", str(world_size), "--output", str(file)]
        subprocess.run([sys.executable, "-m", "megatron", *words], check=True, env=os.environ | _ENVIRONMENT)
        found[world_size] = read_device(file)
    return found


def measure_step(world_size: int, flags: str, directory: Path) -> float:
    """Seconds of the shortest step but the first of a short run."""
    command = [sys.executable, "-m", "megatron", "launch", "--standalone", "--nproc_per_node", str(world_size), "--"]
    words = [*MODEL.split(), *flags.split(), "--log-interval", "1", "--metrics-dir", str(directory)]
    done = subprocess.run(
        [*command, *words], capture_output=True, text=True, timeout=300, env=os.environ | _ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return min(
        float(row["iteration_time_seconds"])
        for row in rows
        if row.get("iteration", 0) > 1 and "iteration_time_seconds" in row
    )


def compare_orders(first: Sequence[float], second: Sequence[float], tie: float = TIE) -> float:
    """Return Kendall's tau-b; numbers whose ratio is below 1 + tie are equal."""

    def sign(a: float, b: float) -> int:
        return 0 if max(a, b) <= min(a, b) * (1 + tie) else 1 if a > b else -1

    pairs = [
        (sign(first[i], first[j]), sign(second[i], second[j])) for i, j in itertools.combinations(range(len(first)), 2)
    ]
    one, other = (sum(pair[side] != 0 for pair in pairs) for side in (0, 1))
    return sum(a * b for a, b in pairs) / math.sqrt(one * other)


def show(predicted: Sequence[float], measured: Mapping[int, float]) -> list[str]:
    """A line for each layout, the fastest first, and how well the orders agree."""
    lines = [f"{'processes':>9}  {'layout':<32} {'predicted':>10} {'measured':>9}"]
    for number in sorted(measured, key=lambda number: measured[number]):
        world_size, name, _ = LAYOUTS[number]
        lines.append(f"{world_size:>9}  {name:<32} {predicted[number]:>8.2f} s {measured[number]:>7.2f} s")
    tau = compare_orders(predicted, [measured[number] for number in range(len(LAYOUTS))])
    return [*lines, f"Kendall's tau of the orders: {tau:.2f}"]


def main() -> None:
    """Predict, train in turns, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    began_at = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="planned-order-") as place:
        directory = Path(place)
        rows = measure_rows(directory)
        predicted = []
        for world_size, name, flags in LAYOUTS:
            layout = Judge(world_size, rows[world_size]).judge([*MODEL.split(), *flags.split()])
            assert layout.step_seconds is not None, f"{name}: {layout.why}"
            predicted.append(layout.step_seconds)
        turns: dict[int, list[float]] = {number: [] for number in range(len(LAYOUTS))}
        for turn in range(_TURNS):
            for number, (world_size, _, flags) in enumerate(LAYOUTS):
                is_known = len(turns[number]) > 1 and turns[number][1] <= turns[number][0] * (1 + TIE)
                if is_known or (turn > 1 and time.monotonic() - began_at > _MOST_SECONDS):
                    continue
                turns[number].append(measure_step(world_size, flags, directory / f"{turn}-{number}"))
                turns[number].sort()
    measured = {number: seconds[0] for number, seconds in turns.items()}
    unsteady = [LAYOUTS[number][1] for number, seconds in turns.items() if seconds[1] > seconds[0] * (1 + TIE)]
    if unsteady:
        print(f"the machine is not idle: no two turns agree for {', '.join(unsteady)}")
    print("\n".join(show(predicted, measured)))


if __name__ == "__main__":
    main()
