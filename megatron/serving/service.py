# SPDX-License-Identifier: Apache-2.0
"""The engine as a service: requests come from the thread of the server, and tokens go back to it.

    server's thread                       main thread, on every rank
    submit(job), cancel(job)  -- inbox -> exchange: rank 0's commands go to all ranks -> engine.step() -> job.on_event

The ranks do the same commands in the same order, and so the same passes. Rank 0 sends something at least once a second,
so that the others see whether it is still there.
"""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from megatron.core.collectives import broadcast_object
from megatron.core.errors import ConfigError, say
from megatron.core.inference.engine import Engine
from megatron.core.inference.request import EndedBy, Request

State = Literal["loading", "ready", "draining", "lost"]
_BEAT_SECONDS = 1.0


class RequestEvent(NamedTuple):
    """News of a job: new tokens, how it ended, or why it could not begin."""

    tokens: list[int]
    ended_by: EndedBy | Literal["lost"] | None = None
    problem: str | None = None


@dataclass(eq=False)
class ServedRequest:
    """A request on its way. asked: arguments of Request. on_event: called on the engine's thread."""

    asked: dict[str, Any]
    on_event: Callable[[RequestEvent], None]
    began_at: float = field(default_factory=time.monotonic)
    request: Request | None = None
    number: int = -1
    is_done: bool = False


class Service:
    """Meeting point of server and engine. `run` belongs to the main thread, all else to any."""

    def __init__(self, max_waiting: int, log_interval: int = 0) -> None:
        """max_waiting: jobs that wait for the engine; more are turned away. log_interval: passes between lines on
        standard error; 0 for none."""
        self.log_interval = log_interval
        self.state: State = "loading"
        self.engine: Engine | None = None
        self.max_waiting = max_waiting
        self.deadline: float | None = None
        """Time at which texts still being written are cut off, by time.monotonic()."""
        self._inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._jobs: dict[int, ServedRequest] = {}
        self._numbers = 0

    # ---- from the server

    @property
    def num_jobs(self) -> int:
        """Jobs that have not ended."""
        return len(self._jobs)

    @property
    def is_full(self) -> bool:
        """Return True where a further job would wait behind too many."""
        most = 0 if self.engine is None else self.engine.settings.max_requests
        return self.num_jobs >= most + self.max_waiting

    def submit(self, job: ServedRequest) -> None:
        """Queue a job."""
        self._numbers += 1
        job.number = self._numbers
        self._jobs[job.number] = job
        self._inbox.put(("add", job))

    def end(self, job: ServedRequest, ended_by: EndedBy = "cancelled") -> None:
        """End a job, if it has not ended; its pages are free before the next pass."""
        if not job.is_done:
            self._inbox.put(("end", (job.number, ended_by)))

    def drain(self, grace_seconds: float) -> None:
        """Take no further jobs; what is being written may go on for so long."""
        if self.state != "lost":
            self.state = "draining"
        self.deadline = time.monotonic() + grace_seconds

    # ---- in the main thread

    def run(self, engine: Engine) -> None:
        """Work until `drain` and the last job, on rank 0 and on those that follow it. Whatever goes wrong in a pass
        ends all jobs and is raised."""
        self.engine = engine
        groups = engine.runner.groups
        leads = groups.world.rank() == 0
        requests: dict[int, Request] = {}
        if leads and self.state == "loading":
            self.state = "ready"
        try:
            while True:
                commands = broadcast_object(self._collect(engine) if leads else None, groups.world)
                if commands is None:
                    return
                for kind, *values in commands:
                    self._obey(engine, requests, kind, *values)
                before = engine.counters.passes
                for request in engine.step():
                    self._tell(requests, request, RequestEvent([], request.ended_by))
                passes = engine.counters.passes
                if leads and self.log_interval and passes > before and passes % self.log_interval == 0:
                    self._log(engine)
        except BaseException:
            self.state = "lost"
            for job in [*self._jobs.values()]:
                self._finish(job, RequestEvent([], "lost"))
            raise

    def _log(self, engine: Engine) -> None:
        scheduler, counters = engine.scheduler, engine.counters
        say(
            f"pass {counters.passes}: {len(scheduler.running)} running, {len(scheduler.waiting)} waiting, "
            f"{counters.new_tokens} tokens written, {scheduler.preemptions} preemptions",
            sys.stderr,
        )

    def _collect(self, engine: Engine) -> list[tuple[Any, ...]] | None:
        """Commands for all ranks; None for the end of work."""
        if self.deadline is not None and (not self._jobs or time.monotonic() > self.deadline):
            for job in [*self._jobs.values()]:
                self._finish(job, RequestEvent([], "cancelled"))
            return None
        found: list[tuple[Any, ...]] = []
        wait = 0.0 if engine.has_work else (_BEAT_SECONDS if self.deadline is None else 0.05)
        try:
            while True:
                kind, value = self._inbox.get(timeout=wait) if wait else self._inbox.get_nowait()
                wait = 0.0
                found.append((kind, value.number, value.asked) if kind == "add" else (kind, *value))
        except queue.Empty:
            return found

    def _obey(self, engine: Engine, requests: dict[int, Request], kind: str, number: int, value: Any) -> None:
        job = self._jobs.get(number)
        if kind == "end":
            request = requests.pop(number, None)
            if request is not None:
                engine.end(request, value)
                if job is not None:
                    self._finish(job, RequestEvent([], value))
            return
        request = Request(**value)
        if job is not None:
            job.request, tell = request, job.on_event
            request.on_tokens = lambda _, new: tell(RequestEvent(new))
        try:
            engine.add(request)
        except ConfigError as error:
            if job is not None:
                self._finish(job, RequestEvent([], None, str(error)))
            return
        requests[number] = request

    def _tell(self, requests: dict[int, Request], request: Request, event: RequestEvent) -> None:
        number = next((number for number, other in requests.items() if other is request), None)
        if number is not None:
            del requests[number]
            if number in self._jobs:
                self._finish(self._jobs[number], event)

    def _finish(self, job: ServedRequest, event: RequestEvent) -> None:
        job.is_done = True
        self._jobs.pop(job.number, None)
        job.on_event(event)
