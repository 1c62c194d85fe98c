# SPDX-License-Identifier: Apache-2.0
"""Crash loops: a run that a launcher starts again and again, and that fails each time at the same place.

`failures.jsonl` in --save has a line for each attempt that ended with an error, and one when an attempt got beyond the
last of them. Three in succession at one iteration, with the same sentence and the same settings, are a crash loop.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.core.config_base import get_settings
from megatron.core.errors import ConfigError
from megatron.training.config.container import RunConfig
from megatron.training.config.run_groups import group_classes
from megatron.training.data.loading import explain_lost_loader
from megatron.training.launch.initialize import explain_lost_peer

FAILURES = "failures.jsonl"
MOST_FAILURES = 3
# Other in each attempt, although the failure is the same.
_CHANGING = re.compile(r"0x[0-9a-f]{6,}|process [0-9]+|\[[^\]]*\]:[0-9]+")
_LONGEST = 2000


@dataclass(frozen=True)
class Failure:
    """The end of one attempt."""

    attempt: int
    iteration: int
    """In which it ended, counted from 1."""
    sentence: str
    settings: str
    """A digest of the settings that the failure may depend on."""
    cause: int | None = None
    """Iteration whose data has brought it about, where values that are read later have shown it."""

    @property
    def place(self) -> tuple[int, str, str]:
        """The part that is equal for failures that repeat each other."""
        return self.iteration, _CHANGING.sub("*", self.sentence), self.settings


class FailureRecord:
    """The failures of the run in a --save directory."""

    def __init__(self, save: str | Path) -> None:
        self.path = Path(save) / FAILURES

    def read(self) -> list[Failure]:
        """The failures since the last progress, one for each attempt. Lines that cannot be read count as none."""
        try:
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []
        found: dict[int, Failure] = {}
        for line in lines:
            try:
                content = json.loads(line)
                if "passed" in content:
                    found = {}
                else:
                    failure = Failure(**content)
                    # Several ranks may have had the same error; the first one speaks for the attempt.
                    found.setdefault(failure.attempt, failure)
            except (ValueError, TypeError):
                continue
        return list(found.values())

    def add(self, failure: Failure) -> None:
        """Note how an attempt ended, unless another rank has. Raises OSError."""
        if all(other.attempt != failure.attempt for other in self.read()):
            self._append(asdict(failure))

    def note_passed(self, iteration: int) -> None:
        """The run has got beyond its last failure: to this iteration. Raises OSError."""
        self._append({"passed": iteration})

    def count_repetitions(self) -> int:
        """Count the failures in succession, up to the last one, that repeat each other."""
        failures = self.read()
        places = [failure.place for failure in failures]
        return next((n for n, place in enumerate(reversed(places)) if place != places[-1]), len(places))

    def explain_loop(self, settings: str) -> str | None:
        """Say why a run with these settings is not to be started; None where it may be."""
        if self.count_repetitions() < MOST_FAILURES:
            return None
        last = self.read()[-1]
        if last.settings != settings:
            return None
        skipped = last.iteration if last.cause is None else last.cause
        return (
            f"--save {self.path.parent}: the run has failed {MOST_FAILURES} times in succession at iteration "
            f"{last.iteration}: {last.sentence}; it does not start again as it is: change its settings "
            f"(--iterations-to-skip {skipped} passes over that data), or remove {self.path} when the cause is "
            "gone"
        )

    def _append(self, content: dict[str, object]) -> None:
        # One write of a whole line: ranks that append at the same moment do not mix theirs.
        with open(self.path, "ab", buffering=0) as file:
            file.write(json.dumps(content).encode() + b"\n")


def describe_failure(error: Exception) -> str | None:
    """Return the sentence of the error that ended a run; None where something outside the process ended it: a lost
    peer, whose failure counts, or a process that was killed."""
    causes = [error, error.__cause__]
    if any(isinstance(e, RuntimeError) and (explain_lost_peer(e) or explain_lost_loader(e)) for e in causes):
        return None
    return (" ".join(str(error).split()) or type(error).__name__)[:_LONGEST]


def digest_settings(config: RunConfig) -> str:
    """Digest all settings except for reports and rehearsals: runs that may fail for another reason."""
    values = config.to_dict()
    kept = {
        name: values[group].get(name)
        for group, config_class in group_classes().items()
        for name, setting in get_settings(config_class).items()
        if setting.kind != "report" and name != "simulate_fault" and not name.startswith("fault_injector")
    }
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


def refuse_crash_loop(config: RunConfig) -> None:
    """Raise ConfigError where the run in --save fails at the same place again and again."""
    if config.checkpoint.save is not None and config.checkpoint.ckpt_convert_format is None:
        problem = FailureRecord(config.checkpoint.save).explain_loop(digest_settings(config))
        if problem is not None:
            raise ConfigError(problem)
