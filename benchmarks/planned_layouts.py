# SPDX-License-Identifier: Apache-2.0
"""For known models and the clusters of guides: plan a layout, then dry-run it with the flags that the plan prints.

    python -m benchmarks.planned_layouts
    python -m benchmarks.planned_layouts llama3-8b mixtral-8x7b

Each is planned in a process of its own and dry-run, on sampled ranks, in another. A line has the seconds of both, those
of the processor in brackets, the dry run's memory of the host, and the tensors of the fullest rank, planned and found.
Exit code 1 where a plan takes 20 seconds of the processor or is more than 3 % off, or where what was found does not fit
the device. All of them take a quarter of an hour of one processor core.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.planned_runs import RECOMMENDED
from megatron.cli.plan_search import GAPS
from megatron.core.errors import format_bytes
from megatron.planner.devices import find_device

ROOT = Path(__file__).resolve().parents[1]
_GPU = "h100"
_WITHIN = 0.03
_PRESETS = (
    ("llama3-8b", 8), ("llama3-70b", 64), ("llama3.1-405b", 1024), ("mixtral-8x7b", 64), ("deepseek-v3", 1024),
    ("qwen3-next-80b-a3b", 128),
)  # fmt: skip


class Case(NamedTuple):
    """A model on so many H100."""

    name: str
    gpus: int
    flags: str


class Cost(NamedTuple):
    """What a process took."""

    code: int
    seconds: float
    processor_seconds: float
    peak_bytes: int
    """Of the host's memory."""
    output: str


def list_cases() -> list[Case]:
    """The presets, and the models and clusters of the guides' thirteen layouts, each once."""
    found = [Case(name, gpus, f"--preset {name}") for name, gpus in _PRESETS]
    for name, gpus, _, _, batch, flags in RECOMMENDED:
        words = flags.split("--decoder-last")[0] + ("" if "--preset" in flags else " --bf16")
        case = Case(f"{name} on {gpus}", gpus, f"{words} --global-batch-size {batch}")
        found += [] if case in found else [case]
    return found


def run(words: Sequence[str]) -> Cost:
    """Run a program of the project to its end."""
    began_at = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    used = usage.ru_utime + usage.ru_stime
    return Cost(process.returncode, time.monotonic() - began_at, used, usage.ru_maxrss * 1024, output)


def try_case(case: Case, directory: Path) -> tuple[bool, str]:
    """Plan and dry-run; whether both were well, and a line."""
    plan_file, dry_file = directory / "plan.json", directory / "dry.json"
    words = ["-m", "megatron", "plan", "--gpus", str(case.gpus), "--gpu", _GPU, "--json", str(plan_file)]
    planned = run([*words, *case.flags.split()])
    if planned.code:
        return False, f"{case.name}: the plan ends with exit code {planned.code}: {planned.output[-500:]}"
    best = json.loads(plan_file.read_text())["layouts"][0]
    options = ["--dry-run", "--world-size", str(case.gpus), "--dry-run-json", str(dry_file)]
    dry = run(["pretrain_gpt.py", *best["flags"], *options])
    if dry.code:
        return False, f"{case.name}: the dry run ends with exit code {dry.code}: {dry.output[-500:]}"
    peak = max(rank["peak_bytes"] for rank in json.loads(dry_file.read_text())["ranks"])
    # What the device must hold beside tensors is the plan's to say.
    needed = best["memory_bytes"] + GAPS * (peak - best["step_bytes"])
    there_is, error = find_device(_GPU).memory_bytes, best["step_bytes"] / peak - 1
    sizes = " ".join(f"{axis.upper()} {best[axis]}" for axis in ("tp", "pp", "cp", "ep", "dp") if best[axis] > 1)
    fits = "" if needed <= there_is else f"; does not fit: {format_bytes(needed)} of {format_bytes(there_is)}"
    return planned.processor_seconds < 20 and abs(error) <= _WITHIN and needed <= there_is, (
        f"{case.name:<20} {case.gpus:>5}  {sizes:<28} plan {planned.seconds:5.1f} s ({planned.processor_seconds:.1f}), "
        f"dry run {dry.seconds:5.0f} s ({dry.processor_seconds:.0f}), {format_bytes(dry.peak_bytes)}; "
        f"tensors {format_bytes(best['step_bytes'])} and {format_bytes(peak)}, {error:+.1%}{fits}"
    )


def main() -> int:
    """Try every case, or those named; exit code 1 where one is not well."""
    cases = [case for case in list_cases() if not sys.argv[1:] or case.name in sys.argv[1:]]
    good, began_at = 0, time.monotonic()
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="planned-") as directory:
            is_good, line = try_case(case, Path(directory))
        good += is_good
        print(line, flush=True)
    seconds = time.monotonic() - began_at
    print(f"{good} of {len(cases)} planned in time, accepted by the dry run and fitting, in {seconds:.0f} s")
    return 0 if good == len(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
