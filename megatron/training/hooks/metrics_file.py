"""metrics.jsonl: what happened at every iteration, for programs to read.

One JSON object per line. A row of training has "iteration", "consumed_samples", "lm loss", "grad_norm", "lr", … ; a row
of an evaluation has "iteration", "split" and "eval": {"lm loss": …}. Numbers have full precision; a value that is not
finite is null. Each line is flushed when written, so a killed run loses nothing but the line it was writing.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, TextIO

from megatron.core.errors import ConfigError, StorageError

FILE_NAME = "metrics.jsonl"


class MetricsFile:
    """Appends rows to DIRECTORY/metrics.jsonl, continuing after the rows of an earlier part of the run."""

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory) / FILE_NAME
        self._file: TextIO | None = None

    def open(self, resumed_iteration: int) -> None:
        """Keep the rows up to `resumed_iteration` and open the file for appending.

        Rows after it belong to iterations that will be done again; so do final evaluations, since the run goes on. A
        run from the start (0) sets a file of an earlier run aside as metrics.jsonl.old. Raises ConfigError when the
        directory cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                self._keep_until(resumed_iteration)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--metrics-dir {self.path.parent} cannot be written ({error.strerror}); give a writable directory"
            ) from error

    def write(self, row: dict[str, Any]) -> None:
        """Append one row. Raises StorageError when the disk does not take it."""
        assert self._file is not None, "MetricsFile.write before open"
        try:
            self._file.write(json.dumps(_finite(row)) + "\n")
            self._file.flush()
        except OSError as error:
            raise StorageError(
                f"{self.path} cannot be written ({error.strerror}); free some space and resume"
            ) from error

    def close(self) -> None:
        """Close the file; harmless when it was never opened."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _keep_until(self, iteration: int) -> None:
        if iteration == 0:
            if self.path.stat().st_size:
                os.replace(self.path, self.path.with_suffix(".jsonl.old"))
            return
        kept = []
        with self.path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                row = _row_or_none(line)
                if row is not None and row.get("iteration", 0) <= iteration and not row.get("final"):
                    kept.append(line)
        partial = self.path.with_suffix(".jsonl.tmp")
        partial.write_text("".join(kept), encoding="utf-8")
        os.replace(partial, self.path)


def _row_or_none(line: str) -> dict[str, Any] | None:
    """The row of a complete line; None for the torn last line of a killed run."""
    if not line.endswith("\n"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
