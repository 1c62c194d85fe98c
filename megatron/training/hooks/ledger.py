# SPDX-License-Identifier: Apache-2.0
"""Writes `ledger.jsonl` with each checkpoint: which samples have led to it."""

from __future__ import annotations

import sys

from megatron.core.errors import say
from megatron.training.config.container import RunConfig
from megatron.training.rerun.ledger import Ledger
from megatron.training.run import Hook, HookContext, Phase, Run


class LedgerHook(Hook):
    """Keeps the ledger on the first rank. A ledger that cannot be written ends nothing."""

    phase = Phase.WRITE

    def __init__(self, config: RunConfig) -> None:
        assert config.checkpoint.save is not None
        self._ledger = Ledger(config.checkpoint.save, tuple(map(str, config.data.data_path or ("mock data",))))
        self._until = (0, 0)
        self._is_begun = False

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> LedgerHook | None:
        """Return the hook of a run that saves; None for others."""
        return None if config.checkpoint.save is None else cls(config)

    def on_train_start(self, run: Run) -> None:
        """Go on from what the checkpoint had seen."""
        self._begin(run)

    def on_step_start(self, run: Run) -> None:
        """A run that went back to a checkpoint goes on from that one's."""
        if run.progress.iteration < self._until[0]:
            self._begin(run)

    def on_save(self, run: Run) -> None:
        """Write what the checkpoint has seen."""
        saved = run.saved_progress
        if saved is None:
            return
        start, self._until = self._until, (saved.iteration, saved.consumed_train_samples)
        if not run.is_first_rank:
            return
        # The first rank may be lost, and another one come into its place.
        if not self._is_begun:
            self._ledger.begin(*start)
            self._is_begun = True
        self._ledger.extend(start, self._until, run.passed_over)
        try:
            self._ledger.write()
        except OSError as error:
            say(f"warning: {self._ledger.path} was not written: {error.strerror}", sys.stderr)

    def _begin(self, run: Run) -> None:
        self._until, self._is_begun = (run.progress.iteration, run.progress.consumed_train_samples), False
