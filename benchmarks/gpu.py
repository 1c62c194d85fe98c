# SPDX-License-Identifier: Apache-2.0
"""Everything that a machine with a GPU can answer in a few minutes, in one command.

    python -m benchmarks gpu --minutes 9 --out results
    python -m benchmarks gpu --minutes 3 --out results --only 1b,moe
    python -m benchmarks gpu --tiny --out /tmp/results       # every line of every item, small, on a CPU as well

Each item is a process of its own (benchmarks/gpu_parts.py) with a share of the time. What it finds is kept as it goes
on; an item that fails, or is cut when its time is over, keeps what it has found, and the next one begins. What an item
does not need is there for those behind it; what is left in the end is there for those that were cut, which begin again.
The whole command ends before the minutes are over.

DIR has four files and less than 1 MB, after every item anew: table.txt, a line for each item; summary.json, all
results; profile.txt, waits and kernels of a step; rest.tar.gz, what each item printed, and results that were too long.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
_TERM_SECONDS = 2.0
_LEAST_SECONDS = 3.0
"""An item that would have less is not begun: it could not even import torch."""
_LONGEST_RESULT = 8_000
"""Characters of an item's results in summary.json..."""
_LONGEST_IN_ARCHIVE = 16_000
"""...and bytes of a file in the archive, so that 34 of them stay below 600 kB though they do not compress."""


@dataclass(frozen=True)
class Item:
    """A question, and its share of the time, as seconds where all are asked in ten minutes."""

    name: str
    seconds: float
    text: str


ITEMS = (
    Item("versions", 15, "versions, and which kernel attention gets for the shapes of models"),
    Item("tests", 60, "every operation against its reference, each file in a process of its own"),
    Item("curves", 80, "50 steps on the GPU against the CPU; saved and resumed, and twice, bit for bit"),
    Item("profile", 30, "waits of the host and the longest kernels of a 1B step"),
    Item("8b", 70, "training steps of 8B (at least 57.7 %)"),
    Item("1b", 40, "training steps of 1B (at least 49 % of the peak)"),
    Item("moe", 40, "training steps of 8 experts of 1B (at least 40 %)"),
    Item("fp8", 45, "8B layers in FP8 against bfloat16"),
    Item("attention", 20, "attention by length"),
    Item("offloading", 30, "8B layers with activations on the host against the device"),
    Item("graphs", 30, "1B in small micro-batches by CUDA graphs against eager"),
    Item("generation", 25, "tokens that the engine writes with a 1B model"),
    Item("operations", 50, "products, attention, optimizer and loss against the ceilings"),
    Item("documents", 25, "packed documents against one long document"),
    Item("two-processes", 40, "two processes on this GPU over gloo against one"),
    Item("checkpoint", 20, "1B saved and loaded"),
    Item("1b-compiled", 45, "1B with --compile, last, because compiling takes as long as there is time"),
)
"""In this order."""


def run_items(
    items: Sequence[Item], directory: Path, seconds: float, python: Sequence[str], *, is_tiny: bool
) -> list[dict[str, Any]]:
    """Run the items one after the other, in `seconds` altogether; what became of each. directory: for the four files.

    python: what starts Python: the interpreter, or a program around it such as a profiler.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-results-", ignore_cleanup_errors=True) as work:
        return _run_items(items, directory, Path(work), seconds, python, is_tiny=is_tiny)


def _run_items(
    items: Sequence[Item], directory: Path, work: Path, seconds: float, python: Sequence[str], *, is_tiny: bool
) -> list[dict[str, Any]]:
    began_at = time.monotonic()
    # What remains is for ending the last item and for writing.
    usable = seconds - min(15.0, 0.05 * seconds)
    share = usable / sum(item.seconds for item in items)
    found: dict[str, dict[str, Any]] = {}

    def run(item: Item, limit: float) -> None:
        outcome = found[item.name] = _run_item(item, work, limit, python, is_tiny=is_tiny)
        print(_format_row(outcome), flush=True)
        # After each: whoever ends this command early has what there is.
        write_results(list(found.values()), work, directory)

    granted = 0.0
    for item in items:
        granted += item.seconds * share
        # Time that earlier items have left over comes on top.
        run(item, min(granted, usable) - (time.monotonic() - began_at))
    for item in items:
        before, left = found[item.name], usable - (time.monotonic() - began_at)
        # With no more time than before it would only be cut again, and might have found less.
        if before["state"] in ("cut", "no time") and left > max(_LEAST_SECONDS, before["limit_seconds"]):
            run(item, left)
    return list(found.values())


def _run_item(item: Item, directory: Path, limit: float, python: Sequence[str], *, is_tiny: bool) -> dict[str, Any]:
    path, log = directory / f"{item.name}.json", directory / f"{item.name}.log"
    path.unlink(missing_ok=True)
    outcome: dict[str, Any] = {"name": item.name, "text": item.text, "limit_seconds": round(limit, 1)}
    if limit < _LEAST_SECONDS:
        return outcome | {"state": "no time", "seconds": 0.0}
    command = [*python, "-m", "benchmarks.gpu_parts", item.name, "--out", str(path), "--seconds", str(round(limit, 1))]
    command += ["--python", shlex.join(python), *(["--tiny"] if is_tiny else [])]
    began_at = time.monotonic()
    # One that is cut removes nothing itself, and a checkpoint is large.
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as scratch, log.open("w") as output:
        command += ["--scratch", scratch]
        # A session of its own, so that whatever it starts can be ended with it.
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=_environment()
        )
        try:
            code = process.wait(limit)
            state = "done" if code == 0 else "failed"
        except subprocess.TimeoutExpired:
            state = "cut"
        finally:
            _end(process)
    with contextlib.suppress(OSError, ValueError):
        outcome |= json.loads(path.read_text(encoding="utf-8"))
    outcome |= {"state": state, "seconds": round(time.monotonic() - began_at, 1)}
    if state == "cut":
        outcome["error"] = f"its {limit:.0f} s were over"
    elif state == "failed":
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        outcome["error"] = lines[-1] if lines else "it printed nothing"
    write_atomically(path, outcome)
    return outcome


def _environment() -> dict[str, str]:
    # Of the checkout, installed or not.
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it with everything that it has started; returns when it is gone."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        # Also after it has ended: children of its own may be left in its group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_TERM_SECONDS)
            return
    process.wait()


def write_atomically(path: Path, content: Any) -> None:
    """As JSON, complete or not at all: a reader, or a kill, may come at any moment."""
    _write_text(path, json.dumps(content, indent=2))


def write_results(found: Sequence[dict[str, Any]], work: Path, directory: Path) -> None:
    """Write the four files. work: where items have left NAME.json and NAME.log."""
    _write_text(directory / "table.txt", "\n".join(map(_format_row, found)))
    profile = next((outcome.get("results", {}) for outcome in found if outcome["name"] == "profile"), {})
    rows = [f"{row['seconds']:>10.6f} s{row['calls']:>8} x  {row['name'][:160]}" for row in profile.get("kernels", [])]
    waits = [f"wait of the host: {place}" for place in profile.get("waits", [])]
    _write_text(directory / "profile.txt", "\n".join([*waits, *rows]))
    short = [outcome if len(json.dumps(outcome)) <= _LONGEST_RESULT else _shorten(outcome) for outcome in found]
    write_atomically(directory / "summary.json", short)
    beside = directory / ".rest.tar.gz.tmp"
    with tarfile.open(beside, "w:gz") as archive:
        for path in sorted(work.iterdir()):
            content = path.read_bytes()
            if len(content) > _LONGEST_IN_ARCHIVE:
                # The end says how it ended.
                content = content[:1000] + b"\n[...]\n" + content[1000 - _LONGEST_IN_ARCHIVE :]
            entry = tarfile.TarInfo(path.name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    beside.replace(directory / "rest.tar.gz")


def _shorten(outcome: dict[str, Any]) -> dict[str, Any]:
    """Without results that are long: those are in the archive."""
    kept = {key: value for key, value in outcome.get("results", {}).items() if len(json.dumps(value)) <= 2000}
    return outcome | {"results": kept, "left_out": sorted(set(outcome.get("results", {})) - set(kept))}


def _write_text(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(text + "\n", encoding="utf-8")
    beside.replace(path)


def _format_row(outcome: dict[str, Any]) -> str:
    said = outcome.get("headline", "")
    if outcome["state"] in ("failed", "cut") and outcome.get("error"):
        said = f"{said}; {outcome['error']}" if said else outcome["error"]
    return f"{outcome['name']:<14}{outcome['state']:<9}{outcome['seconds']:>7.1f} s  {said}"


def choose_items(names: str | None) -> list[Item]:
    """Those of a comma-separated list, in our order; all for None. Raises ConfigError for one that is not known."""
    if names is None:
        return list(ITEMS)
    wanted = names.split(",")
    known = [item.name for item in ITEMS]
    for name in wanted:
        if name not in known:
            raise ConfigError(f"--only {name} is no item; items are {', '.join(known)}")
    return [item for item in ITEMS if item.name in wanted]


def main() -> int:
    """Run the command line; 0 when every item is done, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="for the whole command (default: 9)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where results go")
    parser.add_argument("--only", metavar="NAMES", help="these items, separated by commas")
    parser.add_argument("--python", default=sys.executable, help="what starts Python, such as 'nsys profile python'")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that everything runs, without a GPU")
    arguments = parser.parse_args()
    began_at = time.monotonic()
    items = choose_items(arguments.only)
    if arguments.minutes <= 0:
        raise ConfigError(f"--minutes {arguments.minutes:g} leaves no time; give 9, or any number above 0")
    if not arguments.tiny:
        # Asked in a process of its own: this one must not hold memory of the device.
        ask = "import sys; from megatron.core.device import device_count; sys.exit(0 if device_count() else 3)"
        done = subprocess.run([*shlex.split(arguments.python), "-c", ask], cwd=ROOT, env=_environment())
        if done.returncode == 3:
            raise ConfigError("python -m benchmarks gpu needs a CUDA device; --tiny tries every item without one")
    print(f"{len(items)} items in {arguments.minutes:g} minutes; results go to {arguments.out}", flush=True)
    seconds = 60 * arguments.minutes - (time.monotonic() - began_at)
    found = run_items(items, arguments.out, seconds, shlex.split(arguments.python), is_tiny=arguments.tiny)
    print("\n" + "\n".join(map(_format_row, found)))
    done_items = sum(outcome["state"] == "done" for outcome in found)
    print(f"{done_items} of {len(found)} done; {arguments.out}/summary.json has everything")
    return 0 if done_items == len(found) else 1
