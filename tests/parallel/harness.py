"""Runs a test function on several gloo processes of this machine.

    @distributed(world_size=2)
    def test_sum():
        t = torch.ones(1)
        dist.all_reduce(t)
        assert t.item() == 2

    results = run_distributed(worker, 4, *args)      # [worker's result on rank 0, on rank 1, ...]

Functions are module-level; they run with the process group initialised, and get the arguments and nothing else
(torch.distributed says who they are). Results and arguments are pickled.

How: one server process per pytest session imports the trainer; each call forks its workers from it (some 20 ms each),
so a worker starts clean, and one that crashes or hangs harms nobody else. They meet through a FileStore: no ports. A
worker dies with its parent. What goes wrong comes back as WorkerError with the rank and the worker's own traceback.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import pytest

F = TypeVar("F", bound=Callable[..., Any])

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_TIMEOUT_SECONDS = 120.0
_GRACE_SECONDS = 2.0
"""How long the other workers may still report, after the first failure."""


class WorkerError(AssertionError):
    """A worker failed. `rank` is the first one that did, `error_type` the class name of what it raised."""

    def __init__(self, rank: int | None, error_type: str, text: str) -> None:
        super().__init__(text)
        self.rank = rank
        self.error_type = error_type


@dataclass(frozen=True)
class _Report:
    """What a worker sends back: kind is ok, skipped or failed."""

    rank: int
    kind: str
    value: Any = None
    error_type: str = ""
    text: str = ""


def distributed(world_size: int, timeout: float = DEFAULT_TIMEOUT_SECONDS) -> Callable[[F], F]:
    """Decorator: the test runs on every one of `world_size` processes; fixtures and parameters are handed to each."""

    def decorate(test: F) -> F:
        @functools.wraps(test)
        def wrapper(*args: Any, **kwargs: Any) -> None:
            run_distributed(test, world_size, *args, timeout=timeout, **kwargs)

        return wrapper  # type: ignore[return-value]

    return decorate


def run_distributed(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = DEFAULT_TIMEOUT_SECONDS, **kwargs: Any
) -> list[Any]:
    """Call `function(*args, **kwargs)` on each of `world_size` processes; their results in rank order.

    Raises WorkerError when a worker raises, dies, or is not done after `timeout` seconds. All are gone on return.
    """
    if "<locals>" in function.__qualname__:
        raise ValueError(f"{function.__qualname__} is defined inside a function; workers need a module-level function")
    call = pickle.dumps((function.__module__, function.__qualname__, args, kwargs))
    context = server()
    with tempfile.TemporaryDirectory(prefix="gloo-") as directory:
        pipes, processes = [], []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                target = (rank, world_size, f"{directory}/store", timeout, call, theirs)
                process = context.Process(target=_worker, args=target, daemon=True)
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            reports = _collect(pipes, time.monotonic() + timeout)
            return _results(reports, processes, world_size, timeout)
        finally:
            # Workers that are done wait for their pipe to close; the others are killed.
            for pipe in pipes:
                pipe.close()
            _end(processes)


# ---- in the test process


@functools.cache
def server() -> Any:
    """A server that has imported the trainer once and forks workers; one thread per worker, no GPU, this checkout.

    A process has one such server; a test that starts it in another way asks for this one first.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "tests.preload"])
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with _environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", MEGATRON_DEVICE="cpu", PYTHONPATH=path):
        from multiprocessing import forkserver

        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _environment(**settings: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _collect(pipes: list[Connection], deadline: float) -> dict[int, _Report | None]:
    """Rank -> report; None for a worker that died without one. Ranks that never answered are missing."""
    waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    reports: dict[int, _Report | None] = {}
    while waiting and (remaining := deadline - time.monotonic()) > 0:
        for pipe in multiprocessing.connection.wait(list(waiting), timeout=remaining):
            rank = waiting.pop(pipe)
            try:
                reports[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except (EOFError, OSError):  # also in the middle of a message
                reports[rank] = None
            report = reports[rank]
            if report is None or report.kind != "ok":
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    return reports


def _results(reports: dict[int, _Report | None], processes: list[Any], world_size: int, timeout: float) -> list[Any]:
    """The values by rank; or the WorkerError that tells the first failure (reports are in order of arrival)."""
    for report in reports.values():
        if report is not None and report.kind == "skipped":
            pytest.skip(report.text)
    problems: list[tuple[int, str, str]] = []
    for rank, report in reports.items():
        if report is None:
            processes[rank].join(timeout=5)
            problems.append((rank, "died", f"died without a report, {_cause_of_death(processes[rank].exitcode)}"))
        elif report.kind == "failed":
            problems.append((rank, report.error_type, f"raised {report.error_type}:\n{report.text}"))
    silent = [rank for rank in range(world_size) if rank not in reports]
    if not problems and silent:
        others = f"; finished: {sorted(reports)}" if reports else ""
        raise WorkerError(silent[0], "timeout", f"no answer from rank(s) {silent} within {timeout:g} s{others}")
    if problems:
        lines = [f"rank {rank} of {world_size} {text}" for rank, _, text in problems]
        lines += [f"rank {rank} was still waiting and was stopped" for rank in silent]
        raise WorkerError(problems[0][0], problems[0][1], "\n\n".join(lines))
    values = {rank: report.value for rank, report in reports.items() if report is not None}
    return [values[rank] for rank in range(world_size)]


def _cause_of_death(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"by signal {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"


def _end(processes: list[Any]) -> None:
    """Kill what is still there and wait for every one."""
    for process in processes:
        process.join(timeout=0.5)
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()


# ---- in a worker


def _worker(rank: int, world_size: int, store_path: str, timeout: float, call: bytes, pipe: Connection) -> None:
    """Run the call and send one report. A worker that failed leaves at once, so that its peers notice; one that is done
    stays until all are, so that a failure is seen as the failing rank's own."""
    _die_with_parent()
    done = False
    try:
        _meet(rank, world_size, store_path, timeout)
        report = _Report(rank, "ok", value=_perform(call))
        message = pickle.dumps(report)
        done = True
    except pytest.skip.Exception as skipped:
        message = pickle.dumps(_Report(rank, "skipped", text=str(skipped)))
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        message = pickle.dumps(_Report(rank, "failed", error_type=type(error).__name__, text=text))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, EOFError):
        pipe.send_bytes(message)
        if done:
            pipe.recv_bytes()  # ends with EOFError when the test process closes its end
    sys.stdout.flush()
    sys.stderr.flush()
    # No clean-up of process groups: after a failure it would wait for peers that are gone.
    os._exit(0)


def _meet(rank: int, world_size: int, store_path: str, timeout: float) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
        MEGATRON_DEVICE="cpu",
        GLOO_SOCKET_IFNAME="lo" if sys.platform == "linux" else "lo0",
    )
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store_path, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )


def _perform(call: bytes) -> Any:
    module_name, qualified_name, args, kwargs = pickle.loads(call)
    function: Any = importlib.import_module(module_name)
    for name in qualified_name.split("."):
        function = getattr(function, name)
    # The module's name for a decorated test is the wrapper; the worker runs what it wraps.
    return getattr(function, "__wrapped__", function)(*args, **kwargs)


def _die_with_parent() -> None:
    """Linux: be killed when the server that forked this worker ends (it ends with pytest)."""
    if Path("/proc/self").exists():
        pr_set_pdeathsig = 1
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
