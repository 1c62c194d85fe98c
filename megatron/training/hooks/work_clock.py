# SPDX-License-Identifier: Apache-2.0
"""A rank's work in an iteration, phase by phase: fetching data, forward, backward, the optimizer's update. The rest
of an iteration is communication, and waiting: for other ranks, or for a processor that another program has.

Backward begins when the gradient of a chunk's output arrives, and ends with the engine's pass. Only marks are taken on
the way (device.py), so that nothing waits for the device before the times are read.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.device import Mark, mark, measure_seconds_between
from megatron.training.run import Run

if TYPE_CHECKING:
    from megatron.training.data.loading import Batch

DATA, FORWARD, BACKWARD, OPTIMIZER = OWN_WORK = ("data", "forward", "backward", "optimizer")
REST, QUEUE = "communication", "processor wait"
PHASES = (*OWN_WORK, REST, QUEUE)
"""Of an iteration; QUEUE is the part of REST in which the process could have computed, but had no processor."""


class PhaseTime(NamedTuple):
    """Milliseconds of one phase in an iteration, over several: the mean, for reports; for comparisons the median, which
    a few disturbed iterations do not move, and its standard error."""

    milliseconds: float
    error: float
    median: float | None = None
    """The mean stands for it where it is not known."""

    @property
    def usual(self) -> float:
        """Milliseconds in most iterations."""
        return self.milliseconds if self.median is None else self.median


class ProcessorQueue:
    """The time that the thread which makes this has waited for a processor, as Linux counts it; 0 elsewhere."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._file: io.FileIO | None = None
        # Other systems have no such file, and kernels that do not count neither.
        with contextlib.suppress(OSError):
            self._file = io.FileIO("/proc/thread-self/schedstat")

    def read_seconds(self) -> float:
        """The seconds so far."""
        if self._file is not None:
            # A thread that has ended is counted no further; a report must not end the run for it.
            with contextlib.suppress(OSError):
                # Nanoseconds on a processor, nanoseconds in the queue for one, times that it was given one.
                self._seconds = 1e-9 * int(os.pread(self._file.fileno(), 64, 0).split()[1])
        return self._seconds


class WorkClock:
    """Times the iterations of a run, from `attach` on."""

    def __init__(self) -> None:
        self._queue = ProcessorQueue()
        self._marks: list[tuple[str, Mark, Mark]] = []
        """Of the iteration under way."""
        self._begun: list[Mark] = []
        """Of the forward passes under way."""
        self._data_seconds = 0.0
        self._began: Mark | None = None
        self._queued_before = 0.0
        self._iterations: list[tuple[list[tuple[str, Mark, Mark]], dict[str, float], Mark, Mark]] = []

    def attach(self, run: Run) -> None:
        """Take marks around the forward and backward passes of the run's chunks, and around its updates."""
        for chunk in run.model:
            chunk.module.register_forward_pre_hook(self._begin_forward)
            chunk.module.register_forward_hook(self._end_forward)
        run.optimizer.around_update = self._time_update

    def _mark(self) -> Mark:
        """Return the time by a clock that stops while this process has no processor; on a GPU, by the GPU's clock."""
        moment = mark()
        return moment - self._queue.read_seconds() if isinstance(moment, float) else moment

    def _begin_forward(self, *_: Any) -> None:
        self._begun.append(self._mark())

    def _end_forward(self, module: nn.Module, _: Any, output: Any) -> None:
        self._marks.append((FORWARD, self._begun.pop(), self._mark()))
        parts = output if isinstance(output, tuple) else (output,)
        last = next((part for part in parts if isinstance(part, Tensor) and part.requires_grad), None)
        if last is not None and torch.is_grad_enabled():
            last.register_hook(self._begin_backward)

    def _begin_backward(self, _: Tensor) -> None:
        begun = self._mark()
        # Called when the pass that is under way has computed all gradients.
        torch.autograd.Variable._execution_engine.queue_callback(
            lambda: self._marks.append((BACKWARD, begun, self._mark()))
        )

    @contextlib.contextmanager
    def _time_update(self) -> Iterator[None]:
        begun = self._mark()
        yield
        self._marks.append((OPTIMIZER, begun, self._mark()))

    def time_data(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the same micro-batches, whose fetching is timed."""
        while True:
            begun, queued = time.perf_counter(), self._queue.read_seconds()
            batch = next(batches)
            self._data_seconds += time.perf_counter() - begun - (self._queue.read_seconds() - queued)
            yield batch

    def begin_iteration(self) -> None:
        """Forget what an evaluation has added."""
        self._data_seconds, self._queued_before = 0.0, self._queue.read_seconds()
        self._marks, self._began = [], mark()

    def end_iteration(self) -> None:
        """Keep the iteration that began last."""
        if self._began is not None:
            of_host = {DATA: self._data_seconds, QUEUE: self._queue.read_seconds() - self._queued_before}
            self._iterations.append((self._marks, of_host, self._began, mark()))

    def read(self) -> dict[str, PhaseTime]:
        """Return the phases of the iterations (one or more) since the last call, and reset. Waits for the device."""
        found: dict[str, list[float]] = defaultdict(list)
        for marks, of_host, began, ended in self._iterations:
            seconds = dict.fromkeys(PHASES, 0.0) | of_host
            for phase, begun, done in marks:
                seconds[phase] += measure_seconds_between(begun, done)
            work = sum(seconds[phase] for phase in OWN_WORK)
            seconds[REST] = max(0.0, measure_seconds_between(began, ended) - work)
            for phase, value in seconds.items():
                found[phase].append(1e3 * value)
        self._iterations = []
        return {phase: _summarise(values) for phase, values in found.items()}


def _summarise(values: list[float]) -> PhaseTime:
    # By hand: `statistics` computes in fractions, and takes a hundred times as long.
    count, mean, ordered = len(values), sum(values) / len(values), sorted(values)
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    # Half of the values are between the quartiles, which of a normal distribution are 1.35 standard deviations apart;
    # the median of such values has an error 1.25 times as large as their mean's.
    deviation = (ordered[(3 * count) // 4] - ordered[(count - 1) // 4]) / 1.35 if count > 1 else 0.0
    return PhaseTime(mean, 1.25 * deviation / math.sqrt(count), middle)
