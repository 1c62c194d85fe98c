# SPDX-License-Identifier: Apache-2.0
"""--result-rejected-tracker-filename: one line for each rejected result, in upstream's form, and what follows.

ts=2026-08-22 10:00:00 node=a device=0 jobID=N/A rank=3 iteration=17 status=initial_run result=nan message='lm loss'
"""

from __future__ import annotations

import datetime
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from megatron.core.errors import ConfigError

_LINE = re.compile(r"jobID=(\S+) rank=([0-9]+) iteration=([0-9]+) status=(\S+) ")
_LASTING = ("rerun_disabled", "first_rerun_reproducible", "second_rerun_reproducible")


@dataclass(frozen=True)
class ResultVerdict:
    """A verdict on one result."""

    node: str
    device: int
    rank: int
    iteration: int
    status: str
    result: float
    message: str


class RejectionLog:
    """Appends to the file; does nothing without one. The rank of the result writes."""

    def __init__(self, path: str | None, job: str) -> None:
        """job: its id, as the launcher calls it."""
        self.path, self._job = None if path is None else Path(path), job
        self.rank = 0

    def open(self, rank: int) -> None:
        """Before training. Raises ConfigError where the file cannot be written."""
        self.rank = rank
        if self.path is not None:
            try:
                self.path.open("a").close()
            except OSError as error:
                raise ConfigError(
                    f"--result-rejected-tracker-filename {self.path} cannot be written ({error.strerror}); give "
                    "another file"
                ) from error

    def add(self, event: ResultVerdict) -> None:
        """Write the event on the rank where it happened."""
        if self.path is None or event.rank != self.rank:
            return
        now = datetime.datetime.now().isoformat(" ", "seconds")
        line = (
            f"ts={now} node={event.node} device={event.device} jobID={self._job} rank={event.rank} "
            f"iteration={event.iteration} status={event.status} result={event.result} message='{event.message}'\n"
        )
        with self.path.open("a") as file:
            file.write(line)

    def list_iterations_to_skip(self) -> set[int]:
        """Iterations, counted from 1, whose results one rank has found wrong twice, unless several ranks of one job
        have: then the data are not the reason."""
        if self.path is None or not self.path.exists():
            return set()
        counts: Counter[tuple[int, str]] = Counter()
        ranks: dict[tuple[int, str], set[str]] = defaultdict(set)
        for match in _LINE.finditer(self.path.read_text(errors="replace")):
            job, rank, iteration, status = match.groups()
            # Upstream writes the name of an enumeration: RerunValidationStatus.INITIAL_RUN.
            if status.rpartition(".")[2].lower() in _LASTING:
                counts[int(iteration), rank] += 1
                ranks[int(iteration), job].add(rank)
        spoiled = {iteration for (iteration, _), found in ranks.items() if len(found) > 1}
        return {iteration for (iteration, _), count in counts.items() if count > 1} - spoiled
