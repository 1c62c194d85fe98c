# SPDX-License-Identifier: Apache-2.0
"""--hang-timeout: tells the watch for hangs where the run is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.core.errors import say
from megatron.training.config.container import RunConfig
from megatron.training.run import Hook, HookContext, Phase, Run, Step, StepResult, StepWatch

if TYPE_CHECKING:
    from megatron.training.data.loading import Batch


class HangWatchHook(Hook):
    """Notes each step and micro-batch. An evaluation takes what it takes, and is not watched; saves note themselves."""

    # Next to the step: what other hooks do before and after it is no part of it.
    phase = Phase.MEASURE

    def __init__(self, watch: StepWatch) -> None:
        self._watch = watch

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> HangWatchHook | None:
        """Return the hook of a run that is watched."""
        return None if context.watch is None else cls(context.watch)

    def wrap_step(self, step: Step) -> Step:
        """The same step, whose micro-batches are counted."""

        def count_microbatches(run: Run, batches: Iterator[Batch]) -> None:
            step(run, self._watch.count(batches))

        return count_microbatches

    def on_step_start(self, run: Run) -> None:
        """Note that the step begins."""
        self._watch.begin_step(run.progress.iteration + 1)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Note that it is over; say, once, for how long the following ones may be silent."""
        limit = self._watch.end_step()
        if limit is not None and run.is_first_rank:
            say(f"note: a step that makes no progress for {limit:.0f} s is taken for hung (--hang-timeout)")

    def on_error(self, run: Run, error: Exception) -> None:
        """End the step: a last save that follows is none."""
        self._watch.end_step()

    def on_close(self, run: Run) -> None:
        """Leave in order."""
        self._watch.close()
