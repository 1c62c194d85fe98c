# SPDX-License-Identifier: Apache-2.0
"""Runs a test function on several gloo processes of this machine.

    @distributed(world_size=2)
    def test_sum():
        t = torch.ones(1)
        dist.all_reduce(t)
        assert t.item() == 2

    results = run_distributed(worker, 4, *args)      # [worker's result on rank 0, on rank 1, ...]

Functions are module-level; they run with the process group initialised, and get the arguments and nothing else
(torch.distributed says who they are). Results and arguments are pickled.

How: megatron/training/launch/local_job.py forks the workers, from one server process per pytest session that has
imported the trainer; so a worker starts clean, and one that crashes or hangs harms nobody else. What goes wrong comes
back as WorkerError with the rank and the worker's own traceback.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from megatron.training.launch.local_job import JobReports, run_job_locally

F = TypeVar("F", bound=Callable[..., Any])

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_TIMEOUT_SECONDS = 120.0


class WorkerError(AssertionError):
    """A worker failed. `rank` is the first one that did, `error_type` the class name of what it raised."""

    def __init__(self, rank: int | None, error_type: str, text: str) -> None:
        super().__init__(text)
        self.rank = rank
        self.error_type = error_type


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
    return _results(run_job_locally(_perform, world_size, (call,), timeout, server(), _prepare), world_size, timeout)


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


def _results(job: JobReports, world_size: int, timeout: float) -> list[Any]:
    """The values by rank; or the WorkerError that tells the first failure (reports are in order of arrival)."""
    for report in job.reports.values():
        if report is not None and report.error_type == "Skipped":
            pytest.skip(report.message)
    problems: list[tuple[int, str, str]] = []
    for rank, report in job.reports.items():
        if report is None:
            problems.append((rank, "died", f"died without a report, {job.causes_of_death[rank]}"))
        elif report.error_type:
            problems.append((rank, report.error_type, f"raised {report.error_type}:\n{report.traceback}"))
    if not problems and job.silent:
        others = f"; finished: {sorted(job.reports)}" if job.reports else ""
        text = f"no answer from rank(s) {job.silent} within {timeout:g} s{others}"
        raise WorkerError(job.silent[0], "timeout", text)
    if problems:
        lines = [f"rank {rank} of {world_size} {text}" for rank, _, text in problems]
        lines += [f"rank {rank} was still waiting and was stopped" for rank in job.silent]
        raise WorkerError(problems[0][0], problems[0][1], "\n\n".join(lines))
    values = {rank: report.value for rank, report in job.reports.items() if report is not None}
    return [values[rank] for rank in range(world_size)]


# ---- in a worker


def _prepare(rank: int, world_size: int) -> None:
    """What a launcher would set."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
        MEGATRON_DEVICE="cpu",
        GLOO_SOCKET_IFNAME="lo" if sys.platform == "linux" else "lo0",
    )


def _perform(rank: int, call: bytes) -> Any:
    module_name, qualified_name, args, kwargs = pickle.loads(call)
    function: Any = importlib.import_module(module_name)
    for name in qualified_name.split("."):
        function = getattr(function, name)
    # The module's name for a decorated test is the wrapper; the worker runs what it wraps.
    return getattr(function, "__wrapped__", function)(*args, **kwargs)
