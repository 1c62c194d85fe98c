# SPDX-License-Identifier: Apache-2.0
"""Choice of the iterations that are done: all but the ones of --iterations-to-skip."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from megatron.core.errors import say
from megatron.training.config.container import RunConfig
from megatron.training.run import Hook, HookContext, Run, Step

if TYPE_CHECKING:
    from megatron.training.data.loading import Batch


class SkipIterationsHook(Hook):
    """Takes the data of some iterations, counted from 1 as the log does, and does nothing with it.

    Neither weights nor the learning rate change, and nothing periodic happens.
    """

    def __init__(self, iterations: Collection[int]) -> None:
        self.iterations = frozenset(iterations)

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> SkipIterationsHook | None:
        """Return the hook for --iterations-to-skip; None where it is not asked for."""
        return cls(config.training.iterations_to_skip) if config.training.iterations_to_skip else None

    def wrap_step(self, step: Step) -> Step:
        """The step, or in its place as many microbatches as it would use."""

        def step_or_skip(run: Run, batches: Iterator[Batch]) -> None:
            iteration = run.progress.iteration + 1
            if iteration not in self.iterations:
                step(run, batches)
                return
            # The microbatches are taken, not trained on: later iterations see the samples they would see without the
            # flag.
            for _ in range(run.num_microbatches):
                next(batches)
            run.pass_over(f"--iterations-to-skip {iteration}")
            if run.is_first_rank:
                say(f"iteration {iteration} is passed over: --iterations-to-skip {iteration}")

        return step_or_skip
