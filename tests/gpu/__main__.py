# SPDX-License-Identifier: Apache-2.0
"""The tests that need a GPU, each file of them in a process of its own.

    python -m tests.gpu [--at-once N] [--python COMMAND] [FILES] [ARGUMENTS OF PYTEST]

A failed assertion inside a kernel leaves an error in its process that every later call of CUDA meets again; so it ends
with the file. The summary says of each file how it ended, and of one that died, by which signal and after which test.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_NO_TESTS = 5
"""pytest's exit code where it has found none."""


def find_files() -> list[str]:
    """Files with tests that are marked `gpu`."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if "mark.gpu" in path.read_text("utf-8")]


def run_file(python: Sequence[str], file: str, words: Sequence[str]) -> tuple[int, list[str]]:
    """Exit code of the file's process (minus the signal that has ended it), and the lines that it printed."""
    command = [*python, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short", *words, file]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, [line for line in done.stdout.splitlines() if line.strip()]


def describe_end(file: str, code: int, lines: Sequence[str]) -> str:
    """A line for the summary: it begins with DIED where no test has failed, and yet the process has."""
    said = lines[-1].strip("= ") if lines else "it printed nothing"
    if code in (0, 1, _NO_TESTS):
        return f"{'FAILED ' if code == 1 else ''}{file}: {said}"
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    last = next((line.split()[0] for line in reversed(lines) if line.startswith(f"{file}::")), "no test")
    return f"DIED {file}: {how}, after {last}; its last line: {said}"


def main() -> int:
    """Run the files; 0 where all tests have passed, else 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )  # fmt: skip
    parser.add_argument("--at-once", type=int, default=1, help="files at the same time (default: 1)")
    parser.add_argument("--python", default=sys.executable, help="what starts Python")
    ours, words = parser.parse_known_args()
    files = [word for word in words if word.split("::")[0].endswith(".py")]
    words = [word for word in words if word not in files]
    ends = []
    with ThreadPoolExecutor(ours.at_once) as pool:
        running = {pool.submit(run_file, shlex.split(ours.python), file, words): file for file in files or find_files()}
        for future in as_completed(running):
            code, lines = future.result()
            end = describe_end(running[future], code, lines)
            # What passed is said in one line; of the others everything is.
            print("\n".join([*(lines if end.startswith(("FAILED", "DIED")) else []), end]), flush=True)
            ends.append(end)
    died = [end for end in ends if end.startswith("DIED")]
    failed = [end for end in ends if end.startswith("FAILED")]
    print("\nsummary of files:", *sorted(ends), sep="\n")
    print(f"{len(ends)} files: {len(failed)} with failures, {len(died)} died")
    return int(bool(died or failed))


if __name__ == "__main__":
    sys.exit(main())
