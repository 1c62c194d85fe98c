# SPDX-License-Identifier: Apache-2.0
"""Reasons for which a run ends before --train-iters: Ctrl-C, --exit-interval, --phase-transition-iterations,
--exit-duration-in-mins, --exit-signal-handler.

All of them end it in order: the iteration is finished, and CheckpointHook saves.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from megatron.core.errors import say
from megatron.training.config.container import RunConfig
from megatron.training.hooks.signals import SignalWatch
from megatron.training.hooks.stop_agreement import StopAgreement
from megatron.training.run import Hook, HookContext, Run, StepResult

# Read at import, which comes before setup: a job's time limit counts loading as well.
PROGRAM_STARTED_AT = time.monotonic()
INTERRUPTED = "interrupted"
_SAME_PRESS_SECONDS = 1.0
"""torchrun hands on a Ctrl-C that its processes have had from the terminal already: one key, two signals."""
_INTERRUPT_EXIT_CODE = 130
_RESCUE_SECONDS = 25.0
"""torchrun kills what has not ended 30 seconds after its signal."""


class ExitHook(Hook):
    """Ends the run after the same iteration on all ranks, whichever of them is asked to."""

    def __init__(self, config: RunConfig, clock_started_at: float) -> None:
        """clock_started_at: time.monotonic() when the program started; setup counts as well."""
        training = config.training
        self.interval = training.exit_interval
        self.transitions = frozenset(training.phase_transitions)
        self.longest_seconds = None if training.exit_duration_in_mins is None else 60.0 * training.exit_duration_in_mins
        self.exit_signal = signal.Signals[training.exit_signal] if training.exit_signal_handler else None
        self.save = config.checkpoint.save
        self.saves_beside = config.checkpoint.async_save
        self._clock_started_at = clock_started_at
        self._agreement: StopAgreement | None = None
        self._watch = SignalWatch(self._receive)
        self._interrupted_at: float | None = None
        self._rescue: threading.Timer | None = None
        self._list_ended: Callable[[], list[int]] = list

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> ExitHook:
        """Every run has this hook."""
        return cls(config, PROGRAM_STARTED_AT)

    def on_train_start(self, run: Run) -> None:
        """From here on the signals are noted instead of ending the process."""
        self._agreement = StopAgreement(run.groups.world)
        # A run that only evaluates has no step to finish: Ctrl-C ends it at once.
        signals = set() if run.progress.finished else {signal.SIGINT}
        if self.exit_signal is not None:
            signals.add(self.exit_signal)
        if self.save is not None and run.groups.world.size() > 1 and not run.progress.finished:
            signals.add(signal.SIGTERM)
            others = [rank for rank in range(run.groups.world.size()) if rank != run.groups.world.rank()]
            self._list_ended = lambda: run.list_ended_ranks(others)
        self._watch.open(signals)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Ask for a stop where the time is over; stop where all ranks know of a request."""
        # A user's loop may call only the hooks of a step.
        self._agreement = self._agreement or StopAgreement(run.groups.world)
        elapsed = time.monotonic() - self._clock_started_at
        if self.longest_seconds is not None and elapsed > self.longest_seconds:
            # Clocks differ between ranks: the first one whose time is over asks for all.
            self._agreement.ask(f"exiting program after {elapsed / 60:.1f} minutes")
        self._stop(run, self._agreement.look())
        done = run.progress.iteration
        if done in self.transitions or (self.interval is not None and done % self.interval == 0):
            run.request_stop(f"exiting program at iteration {done}")

    def on_save(self, run: Run) -> None:
        """End the run for what was asked for during a save right after it: another iteration would be saved once
        more."""
        # A save in the background ends at a different moment on each rank, where none can agree.
        if self._agreement is not None and not self.saves_beside:
            self._stop(run, self._agreement.look())

    def on_train_end(self, run: Run) -> None:
        """All is saved by now. Ctrl-C has its usual meaning again: an evaluation that is cut short loses nothing."""
        if self._agreement is not None and run.groups.world.size() == 1:
            self._stop(run, self._agreement.look())
        self._watch.close()

    def on_close(self, run: Run) -> None:
        """Restore the signal handlers that were there before training."""
        if self._rescue is not None:
            self._rescue.cancel()
        self._watch.close()

    def _stop(self, run: Run, reason: str | None) -> None:
        if reason == INTERRUPTED:
            run.interrupted = True
            reason = f"interrupted after iteration {run.progress.iteration}"
        if reason is not None:
            run.request_stop(reason)

    # ---- on the thread of the watch

    def _end_or_wait(self, number: signal.Signals) -> None:
        """End at once, as without a handler, unless a launcher ends what is left of a job that has lost a rank: the
        main thread meets that loss, and has a save to make."""
        if self._list_ended():
            if self._rescue is None:
                self._rescue = threading.Timer(_RESCUE_SECONDS, SignalWatch.pass_on, (number,))
                self._rescue.daemon = True
                self._rescue.start()
            return
        SignalWatch.pass_on(number)

    def _receive(self, number: signal.Signals) -> None:
        assert self._agreement is not None, "the watch is opened later"
        if number == self.exit_signal:
            self._agreement.ask(f"exiting program after signal {number.name}")
            return
        if number == signal.SIGTERM:
            self._end_or_wait(number)
            return
        now = time.monotonic()
        if self._interrupted_at is None:
            self._interrupted_at = now
            self._agreement.ask(INTERRUPTED)
            if self._agreement.rank == 0:
                then = f"saving to {self.save}" if self.save is not None else "ending; nothing is saved without --save"
                again = "press Ctrl-C again to leave at once"
                say(f"{INTERRUPTED}: finishing the iteration, then {then}; {again}", sys.stderr)
        elif now - self._interrupted_at > _SAME_PRESS_SECONDS:
            # Not an exception: the main thread may be in a call that never returns. A checkpoint that is being written
            # has no final name yet, and loader processes end with their parent.
            if self._agreement.rank == 0:
                say(f"{INTERRUPTED}, leaving at once", sys.stderr)
            os._exit(_INTERRUPT_EXIT_CODE)
