# SPDX-License-Identifier: Apache-2.0
"""What an item of `python -m benchmarks gpu` may use, and where its findings go."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks.conditions import describe_conditions
from benchmarks.forms import Form, list_fitting_forms
from benchmarks.gpu import ROOT, write_atomically
from benchmarks.measurements import choose_dtype
from benchmarks.training import PRESETS, Preset, build_flags, shrink

LAST_STEPS_SHARE = 0.8
"""Of an item's time, after which no further step is begun."""


class Part:
    """The time, the sizes and the results of one item."""

    def __init__(
        self, path: Path, seconds: float, python: Sequence[str], *, is_tiny: bool, scratch: Path | None = None
    ) -> None:
        """scratch: for files that nobody needs afterwards; whoever gave it removes it. The system's when None."""
        self.path, self.python, self.is_tiny, self.scratch = path, list(python), is_tiny, scratch
        self.seconds = seconds
        self.began_at = time.monotonic()
        self.found: dict[str, Any] = {"state": "running", "conditions": describe_conditions(), "results": {}}

    def note(self, headline: str | None = None, **results: Any) -> None:
        """Keep results, and the line of the table."""
        self.found["results"].update(results)
        if headline is not None:
            self.found["headline"] = headline
        write_atomically(self.path, self.found)

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: IO[str]) -> subprocess.Popen[bytes]:
        """Start a process beside this one, which ends with it."""
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def deadline(self, share: float = LAST_STEPS_SHARE) -> float:
        """Of time.monotonic(): when so much of the time is over."""
        return self.began_at + share * self.seconds

    def preset(self, name: str) -> Preset:
        """A preset, small with --tiny."""
        return shrink(PRESETS[name]) if self.is_tiny else PRESETS[name]

    def find_forms(self, preset: Preset, *variants: str) -> list[Form]:
        """The forms of a preset in which the memory formula says that it fits with each of these flags, the largest
        first; which one that is, is noted. Raises MemoryShortageError where none does."""
        forms = list_fitting_forms(preset, choose_dtype(), variants or ("",))
        self.note(form=forms[0].describe())
        return forms

    def flags(self, preset: Preset, iterations: int, more: str = "") -> list[str]:
        """The flags of a run of the preset in this device's number format."""
        return build_flags(preset, choose_dtype(), iterations, more.split())
