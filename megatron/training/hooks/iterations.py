"""Which iterations are done: those of --iterations-to-skip are not, and a run may end before --train-iters.

--exit-interval, --exit-duration-in-mins and --exit-signal-handler stop in order: CheckpointHook saves at the end.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch

from megatron.core.collectives import all_reduce
from megatron.core.errors import say
from megatron.training.config.container import RunConfig
from megatron.training.config.training import TrainingConfig
from megatron.training.run import Hook, HookContext, Run, Step, StepResult

if TYPE_CHECKING:
    from megatron.training.data.loading import Batch

# Read at import, which comes before setup: a job's time limit counts loading as well.
PROGRAM_STARTED_AT = time.monotonic()


class SkipIterationsHook(Hook):
    """Takes the data of some iterations, counted from 0, and does nothing with it.

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
            if run.progress.iteration not in self.iterations:
                step(run, batches)
                return
            samples = run.batch_size.running_global_batch_size(run.progress.consumed_train_samples)
            # The microbatches are taken, not trained on: later iterations see the samples they would see without the
            # flag.
            for _ in range(run.num_microbatches):
                next(batches)
            # Not "skipped": that counts updates that were not applied because of their gradients.
            run.progress.advance(samples, skipped=False)
            if run.is_first_rank:
                done = run.progress.iteration
                say(f"iteration {done} is passed over: --iterations-to-skip {done - 1}")

        return step_or_skip


class ExitConditionsHook(Hook):
    """Asks for a stop when an iteration or a duration is reached."""

    def __init__(self, config: TrainingConfig, clock_started_at: float) -> None:
        """clock_started_at: time.monotonic() when the program started; setup counts as well."""
        self.interval = config.exit_interval
        self.longest_seconds = None if config.exit_duration_in_mins is None else 60.0 * config.exit_duration_in_mins
        self._started_at = clock_started_at

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> ExitConditionsHook | None:
        """Return the hook for --exit-interval and --exit-duration-in-mins; None where it is not asked for."""
        training = config.training
        is_asked_for = training.exit_interval is not None or training.exit_duration_in_mins is not None
        return cls(training, PROGRAM_STARTED_AT) if is_asked_for else None

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Compare. Clocks differ between ranks, so the duration is decided together, for which the host waits."""
        if self.longest_seconds is not None:
            # All ranks must stop after the same iteration, or the others would wait for ever in the next collective.
            elapsed = reduce_to_maximum(run, time.monotonic() - self._started_at)
            if elapsed > self.longest_seconds:
                run.request_stop(f"exiting program after {elapsed / 60:.1f} minutes")
        if self.interval is not None and run.progress.iteration % self.interval == 0:
            run.request_stop(f"exiting program at iteration {run.progress.iteration}")


class ExitSignalHook(Hook):
    """Asks for a stop after the iteration in which any rank has got the signal."""

    def __init__(self, name: str) -> None:
        self.signal = signal.Signals[name]
        self._previous: Any = None
        self._received = False

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> ExitSignalHook | None:
        """Return the hook for --exit-signal-handler; None where it is not asked for."""
        return cls(config.training.exit_signal) if config.training.exit_signal_handler else None

    def on_train_start(self, run: Run) -> None:
        """From here on the signal is noted instead of ending the process."""
        # Handlers run between two Python instructions of the main thread; all they may do safely is to note the signal.
        self._previous = signal.signal(self.signal, self._note)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Request a stop where any rank has received the signal. The host waits for all ranks."""
        if reduce_to_maximum(run, float(self._received)):
            run.request_stop(f"exiting program after signal {self.signal.name}")

    def on_close(self, run: Run) -> None:
        """Restore the signal handler that was there before training."""
        if self._previous is not None:
            signal.signal(self.signal, self._previous)
            self._previous = None

    def _note(self, number: int, frame: Any) -> None:
        self._received = True


def reduce_to_maximum(run: Run, number: float) -> float:
    """The largest of all ranks' numbers. Every rank takes part."""
    # On the device, because NCCL only communicates between GPUs.
    largest = torch.tensor(number, device=run.device)
    all_reduce(largest, run.groups.world, op="max")
    return float(largest)
