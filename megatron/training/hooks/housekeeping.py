# SPDX-License-Identifier: Apache-2.0
"""Upkeep of a process: Python garbage, cached device memory, the time limit of collectives."""

from __future__ import annotations

import gc
from datetime import timedelta

from megatron.core.device import release_cached_memory
from megatron.training.config.container import RunConfig
from megatron.training.config.training import TrainingConfig
from megatron.training.run import Evaluation, Hook, HookContext, Run, StepResult


class GarbageCollectionHook(Hook):
    """--manual-gc: no automatic collection, but one every --manual-gc-interval iterations, at which all ranks pause
    together."""

    def __init__(self, config: TrainingConfig) -> None:
        self.interval = config.manual_gc_interval
        self.around_evaluation = config.manual_gc_eval

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> GarbageCollectionHook | None:
        """Return the hook for --manual-gc; None where it is not asked for."""
        return cls(config.training) if config.training.manual_gc else None

    def on_train_start(self, run: Run) -> None:
        """Collect once and switch automatic collection off."""
        # A collection on one rank makes all others wait at the next collective; at fixed iterations they pause
        # together.
        gc.disable()
        gc.collect()

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Collect garbage every --manual-gc-interval iterations."""
        if self.interval and run.progress.iteration % self.interval == 0:
            gc.collect()

    def on_evaluate(self, run: Run, evaluation: Evaluation) -> None:
        """Collect what the evaluation has left, with --manual-gc-eval."""
        if self.around_evaluation:
            gc.collect()

    def on_close(self, run: Run) -> None:
        """Switch automatic collection on again."""
        gc.enable()


class FreeMemoryHook(Hook):
    """--empty-unused-memory-level: gives cached memory back to the device, once or twice in each step."""

    def __init__(self, level: int) -> None:
        self.level = level

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> FreeMemoryHook | None:
        """Return the hook for --empty-unused-memory-level; None where it is not asked for."""
        level = config.training.empty_unused_memory_level
        return cls(level) if level >= 1 else None

    def on_gradients(self, run: Run) -> None:
        """Free cached memory after forward and backward."""
        release_cached_memory()

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Free cached memory after the update, at level 2."""
        # Returning memory makes the allocator ask for it again in the next step: slow, hence not at level 1.
        if self.level >= 2:
            release_cached_memory()


class CollectiveTimeoutHook(Hook):
    """--distributed-timeout-seconds-after-init: another time limit for all groups of this process after the first
    iteration, with which loading and compiling, which take long, are over."""

    def __init__(self, seconds: int) -> None:
        self.limit = timedelta(seconds=seconds)
        self._is_set = False

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> CollectiveTimeoutHook | None:
        """Return the hook for --distributed-timeout-seconds-after-init; None where it is not asked for."""
        seconds = config.distributed.distributed_timeout_seconds_after_init
        return None if seconds is None else cls(seconds)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Set the limit after the first iteration of this process."""
        # Not in on_train_start: the first step still compiles kernels and opens connections.
        if not self._is_set:
            run.groups.set_timeout(self.limit)
            self._is_set = True
