# SPDX-License-Identifier: Apache-2.0
"""Tries the system with random layouts and hostile inputs, and counts what does not hold.

    python -m tests.trial                                  60 layouts and 120 inputs of seed 1: about 20 minutes
    python -m tests.trial --layouts 200 --inputs 0 --seed 7
    python -m tests.trial --layout 17 --input 203          single cases again, by their seeds

Every case is a function of its seed; a fault comes with the command that repeats it. Exit code 1 when there was one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator

from tests.parallel.harness import server
from tests.trial.hostile_inputs import draw_input, judge_input, remove_saved_run
from tests.trial.random_layouts import draw_case, judge_layout
from tests.trial.verdict import Verdict

# A seed of the command line stands for this many cases, so that two seeds share none.
CASES_PER_SEED = 100_000


def list_cases(options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """What to try: "layout" or "input", and the case's seed."""
    first = options.seed * CASES_PER_SEED
    single = bool(options.layout or options.input)
    for kind, chosen, count in (("layout", options.layout, options.layouts), ("input", options.input, options.inputs)):
        seeds = chosen if single else range(first, first + count)
        yield from ((kind, seed) for seed in seeds)


def judge(kind: str, seed: int) -> tuple[str, Verdict]:
    """Run one case: what it was, and what became of it."""
    if kind == "input":
        case = draw_input(seed)
        return case.kind, judge_input(case)
    layout = draw_case(seed)
    return layout.layout_text(), judge_layout(layout)


def main() -> int:
    """Run the cases and print the tally."""
    parser = argparse.ArgumentParser(prog="python -m tests.trial", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layouts", type=int, default=60, help="random layouts (default: 60)")
    parser.add_argument("--inputs", type=int, default=120, help="hostile inputs (default: 120)")
    parser.add_argument("--seed", type=int, default=1, help="which cases (default: 1)")
    parser.add_argument("--layout", type=int, action="append", default=[], metavar="SEED", help="this layout alone")
    parser.add_argument("--input", type=int, action="append", default=[], metavar="SEED", help="this input alone")
    cases = list(list_cases(parser.parse_args()))
    server()
    tally: Counter[tuple[str, str]] = Counter()
    faults = []
    started_at = time.monotonic()
    try:
        for done, (kind, seed) in enumerate(cases, start=1):
            what, verdict = judge(kind, seed)
            tally[kind, verdict.kind] += 1
            left = (time.monotonic() - started_at) / done * (len(cases) - done)
            line = (
                f"[{done}/{len(cases)}, {left / 60:.0f} min left] {kind} {seed}: {verdict.kind}: {what}: {verdict.text}"
            )
            print(line.encode("utf-8", "backslashreplace").decode().split("\n")[0][:400], flush=True)
            if verdict.kind == "fault":
                faults.append(verdict)
                print(f"{verdict.text}\n    {verdict.command}", flush=True)
    finally:
        remove_saved_run()
    print(f"\n{'':10} {'tried':>6} {'ran':>6} {'refused':>8} {'faults':>7}")
    for kind in ("layout", "input"):
        ran, refused, fault = (tally[kind, verdict] for verdict in ("ran", "refused", "fault"))
        print(f"{kind + 's':10} {ran + refused + fault:6} {ran:6} {refused:8} {fault:7}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
