# SPDX-License-Identifier: Apache-2.0
"""Is a measurement of a training's speed complete, and is its arithmetic right?

    python tools/check_benchmark.py benchmarks/contributed/*.json
    python tools/check_benchmark.py --from-metrics runs/a/metrics --command "python pretrain_gpt.py ..." > mine.json

The first form compares files with benchmarks/contributed/schema.json, reads the command's flags as the program would
for so many processes, and recomputes tokens per second and MFU. The second makes such a file of a run's --metrics-
dir; what it cannot know (the network, the driver) is filled in by hand.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron.core.errors import DataError, command_line  # noqa: E402
from megatron.core.line_files import read_rows  # noqa: E402
from megatron.training.flags.read import examine  # noqa: E402

SCHEMA = ROOT / "benchmarks/contributed/schema.json"
CONTRIBUTED = ROOT / "benchmarks/contributed"
TOLERANCE = 0.02
"""Relative: numbers are written with a few digits."""
_RATES = ("tokens_per_second", "mfu")
TYPES: dict[str, tuple[type, ...]] = {"object": (dict,), "string": (str,), "integer": (int,), "number": (int, float)}


def find_schema_problems(value: Any, schema: dict[str, Any], where: str = "") -> Iterator[str]:
    """What stands against the schema, by the part of JSON Schema that ours uses."""
    name = where or "the file"
    expected = schema["type"]
    is_right: bool = isinstance(value, TYPES[expected]) and not isinstance(value, bool)
    if not is_right:
        yield f"{name} is {value!r}; expected {expected}"
        return
    if expected == "object":
        for key in schema.get("required", []):
            if key not in value:
                yield f"{name} lacks {key}"
        for key, member in value.items():
            if key in schema["properties"]:
                yield from find_schema_problems(member, schema["properties"][key], f"{where}.{key}".lstrip("."))
            else:
                yield f"{name} has {key}, which is not known; known are {', '.join(schema['properties'])}"
    elif expected == "string":
        if not re.search(schema.get("pattern", ""), value):
            yield f"{name} is {value!r}; expected the form {schema['pattern']}"
        if len(value) < schema.get("minLength", 0):
            yield f"{name} is {value!r}; expected at least {schema['minLength']} characters"
    else:
        if value < schema.get("minimum", value) or value <= schema.get("exclusiveMinimum", value - 1):
            yield f"{name} is {value}; expected more"
        if value > schema.get("maximum", value):
            yield f"{name} is {value}; expected at most {schema['maximum']}"


def find_arithmetic_problems(entry: dict[str, Any]) -> Iterator[str]:
    """Where the numbers contradict each other or the command."""
    words = shlex.split(entry["command"])
    program = next((i for i, word in enumerate(words) if word.endswith("pretrain_gpt.py")), None)
    if program is None:
        yield "command does not start pretrain_gpt.py"
        return
    hardware, measured = entry["hardware"], entry["measured"]
    if hardware["processes"] % hardware["nodes"]:
        yield f"hardware: {hardware['processes']} processes on {hardware['nodes']} nodes are not evenly many on each"
    examination = examine(words[program + 1 :], {"WORLD_SIZE": str(hardware["processes"])})
    if examination.problems or examination.config is None:
        yield from (f"command: {problem.text}" for problem in examination.problems)
        return
    config = examination.config
    tokens = (config.training.global_batch_size or 0) * (config.data.seq_length or 0)
    rate = tokens / measured["step_seconds"]
    if abs(rate / measured["tokens_per_second"] - 1) > TOLERANCE:
        given = f"tokens_per_second is {measured['tokens_per_second']}"
        yield f"{given}; {tokens} tokens in {measured['step_seconds']} s are {rate:.6g}"
    if measured["left_out"] >= measured["steps"]:
        yield f"left_out is {measured['left_out']} of {measured['steps']} steps; some must remain"
    low, high = (measured.get(f"step_seconds_{end}", measured["step_seconds"]) for end in ("min", "max"))
    if not low <= measured["step_seconds"] <= high:
        yield f"step_seconds {measured['step_seconds']} does not lie between its least {low} and most {high}"
    if "mfu" in measured and "peak_tflops" in hardware:
        from megatron.planner.throughput import count_training_flops_per_token
        from megatron.training.recipes.vocabulary import build_tokenizer, compute_padded_vocab_size

        rows = compute_padded_vocab_size(config, build_tokenizer(config))
        per_token = count_training_flops_per_token(
            config.model, seq_length=config.data.seq_length or 0, padded_vocab_size=rows
        )
        mfu = per_token * rate / hardware["processes"] / (hardware["peak_tflops"] * 1e12)
        if abs(mfu / measured["mfu"] - 1) > TOLERANCE:
            yield f"mfu is {measured['mfu']}; {per_token:.6g} operations a token at that rate are {mfu:.4f} of the peak"
    elif "mfu" in measured:
        yield "measured has mfu and hardware no peak_tflops, of which it is the share"


def find_problems(path: Path) -> list[str]:
    """Everything that stands against a file."""
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return [f"cannot be read: {error}"]
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    return list(find_schema_problems(entry, schema)) or list(find_arithmetic_problems(entry))


def describe_run(metrics: Path, command: str, left_out: int) -> dict[str, Any]:
    """An entry of a run that has ended here. Raises DataError for one with too few steps."""
    try:
        rows, note = read_rows(metrics / "metrics.jsonl")
    except (OSError, ValueError) as error:
        raise DataError(f"--from-metrics {metrics}: {error}") from error
    if note is not None:
        print(f"note: {note}", file=sys.stderr)
    steps = [row for row in rows if "eval" not in row]
    kept = steps[left_out:]
    if len(steps) < 10 or not kept:
        raise DataError(
            f"--from-metrics {metrics} has {len(steps)} steps; at least 10 are needed, {left_out} are left out"
        )
    import torch

    from megatron.core.device import device_name

    seconds = [row["iteration_time_seconds"] for row in kept]
    middle = statistics.median(seconds)
    # A rate times its time is the same in every step, so that all figures can be those of the median step.
    last = {name: value and value * seconds[-1] / middle for name, value in kept[-1].items() if name in _RATES}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    measured: dict[str, Any] = {
        "steps": len(steps),
        "left_out": left_out,
        "step_seconds": middle,
        "step_seconds_min": min(seconds),
        "step_seconds_max": max(seconds),
        "tokens_per_second": last["tokens_per_second"],
        "peak_memory_gb": max(row["peak_memory_bytes"] for row in kept) / 1e9,
    }
    hardware: dict[str, Any] = {
        "device": device_name(),
        "processes": 1, "nodes": 1, "interconnect": "none",
    }  # fmt: skip
    if last.get("mfu"):
        measured["mfu"] = last["mfu"]
        # What the run took for the peak, so that the share can be recomputed.
        hardware["peak_tflops"] = kept[-1]["tflops"] / kept[-1]["mfu"]
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip(),
        "command": command,
        "hardware": hardware,
        # torch's version names the release of CUDA that it was built for.
        "software": {"python": platform.python_version(), "torch": torch.__version__},
        "measured": measured,
        "notes": "",
    }


def main() -> int:
    """Check files, or make one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="measurements to check")
    parser.add_argument("--from-metrics", type=Path, metavar="DIR", help="make an entry of this run's metrics")
    parser.add_argument("--command", default="", help="the command of that run")
    parser.add_argument("--left-out", type=int, default=5, help="first steps that do not count (5)")
    arguments = parser.parse_args()
    if arguments.from_metrics:
        print(json.dumps(describe_run(arguments.from_metrics, arguments.command, arguments.left_out), indent=2))
        return 0
    files = arguments.files or [path for path in sorted(CONTRIBUTED.glob("*.json")) if path != SCHEMA]
    problems = [f"{path}: {problem}" for path in files for problem in find_problems(path)]
    if problems:
        raise DataError("; ".join(problems))
    print(f"{len(files)} measurements, nothing to object")
    return 0


if __name__ == "__main__":
    sys.exit(command_line(main)())
