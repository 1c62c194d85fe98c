# SPDX-License-Identifier: Apache-2.0
"""Notes in --save how attempts of a run end, so that one that fails again and again is not started for ever."""

from __future__ import annotations

import sys

from megatron.core.dist_checkpointing.agreement import on_first_rank
from megatron.core.errors import NonFiniteError, say
from megatron.training.config.container import RunConfig
from megatron.training.launch.crash_loop import (
    MOST_FAILURES,
    Failure,
    FailureRecord,
    describe_failure,
    digest_settings,
)
from megatron.training.run import Hook, HookContext, Run


class CrashLoopHook(Hook):
    """Writes the record that `refuse_crash_loop` reads before a run begins. A record that cannot be written ends
    nothing."""

    def __init__(self, config: RunConfig) -> None:
        assert config.checkpoint.save is not None
        self._record = FailureRecord(config.checkpoint.save)
        self._settings = digest_settings(config)
        self._attempt = 1
        self._iteration = 0
        self._failed_at: int | None = None
        """Iteration in which the attempt before this one ended, until the run is beyond that."""

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> CrashLoopHook | None:
        """Return the hook of a run that saves; None for others."""
        return None if config.checkpoint.save is None else cls(config)

    def on_train_start(self, run: Run) -> None:
        """Number this attempt, for all ranks alike."""
        failures = on_first_rank(run.groups.world, self._record.read)
        self._attempt = 1 + max([0, *(failure.attempt for failure in failures)])
        self._failed_at = max([failure.iteration for failure in failures], default=None)

    def on_step_start(self, run: Run) -> None:
        """Note where the run is, and when it is farther than the attempts before."""
        self._iteration = run.progress.iteration + 1
        if self._failed_at is not None and self._iteration > self._failed_at:
            self._failed_at = None
            if run.is_first_rank:
                try:
                    self._record.note_passed(self._iteration)
                except OSError as error:
                    _warn(error)

    def on_error(self, run: Run, error: Exception) -> None:
        """Note the failure, and say when it is one too many."""
        sentence = describe_failure(error)
        if sentence is None:
            return
        cause = error.iteration if isinstance(error, NonFiniteError) else None
        try:
            self._record.add(Failure(self._attempt, self._iteration, sentence, self._settings, cause))
        except OSError as problem:
            _warn(problem)
            return
        if self._record.count_repetitions() >= MOST_FAILURES:
            say(f"note: {self._record.explain_loop(self._settings)}", sys.stderr)


def _warn(error: OSError) -> None:
    say(f"warning: {error.filename}: {error.strerror}; this failure does not count towards a crash loop", sys.stderr)
