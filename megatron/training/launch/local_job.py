# SPDX-License-Identifier: Apache-2.0
"""A function on several processes of this machine that talk over gloo: for tools and tests that compare layouts.

Processes are forked from a server that has imported torch once (some 20 ms each); they meet through a file, so no port
is opened. Each sends one report. The first one that fails ends the job; none is left behind, also when the caller is
killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from megatron.core.errors import CrashError, MegatronError, TemporaryError
from megatron.core.parent_death import end_with_parent, end_with_process

T = TypeVar("T")

_PRELOAD = ["torch", "torch.distributed", "megatron.training.setup"]
_GRACE_SECONDS = 2.0
"""Seconds in which the others may still report after the first failure: the first to fail may only have lost its
peer."""
_FAULTS = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSYS", "SIGTRAP"})
"""Signals by which the system ends a process for what it did itself."""


@dataclass(frozen=True)
class Report:
    """Message of one process to the caller at its end: a value, or what went wrong."""

    value: Any = None
    """Return value of the function."""
    error: MegatronError | None = None
    """Error that it raised, if that was one of ours."""
    error_type: str = ""
    """Name of the class of what it raised; empty where it returned."""
    message: str = ""
    place: str = ""
    """file:line"""
    traceback: str = ""


@dataclass(frozen=True)
class JobReports:
    """Ends of the processes of a job."""

    reports: dict[int, Report | None]
    """Rank -> report, in the order of arrival; None for a process that died without one."""
    silent: list[int]
    """Ranks that had not reported when the time was over, or the grace after a failure."""
    causes_of_death: dict[int, str]
    """Of those that died: `by signal SIGKILL`, `with exit code 3`."""


def run_locally(
    function: Callable[..., T], world_size: int, arguments: Sequence[Any], timeout_seconds: float = 600.0
) -> list[T]:
    """`function(rank, *arguments)` on each process; the results in rank order.

    function: at module level, with arguments that can be pickled; it runs with torch.distributed initialised. A
    MegatronError is raised here as it was there. Raises CrashError, naming rank and signal, when a process dies by its
    own fault (SIGSEGV, ...), and TemporaryError when one is killed from outside or fails otherwise, or when not all are
    done within the time.
    """
    context = multiprocessing.get_context("forkserver")
    # Imported once in the server; each process is then a fork of it, without the seconds that torch takes.
    context.set_forkserver_preload(_PRELOAD)
    job = run_job_locally(function, world_size, arguments, timeout_seconds, context)
    failures: list[Exception] = []
    for rank, report in job.reports.items():
        if report is None:
            # First: what the others then complain of is that they lost this one.
            failures.insert(0, _explain_death(rank, world_size, job.causes_of_death[rank]))
        elif report.error is not None:
            failures.append(report.error)
        elif report.error_type:
            what = f"{report.error_type}: {report.message} ({report.place})"
            failures.append(TemporaryError(f"rank {rank} of {world_size}: {what}"))
    if failures:
        # A lost peer is a consequence; an error of another kind is more likely the cause.
        raise next((error for error in failures if type(error) is not TemporaryError), failures[0])
    if job.silent:
        raise TemporaryError(f"no answer from rank(s) {job.silent} of {world_size} in time")
    values = {rank: report.value for rank, report in job.reports.items() if report is not None}
    return [values[rank] for rank in range(world_size)]


def run_job_locally(
    function: Callable[..., Any],
    world_size: int,
    arguments: Sequence[Any],
    timeout_seconds: float,
    context: Any,
    prepare: Callable[[int, int], None] | None = None,
) -> JobReports:
    """The same, but tells what happened instead of raising. All processes are gone on return.

    context: of multiprocessing, with start method forkserver. prepare(rank, world_size): called in each process before
    it meets the others.
    """
    with tempfile.TemporaryDirectory(prefix="gloo-") as directory:
        pipes: list[Connection] = []
        processes: list[Any] = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                target = (rank, world_size, f"{directory}/store", timeout_seconds, function, arguments, prepare, theirs)
                process = context.Process(target=_work, args=target, daemon=True)
                process.start()
                # The parent's copy of this end: while it is open, the death of the process would not show as end of
                # file.
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            reports = _collect(pipes, time.monotonic() + timeout_seconds)
            causes = {rank: _describe_death(processes[rank]) for rank, report in reports.items() if report is None}
            return JobReports(reports, [rank for rank in range(world_size) if rank not in reports], causes)
        finally:
            # Processes that are done wait for their pipe to close; the others are killed.
            for pipe in pipes:
                pipe.close()
            _end(processes)


# ---- in the calling process


def _collect(pipes: Sequence[Connection], deadline: float) -> dict[int, Report | None]:
    """Rank -> report, in the order of arrival, until all are there or the time is over."""
    waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    reports: dict[int, Report | None] = {}
    while waiting and (remaining := deadline - time.monotonic()) > 0:
        ready: list[Any] = list(multiprocessing.connection.wait(list(waiting), timeout=remaining))
        for pipe in ready:
            rank = waiting.pop(pipe)
            report: Report | None
            try:
                report = pipe.recv()
            except (EOFError, OSError):  # also in the middle of a message
                report = None
            reports[rank] = report
            if report is None or report.error_type:
                # Not at once: the rank that caused the failure may report a moment after one that only lost its peer.
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    return reports


def _describe_death(process: Any) -> str:
    process.join(timeout=5)
    # multiprocessing gives a signal as its negative number.
    if process.exitcode is not None and process.exitcode < 0:
        return f"by signal {signal.Signals(-process.exitcode).name}"
    return f"with exit code {process.exitcode}"


def _explain_death(rank: int, world_size: int, cause: str) -> MegatronError:
    who = f"rank {rank} of {world_size} died {cause}"
    if cause.rpartition(" ")[2] in _FAULTS:
        return CrashError(
            f"{who}, without a traceback: a bug in compiled code of this program or a library; "
            "run with the environment variable PYTHONFAULTHANDLER=1 to see where"
        )
    hint = "; the system does that when memory is short: try a smaller model" if cause.endswith("SIGKILL") else ""
    return TemporaryError(f"{who}{hint}")


def _end(processes: Sequence[Any]) -> None:
    """Kill what is still there and wait for every one."""
    for process in processes:
        process.join(timeout=0.5)
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()


# ---- in each process


def _work(
    rank: int,
    world_size: int,
    store: str,
    timeout_seconds: float,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    prepare: Callable[[int, int], None] | None,
    pipe: Connection,
) -> None:
    """Run the call and send one report. A process that failed leaves at once, so that its peers notice; one that is
    done stays until all are, so that a failure is attributed to the right rank."""
    # The server that forked this process, and the caller: the server lives as long as one of its processes does.
    end_with_parent(os.getppid())
    if (caller := multiprocessing.parent_process()) is not None and caller.pid is not None:
        end_with_process(caller.pid)
    try:
        if prepare is not None:
            prepare(rank, world_size)
        _join(rank, world_size, store, timeout_seconds)
        report = Report(function(rank, *arguments))
        # Tensors as plain bytes: torch would hand them over as shared memory, a file each.
        message = pickle.dumps(report)
    except BaseException as error:
        report = _describe_error(error)
        message = pickle.dumps(report)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, EOFError):
        pipe.send_bytes(message)
        if not report.error_type:
            pipe.recv_bytes()  # ends with EOFError when the caller closes its end
    sys.stdout.flush()
    sys.stderr.flush()
    # No clean-up of process groups: after a failure it would wait for peers that are gone.
    os._exit(0)


def _join(rank: int, world_size: int, store: str, timeout_seconds: float) -> None:
    import torch
    import torch.distributed as dist

    # The processes share the cores of one machine; with a thread pool each they would hinder one another.
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )


def _describe_error(error: BaseException) -> Report:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return Report(
        error=error if isinstance(error, MegatronError) else None,
        error_type=type(error).__name__,
        message=str(error),
        place=f"{last.filename}:{last.lineno}",
        traceback="".join(traceback.format_exception(error)),
    )
