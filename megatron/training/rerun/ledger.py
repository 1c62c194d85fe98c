# SPDX-License-Identifier: Apache-2.0
"""`ledger.jsonl` in --save: which samples a run has consumed, in which iterations, and which of them it passed over.

    {"iterations": [1, 6], "samples": [0, 23], "blend": ["data/a"], "skipped": null}
    {"iterations": [7, 7], "samples": [24, 27], "blend": ["data/a"], "skipped": "the loss of ..."}

Written with each checkpoint, so that it tells of what that checkpoint has seen; a run that goes on from an earlier one
leaves out what comes after it. Samples are numbered in the order of training, over all ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron.training.run import PassedOver

LEDGER = "ledger.jsonl"


@dataclass(frozen=True)
class LedgerEntry:
    """Iterations in succession."""

    iterations: tuple[int, int]
    """First and last, counted from 1."""
    samples: tuple[int, int]
    """First and last, counted from 0."""
    blend: tuple[str, ...]
    """Sources of the samples, as --data-path names it."""
    skipped: str | None = None
    """Reason that they were passed over; None: they were trained on."""


class Ledger:
    """Of the run in a --save directory; kept by the first rank."""

    def __init__(self, save: str | Path, blend: tuple[str, ...]) -> None:
        self.path, self.blend = Path(save) / LEDGER, blend
        self.entries: list[LedgerEntry] = []

    def begin(self, iteration: int, samples: int) -> None:
        """Read what led to the checkpoint that the run goes on from. Lines that cannot be read, and gaps, are left as
        gaps: what is there is never invented."""
        self.entries = []
        try:
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return
        for line in lines:
            try:
                content = json.loads(line)
                first, last = content["iterations"]
                samples_here = (content["samples"][0], content["samples"][1])
                entry = LedgerEntry((first, last), samples_here, tuple(content["blend"]), content["skipped"])
            except (ValueError, TypeError, LookupError):
                continue
            if last <= iteration:
                self.entries.append(entry)
            elif first <= iteration and entry.samples[0] < samples:
                self.entries.append(
                    replace(entry, iterations=(first, iteration), samples=(entry.samples[0], samples - 1))
                )

    def extend(self, start: tuple[int, int], end: tuple[int, int], passed_over: Mapping[int, PassedOver]) -> None:
        """Add what was done between two moments, each (iterations done, samples consumed)."""
        done, consumed = start
        for iteration in sorted(i for i in passed_over if start[0] < i <= end[0]):
            passed = passed_over[iteration]
            self._add(LedgerEntry((done + 1, iteration - 1), (consumed, passed.first_sample - 1), self.blend))
            samples = (passed.first_sample, passed.last_sample)
            self._add(LedgerEntry((iteration, iteration), samples, self.blend, passed.reason))
            done, consumed = iteration, passed.last_sample + 1
        self._add(LedgerEntry((done + 1, end[0]), (consumed, end[1] - 1), self.blend))

    def write(self) -> None:
        """Put the file in the place of the former one. Raises OSError."""
        text = "".join(f"{json.dumps(asdict(entry))}\n" for entry in self.entries)
        temporary = self.path.with_name(f"{LEDGER}.{os.getpid()}.part")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, self.path)

    def _add(self, entry: LedgerEntry) -> None:
        if entry.iterations[0] > entry.iterations[1]:
            return
        last = self.entries[-1] if self.entries else None
        if (
            last is not None
            and last.skipped is None
            and entry.skipped is None
            and last.blend == entry.blend
            and last.iterations[1] + 1 == entry.iterations[0]
            and last.samples[1] + 1 == entry.samples[0]
        ):
            self.entries[-1] = replace(
                last,
                iterations=(last.iterations[0], entry.iterations[1]),
                samples=(last.samples[0], entry.samples[1]),
            )
        else:
            self.entries.append(entry)
