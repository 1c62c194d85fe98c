# SPDX-License-Identifier: Apache-2.0
"""--log-straggler: how long each rank computes forward and waits for data, and which rank is slower than its peers.

Timed are forward passes, without the fetching of their batches: there a rank waits for no other one, but for those of
its tensor- and context-parallel group, which are as slow as the slowest of them. The line is upstream's: the ranks with
the least and the most of a forward pass (Rtt, ms in an iteration), of fetching data (DRtt), and of throughput (Etpt,
TFLOP/s, by a third of the operations of forward and backward).
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.core.collectives import all_gather_object
from megatron.core.device import Mark, mark, measure_seconds_between
from megatron.core.errors import say
from megatron.training.config.container import RunConfig
from megatron.training.config.reliability import ReliabilityConfig
from megatron.training.run import Hook, HookContext, Phase, Run, Step, StepResult

if TYPE_CHECKING:
    from megatron.training.data.loading import Batch

_REPORTS = 3
"""A rank is named when it was slow in so many reports in succession."""
_SHARE = 0.1
_DEVIATIONS = 5.0
"""Slow is what is above the median by a tenth of it, and by so many median deviations from it."""


class RankTimes(NamedTuple):
    """Of one rank, per iteration of an interval."""

    host: str
    forward_ms: float
    data_ms: float
    is_on: bool
    """State of this rank's switch; the first rank's counts."""


@dataclass(frozen=True)
class Suspect:
    """A rank that is slower than its peers in one phase."""

    rank: int
    phase: str
    milliseconds: float
    median: float


def find_slow_ranks(phase: str, milliseconds: Sequence[float], least: float = 0.0) -> list[Suspect]:
    """Return the ranks whose time is far above the others': by the median and the median deviation from it, which
    a few slow ranks do not move. Two ranks have no majority: the slower one is compared with the faster one. least: a
    smaller difference, in ms, matters to nobody."""
    if len(milliseconds) < 2:
        return []
    median = min(milliseconds) if len(milliseconds) == 2 else statistics.median(milliseconds)
    deviation = statistics.median(abs(value - median) for value in milliseconds) if len(milliseconds) > 2 else 0.0
    limit = median + max(least, _SHARE * median, _DEVIATIONS * deviation)
    return [Suspect(rank, phase, value, median) for rank, value in enumerate(milliseconds) if value > limit]


def describe_times(times: Sequence[RankTimes], flops_per_second: float, largest: int) -> list[str]:
    """Return the report's lines. flops_per_second: of the whole model in TFLOP/s times ms of forward; largest: how many
    of the slowest and fastest ranks are listed, none where it is 1."""
    forward = [t.forward_ms for t in times]
    rates = [flops_per_second / ms if ms else 0.0 for ms in forward]
    parts = [
        *_describe_extremes("Rtt", forward, "{:.2f}ms"),
        *_describe_extremes("DRtt", [t.data_ms for t in times], "{:.2f}ms"),
        *_describe_extremes("Etpt", rates, "{:.2f}TF"),
    ]
    lines = [f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] | {' | '.join(parts)} |"]
    if 1 < largest < len(times):
        order = sorted(range(len(times)), key=lambda rank: rates[rank])
        for name, what, ranks in (("Bottom", "lowest", order), ("Top", "highest", order[::-1])):
            listed = ", ".join(f"{rates[rank]:.2f}/{rank}" for rank in ranks[:largest])
            lines.append(f"^^^^ {name:6} {largest} Ranks with {what} Etpt(TF): {listed}")
    return lines


def _describe_extremes(name: str, values: Sequence[float], form: str) -> Iterator[str]:
    for word, choose in (("Mn", min), ("Mx", max)):
        rank = choose(range(len(values)), key=lambda rank: values[rank])
        yield f"{word}{name}/Rnk: {form.format(values[rank])}/{rank}"


class StragglerHook(Hook):
    """Gathers the times of all ranks every --log-interval iterations, and prints on the first one."""

    phase = Phase.MEASURE
    is_collective = True

    def __init__(self, settings: ReliabilityConfig, log_interval: int) -> None:
        self._settings, self._log_interval = settings, log_interval
        self._is_on = not settings.disable_straggler_on_startup
        self._forward: list[tuple[Mark, Mark]] = []
        self._data_seconds = 0.0
        self._iterations = 0
        self._tokens = 0
        self._slow: Counter[tuple[str, int]] = Counter()
        """(phase, rank) -> reports in succession in which it was slow."""
        self._switch: socket.socket | None = None

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> StragglerHook | None:
        """Return the hook for --log-straggler; None where it is not asked for."""
        settings = config.reliability
        return cls(settings, config.logger.log_interval) if settings.log_straggler else None

    def on_train_start(self, run: Run) -> None:
        """Time forward passes; on the first rank, listen for whoever switches reports on and off."""
        begun: list[Mark] = []

        def begin(*_: Any) -> None:
            begun.append(mark())

        def end(*_: Any) -> None:
            self._forward.append((begun.pop(), mark()))

        for chunk in run.model:
            chunk.module.register_forward_pre_hook(begin)
            chunk.module.register_forward_hook(end)
        if run.is_first_rank:
            self._listen()

    def wrap_step(self, step: Step) -> Step:
        """The same step, whose fetching of data is timed."""

        def time_data(run: Run, batches: Iterator[Batch]) -> None:
            step(run, self._time(batches))

        return time_data

    def _time(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            begun = time.perf_counter()
            batch = next(batches)
            self._data_seconds += time.perf_counter() - begun
            yield batch

    def on_step_start(self, run: Run) -> None:
        """Forget what an evaluation has added."""
        if self._iterations == 0:
            self._forward.clear()

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Report at the interval. Every rank takes part, also where reports are switched off: who knows may be
        another one."""
        self._iterations += 1
        self._tokens += result.samples * run.seq_length
        if run.progress.iteration % self._log_interval:
            return
        seconds = sum(measure_seconds_between(begun, ended) for begun, ended in self._forward)
        own = RankTimes(
            socket.gethostname(), 1e3 * seconds / self._iterations, 1e3 * self._data_seconds / self._iterations,
            self._is_on,
        )  # fmt: skip
        times = all_gather_object(own, run.groups.world)
        if run.is_first_rank and times[0].is_on:
            self._report(run, times)
        self._forward.clear()
        self._iterations = self._tokens = 0
        self._data_seconds = 0.0

    def _report(self, run: Run, times: Sequence[RankTimes]) -> None:
        # Forward is a third of forward and backward; TFLOP/s x ms of one rank's share.
        work = (run.flops_per_token or 0.0) * self._tokens / self._iterations / 3 / len(times) / 1e9
        for line in describe_times(times, work, self._settings.straggler_minmax_count):
            say(line)
        forward = [t.forward_ms for t in times]
        # Fetching takes next to nothing where loaders read ahead: twice of that is not slow.
        least = _SHARE * statistics.median(forward)
        found = [
            *find_slow_ranks("forward", forward),
            *find_slow_ranks("fetching data", [t.data_ms for t in times], least),
        ]
        for key in set(self._slow) - {(suspect.phase, suspect.rank) for suspect in found}:
            del self._slow[key]
        for suspect in found:
            self._slow[suspect.phase, suspect.rank] += 1
            if self._slow[suspect.phase, suspect.rank] == _REPORTS:
                say(
                    f"warning: rank {suspect.rank} ({times[suspect.rank].host}) is slow in {suspect.phase}: "
                    f"{suspect.milliseconds:.1f} ms in an iteration, where the usual is {suspect.median:.1f} ms, in "
                    f"{_REPORTS} reports in succession"
                )

    # ---- the switch

    def _listen(self) -> None:
        try:
            # On this machine alone: whoever can reach the port can switch.
            self._switch = socket.create_server(("127.0.0.1", self._settings.straggler_ctrlr_port))
        except OSError as error:
            port = self._settings.straggler_ctrlr_port
            say(f"note: --straggler-ctrlr-port {port} is not to be had ({error.strerror}); reports cannot be switched")
            return
        threading.Thread(target=self._serve, args=(self._switch,), name="straggler switch", daemon=True).start()

    def _serve(self, switch: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = switch.accept()
                self._is_on = not self._is_on
                body = f"straggler reports are {'on' if self._is_on else 'off'} from the next interval on\n"
                head = f"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n\r\n"
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(1.0)
                    connection.recv(4096)
                    connection.sendall((head + body).encode())

    def on_close(self, run: Run) -> None:
        """Stop listening."""
        if self._switch is not None:
            self._switch.close()
