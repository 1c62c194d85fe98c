# SPDX-License-Identifier: Apache-2.0
"""Tries the system with random layouts and hostile inputs, and counts what does not hold.

    python -m tests.trial                                  60 layouts, 20 in FP8 and FP4, 40 pairs of recomputed modules
                                                           and 140 inputs of seed 1: about half an hour
    python -m tests.trial --layouts 200 --precisions 0 --recomputations 0 --inputs 0 --seed 7
    python -m tests.trial --layout 17 --input 203          single cases again, by their seeds
    python -m tests.trial --every-field                    each field of each family's config.json, changed alone
    python -m tests.trial --hybrid-table                   each kind of sublayer under each layout: twenty minutes

Every case is a function of its seed; a fault comes with the command that repeats it. Exit code 1 when there was one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator

from tests.parallel.harness import server
from tests.trial.config_fields import draw_fields, judge_fields, list_every_field
from tests.trial.hostile_inputs import draw_input, judge_input, remove_saved_run
from tests.trial.hybrid_table import Table, list_cells
from tests.trial.random_layouts import draw_case, judge_layout
from tests.trial.random_precision import (
    draw_precision,
    draw_recomputation,
    find_recipe,
    judge_precision,
    judge_recomputation,
)
from tests.trial.verdict import Verdict

# A seed of the command line stands for this many cases, so that two seeds share none.
CASES_PER_SEED = 100_000
KINDS_OF_CASES = {
    "layout": (60, "random layouts"),
    "precision": (20, "layouts in FP8 and FP4"),
    "recomputation": (40, "pairs of recomputed modules"),
    "input": (140, "hostile inputs"),
    "config": (60, "random config.json files"),
}
"""Kind -> how many, and what they are."""


def list_cases(options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """What to try: a kind of `KINDS_OF_CASES`, and the case's seed."""
    first = options.seed * CASES_PER_SEED
    chosen = (options.field, options.every_field, options.cell, options.hybrid_table)
    single = any(chosen) or any(getattr(options, kind) for kind in KINDS_OF_CASES)
    for kind in KINDS_OF_CASES:
        seeds = getattr(options, kind) if single else range(first, first + getattr(options, f"{kind}s"))
        yield from ((kind, seed) for seed in seeds)
    fields = range(len(list_every_field())) if options.every_field else options.field
    yield from (("field", number) for number in fields)
    cells = range(first, first + len(list_cells(options.seed))) if options.hybrid_table else options.cell
    yield from (("cell", number) for number in cells)


def judge(kind: str, seed: int, table: Table) -> tuple[str, str, Verdict]:
    """Run one case: its line of the tally, what it was, and what became of it."""
    if kind == "cell":
        cell = list_cells(seed // CASES_PER_SEED)[seed % CASES_PER_SEED]
        return f"cell: {cell.model.row}", cell.text(), table.judge(cell)
    if kind == "input":
        case = draw_input(seed)
        verdict = judge_input(case)
        # What a kind says of its case comes behind its first words.
        return f"input: {case.kind.split(':')[0].split(' ')[0]}", case.kind, verdict
    if kind in ("config", "field"):
        config = draw_fields(seed) if kind == "config" else list_every_field()[seed]
        return f"{kind}: {config.model_type}", config.text(), judge_fields(config)
    draw, decide = {
        "layout": (draw_case, judge_layout),
        "precision": (draw_precision, judge_precision),
        "recomputation": (draw_recomputation, judge_recomputation),
    }[kind]
    layout = draw(seed)
    line = kind if kind == "layout" else f"{kind}: {find_recipe(layout)}"
    return line, layout.layout_text(), decide(layout)


def main() -> int:
    """Run the cases and print the tally."""
    parser = argparse.ArgumentParser(prog="python -m tests.trial", description=(__doc__ or "").split("\n")[0])
    for kind, (count, text) in KINDS_OF_CASES.items():
        parser.add_argument(f"--{kind}s", type=int, default=count, help=f"{text} (default: {count})")
        parser.add_argument(f"--{kind}", type=int, action="append", default=[], metavar="SEED", help="this one alone")
    parser.add_argument("--field", type=int, action="append", default=[], metavar="NUMBER", help="one of those alone")
    parser.add_argument("--every-field", action="store_true", help="each field of config.json alone: half an hour")
    parser.add_argument("--cell", type=int, action="append", default=[], metavar="NUMBER", help="of the table, alone")
    parser.add_argument("--hybrid-table", action="store_true", help="each kind of sublayer under each layout")
    parser.add_argument("--seed", type=int, default=1, help="which cases (default: 1)")
    cases = list(list_cases(parser.parse_args()))
    server()
    tally: Counter[tuple[str, str]] = Counter()
    faults = []
    started_at = time.monotonic()
    table = Table()
    try:
        for done, (kind, seed) in enumerate(cases, start=1):
            line, what, verdict = judge(kind, seed, table)
            tally[line, verdict.kind] += 1
            left = (time.monotonic() - started_at) / done * (len(cases) - done)
            text = (
                f"[{done}/{len(cases)}, {left / 60:.0f} min left] {kind} {seed}: {verdict.kind}: {what}: {verdict.text}"
            )
            print(text.encode("utf-8", "backslashreplace").decode().split("\n")[0][:400], flush=True)
            if verdict.kind == "fault":
                faults.append(verdict)
                again = f"python -m tests.trial --{kind} {seed}"
                print(f"{verdict.text}\n    {verdict.command}\n    {again}", flush=True)
    finally:
        remove_saved_run()
        table.close()
    print_tally(tally)
    return 1 if faults else 0


def print_tally(tally: Counter[tuple[str, str]]) -> None:
    """Print how many of each kind ran, were refused, and were a fault, and the sums."""
    lines = sorted({line for line, _ in tally})
    width = max(map(len, [*lines, "all"]))
    print(f"\n{'':{width}} {'tried':>6} {'ran':>6} {'refused':>8} {'faults':>7}")
    for line in [*lines, "all"]:
        ran, refused, fault = (
            sum(count for (of, verdict), count in tally.items() if verdict == kind and line in (of, "all"))
            for kind in ("ran", "refused", "fault")
        )
        print(f"{line:{width}} {ran + refused + fault:6} {ran:6} {refused:8} {fault:7}")


if __name__ == "__main__":
    sys.exit(main())
