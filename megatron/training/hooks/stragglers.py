# SPDX-License-Identifier: Apache-2.0
"""--log-straggler: how long each rank works in each phase of an iteration, and which rank is slower than its peers.

Only a rank's own work is timed (work_clock.py): there it waits for no other rank, except in its tensor- and
context-parallel group, which are as slow as the slowest of them. The first line is upstream's: the ranks with the least
and the most of a forward pass (Rtt, ms in an iteration), of fetching data (DRtt), and of throughput (Etpt, TFLOP/s, by
a third of the operations of forward and backward).
"""

from __future__ import annotations

import contextlib
import math
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megatron.core.collectives import all_gather_into_tensor, all_gather_object
from megatron.core.errors import say
from megatron.training.config.container import RunConfig
from megatron.training.config.reliability import ReliabilityConfig
from megatron.training.hooks.work_clock import DATA, FORWARD, OWN_WORK, PHASES, QUEUE, REST, PhaseTime, WorkClock
from megatron.training.run import Hook, HookContext, Phase, Run, Step, StepResult

if TYPE_CHECKING:
    from megatron.training.data.loading import Batch

_MOST_NOTED = 64
"""Ranks, the slowest ones, in events.jsonl."""
_REPORTS = 3
"""A rank is named when it was slow in so many reports in succession."""
_SHARE = 0.1
_DEVIATIONS = 5.0
_ERRORS = 3.0
"""Slow is what is above the median by a tenth of it, by so many median deviations of the ranks from it, and by so many
standard errors of the difference over the iterations of a report."""
_LEAST_SHARE_OF_WORK = 0.05
"""Smallest share of a rank's work in an iteration that counts as a phase of it."""


class RankTimes(NamedTuple):
    """Of one rank, per iteration of an interval."""

    host: str
    stage: int
    """Of the pipeline: only ranks of one stage do the same work."""
    phases: dict[str, PhaseTime]

    @property
    def work_ms(self) -> float:
        """Milliseconds of its work."""
        return sum(self.phases[phase].usual for phase in OWN_WORK)

    @property
    def queued_ms(self) -> float:
        """Milliseconds without a processor, which other programs had."""
        return self.phases[QUEUE].usual


@dataclass(frozen=True)
class Suspect:
    """A rank that is slower than its peers in one phase."""

    rank: int
    phase: str
    milliseconds: float
    median: float


def find_slow_ranks(
    phase: str, milliseconds: Sequence[float], least: float = 0.0, errors: Sequence[float] = ()
) -> list[Suspect]:
    """Return the ranks whose time is far above the others': by the median and the median deviation from it, which
    a few slow ranks do not move. Two ranks have no majority: the slower one is compared with the faster one. least: a
    smaller difference, in ms, matters to nobody. errors: standard errors of the times."""
    if len(milliseconds) < 2:
        return []
    errors = errors or [0.0] * len(milliseconds)
    usual_error = statistics.median(errors)
    median = min(milliseconds) if len(milliseconds) == 2 else statistics.median(milliseconds)
    deviation = statistics.median(abs(value - median) for value in milliseconds) if len(milliseconds) > 2 else 0.0
    least = max(least, _SHARE * median, _DEVIATIONS * deviation)
    return [
        Suspect(rank, phase, value, median)
        for rank, (value, error) in enumerate(zip(milliseconds, errors, strict=True))
        if value > median + max(least, _ERRORS * math.hypot(error, usual_error))
    ]


def find_suspects(times: Sequence[RankTimes]) -> list[Suspect]:
    """Return the ranks that are slower in a phase of work than the others of their pipeline stage."""
    found = []
    for stage in sorted({t.stage for t in times}):
        peers = [rank for rank, t in enumerate(times) if t.stage == stage]
        least = _LEAST_SHARE_OF_WORK * statistics.median(times[rank].work_ms for rank in peers)
        for phase in OWN_WORK:
            taken = [times[rank].phases[phase] for rank in peers]
            suspects = find_slow_ranks(phase, [t.usual for t in taken], least, [t.error for t in taken])
            found += [replace(suspect, rank=peers[suspect.rank]) for suspect in suspects]
    # Where programs outnumber the processors, those that fetch data wait for one unseen.
    return [s for s in found if s.phase != DATA or times[s.rank].queued_ms <= _SHARE * times[s.rank].work_ms]


def describe_times(times: Sequence[RankTimes], flops_per_second: float, largest: int) -> list[str]:
    """Return the report's lines. flops_per_second: of the whole model in TFLOP/s times ms of forward; largest: how many
    of the slowest and fastest ranks are listed, none where it is 1."""
    forward, data = ([t.phases[phase].milliseconds for t in times] for phase in (FORWARD, DATA))
    rates = [flops_per_second / ms if ms else 0.0 for ms in forward]
    parts = [
        *_describe_extremes("Rtt", forward, "{:.2f}ms"),
        *_describe_extremes("DRtt", data, "{:.2f}ms"),
        *_describe_extremes("Etpt", rates, "{:.2f}TF"),
    ]
    lines = [f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] | {' | '.join(parts)} |"]
    if 1 < largest < len(times):
        order = sorted(range(len(times)), key=lambda rank: rates[rank])
        for name, what, ranks in (("Bottom", "lowest", order), ("Top", "highest", order[::-1])):
            listed = ", ".join(f"{rates[rank]:.2f}/{rank}" for rank in ranks[:largest])
            lines.append(f"^^^^ {name:6} {largest} Ranks with {what} Etpt(TF): {listed}")
    work = ", ".join(_describe_phase(phase, times) for phase in OWN_WORK)
    rest = f"{_describe_phase(REST, times)}, waiting included, of which {_describe_phase(QUEUE, times)}"
    return [*lines, f"own work in an iteration, median and slowest rank: {work}; {rest}"]


def _describe_phase(phase: str, times: Sequence[RankTimes]) -> str:
    taken = [t.phases[phase].milliseconds for t in times]
    slowest = max(range(len(taken)), key=taken.__getitem__)
    return f"{phase} {statistics.median(taken):.2f} and {taken[slowest]:.2f} ms (rank {slowest})"


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
        self._clock = WorkClock()
        self._iterations = 0
        self._tokens = 0
        self._slow: Counter[tuple[str, int]] = Counter()
        """(phase, rank) -> reports in succession in which it was slow."""
        self._switch: socket.socket | None = None
        self._places: list[tuple[str, int]] = []
        """Host and pipeline stage of each rank."""

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> StragglerHook | None:
        """Return the hook for --log-straggler; None where it is not asked for."""
        settings = config.reliability
        return cls(settings, config.logger.log_interval) if settings.log_straggler else None

    def on_train_start(self, run: Run) -> None:
        """Time this rank's work; on the first rank, listen for requests to switch reports on or off."""
        self._clock.attach(run)
        self._places = all_gather_object((socket.gethostname(), run.groups.pp.rank()), run.groups.world)
        if run.is_first_rank:
            self._listen()

    def wrap_step(self, step: Step) -> Step:
        """The same step, whose fetching of data is timed."""

        def time_data(run: Run, batches: Iterator[Batch]) -> None:
            step(run, self._clock.time_data(batches))

        return time_data

    def on_step_start(self, run: Run) -> None:
        """Begin an iteration."""
        self._clock.begin_iteration()

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Report at the interval. Every rank takes part, also where reports are switched off: who knows may be
        another one."""
        self._clock.end_iteration()
        self._iterations += 1
        self._tokens += result.samples * run.seq_length
        if run.progress.iteration % self._log_interval:
            return
        found = self._gather(run)
        # The first rank's metrics are those that are written.
        if run.is_first_rank and self._is_on:
            times = [
                RankTimes(host, stage, {phase: PhaseTime(*row) for phase, row in zip(PHASES, rows, strict=True)})
                for (host, stage), rows in zip(self._places, found.tolist(), strict=True)
            ]
            for phase in OWN_WORK:
                taken = [t.phases[phase].milliseconds for t in times]
                run.metrics.record(f"{phase}-ms-of-slowest-rank", max(taken), reduce="last")
                run.metrics.record(f"{phase}-ms-of-median-rank", statistics.median(taken), reduce="last")
            self._report(run, times)
            self._note(run, times)
        self._iterations = self._tokens = 0

    def _gather(self, run: Run) -> Tensor:
        """The times of all ranks: float64 [ranks, phases, 3], on the device."""
        read, world = self._clock.read(), run.groups.world
        rows = [(read[phase].milliseconds, read[phase].error, read[phase].usual) for phase in PHASES]
        own = torch.tensor(rows, dtype=torch.float64, device=run.device)
        found = own.new_empty(world.size() * len(PHASES), 3)
        all_gather_into_tensor(found, own, world)
        return found.view(world.size(), len(PHASES), 3)

    def _note(self, run: Run, times: Sequence[RankTimes]) -> None:
        """Leave the slowest ranks to the run's page."""
        if run.events is not None:
            slowest = sorted(enumerate(times), key=lambda pair: -pair[1].work_ms)[:_MOST_NOTED]
            rows = [
                {"rank": rank, "host": t.host, "stage": t.stage, "forward_ms": t.phases[FORWARD].milliseconds}
                | {"phases": {phase: t.phases[phase].milliseconds for phase in (*OWN_WORK, REST)}}
                for rank, t in slowest
            ]
            run.events.add("ranks", run.progress.iteration, ranks=rows)

    def _report(self, run: Run, times: Sequence[RankTimes]) -> None:
        # Forward is a third of forward and backward; TFLOP/s x ms of one rank's share.
        work = (run.flops_per_token or 0.0) * self._tokens / self._iterations / 3 / len(times) / 1e9
        for line in describe_times(times, work, self._settings.straggler_minmax_count):
            say(line)
        self._accuse(times)

    def _accuse(self, times: Sequence[RankTimes]) -> None:
        """Name the ranks that were slow in enough reports in succession."""
        found = find_suspects(times)
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
            # On this machine only: anybody who can reach the port can switch.
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
