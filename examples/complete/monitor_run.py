# SPDX-License-Identifier: Apache-2.0
"""Watch a run from outside: where it stands, what its steps wait for, and what has gone wrong.

    python examples/complete/monitor_run.py --metrics-dir runs/a/metrics
    python examples/complete/monitor_run.py --metrics-dir runs/a/metrics --watch 60 --alert 'mail -s a me@example.org'

Reads the rows that the run writes with --metrics-dir, also while it goes on; the parts of a step are there with
--timing-log-level 2 --log-timers-to-tensorboard. Exit code 0: nothing wrong; 1: something is; 2: nothing to read.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.core.errors import DataError, command_line  # noqa: E402

RECENT = 50
"""Rows at the end that are compared with those before."""
Row = dict[str, Any]


def read_rows(directory: Path) -> tuple[list[Row], list[Row]]:
    """Rows of steps and of evaluations. The last line may be half written; it is left for the next time."""
    path = directory / "metrics.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; start the run with --metrics-dir {directory}") from error
    steps: list[dict[str, Any]] = []
    evaluations: list[dict[str, Any]] = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        (evaluations if "eval" in row else steps).append(row)
    return steps, evaluations


def list_values(rows: list[Row], name: str) -> list[float]:
    """The known values of a column."""
    return [row[name] for row in rows if row.get(name) is not None]


def describe(steps: list[Row], evaluations: list[Row]) -> Iterator[str]:
    """Where the run stands, a line each."""
    last, recent = steps[-1], steps[-RECENT:]
    seconds = list_values(recent, "iteration_time_seconds")
    yield f"iteration {last['iteration']}, {last['consumed_samples']} samples, learning rate {last['lr']:.3g}"
    losses = list_values(recent, "lm loss")
    if losses:
        yield f"loss {losses[-1]:.4f}, mean of the last {len(losses)} {statistics.fmean(losses):.4f}"
    if evaluations:
        yield f"validation {evaluations[-1]['eval']} at iteration {evaluations[-1]['iteration']}"
    if seconds:
        middle = statistics.median(seconds)
        tokens = statistics.median(list_values(recent, "tokens_per_second"))
        yield f"step {middle:.4g} s (slowest {max(seconds) / middle:.1f} times that), {tokens:.4g} tokens per second"
    utilisation = list_values(recent, "mfu")
    if utilisation:
        yield f"MFU {statistics.median(utilisation):.1%}"
    memory = list_values(recent, "peak_memory_bytes")
    if memory:
        yield f"peak memory {max(memory) / 2**30:.2f} GiB"


def list_parts(steps: list[Row]) -> dict[str, float]:
    """Seconds of the parts of a step that the run has timed: medians of the slowest rank, the longest first."""
    recent = steps[-RECENT:]
    names = {name for row in recent for name in row if name.endswith("-time")}
    medians = {name: statistics.median(list_values(recent, name)) for name in names if list_values(recent, name)}
    return dict(sorted(medians.items(), key=lambda item: -item[1]))


def name_bottleneck(parts: dict[str, float]) -> str | None:
    """What the step waits for, with what helps; None where nothing stands out or nothing was timed."""
    whole = parts.get("forward-backward-time")
    if not whole:
        return None
    if parts.get("batch-generator-time", 0.0) > 0.1 * whole:
        return "data: more than a tenth of forward and backward is waiting for batches; --num-workers, a faster disk"
    if parts.get("all-grads-sync-time", 0.0) > 0.2 * whole:
        return "gradients: --overlap-grad-reduce, more micro-batches, or a faster network"
    if parts.get("optimizer-time", 0.0) > 0.2 * whole:
        return "the update: --use-distributed-optimizer, or more samples in a step"
    return None


def find_problems(steps: list[Row], age_seconds: float) -> Iterator[str]:
    """What somebody should look at. age_seconds: since the file was last written."""
    recent, before = steps[-RECENT:], steps[:-RECENT]
    lost = [row["iteration"] for row in recent if row.get("lm loss") is None and not row.get("skipped")]
    if lost:
        yield f"the loss of iteration {lost[0]} is no number"
    then, now = list_values(before[-RECENT:], "lm loss"), list_values(recent, "lm loss")
    if then and now and statistics.median(now) > 1.1 * statistics.median(then):
        yield f"the loss climbs: {statistics.median(now):.3f} after {statistics.median(then):.3f}"
    then, now = list_values(before, "tokens_per_second"), list_values(recent, "tokens_per_second")
    if then and now and statistics.median(now) < 0.8 * statistics.median(then):
        yield f"{statistics.median(now):.4g} tokens per second, {statistics.median(then):.4g} before"
    skipped = sum(list_values(recent, "skipped"))
    if skipped > len(recent) / 10:
        yield f"{skipped:.0f} of the last {len(recent)} updates were skipped"
    seconds = list_values(recent, "iteration_time_seconds")
    # Rows are written every --log-interval steps; evaluations and saves lie between them.
    if seconds and age_seconds > max(600.0, 1000 * statistics.median(seconds)):
        yield f"nothing was written for {age_seconds / 60:.0f} minutes"


def look(directory: Path, *, is_finished: bool) -> list[str]:
    """Print where the run stands; returns what is wrong."""
    steps, evaluations = read_rows(directory)
    if not steps:
        raise DataError(f"{directory}/metrics.jsonl has no step yet; look again later")
    age = 0.0 if is_finished else time.time() - (directory / "metrics.jsonl").stat().st_mtime
    for line in describe(steps, evaluations):
        print(line)
    parts = list_parts(steps)
    for name, seconds in parts.items():
        print(f"  {name:<32} {1000 * seconds:10.2f} ms")
    bottleneck = name_bottleneck(parts)
    if bottleneck is not None:
        print(f"waits for {bottleneck}")
    problems = list(find_problems(steps, age))
    for problem in problems:
        print(f"problem: {problem}", flush=True)
    return problems


def main() -> int:
    """Look once, or again and again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--metrics-dir", type=Path, required=True, help="the directory of the run's --metrics-dir")
    parser.add_argument("--watch", type=float, metavar="SECONDS", help="look again every so many seconds")
    parser.add_argument("--alert", metavar="COMMAND", help="run by the shell for new problems, with these as its input")
    parser.add_argument("--finished", action="store_true", help="the run has ended: silence is no problem")
    arguments = parser.parse_args()
    known: set[str] = set()
    while True:
        problems = look(arguments.metrics_dir, is_finished=arguments.finished)
        # A problem's numbers change from look to look; what it is about stands before them.
        new = [problem for problem in problems if problem.split(":")[0] not in known]
        known = {problem.split(":")[0] for problem in problems}
        if new and arguments.alert:
            subprocess.run(["bash", "-c", arguments.alert], input="\n".join(new) + "\n", text=True, check=False)
        if arguments.watch is None:
            return 1 if problems else 0
        time.sleep(arguments.watch)


if __name__ == "__main__":
    sys.exit(command_line(main)())
