"""A function on several processes of this machine that talk over gloo: for tools that compare layouts.

Processes are forked from a server that has imported torch once; they meet through a file, so no port is opened. The
first one that fails ends the job with its rank; none is left behind.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from megatron.core.errors import MegatronError, TemporaryError

T = TypeVar("T")

_PRELOAD = ["torch", "torch.distributed", "megatron.training.setup"]
_GRACE_SECONDS = 2.0
"""How long a process that failed may wait for a better explanation: the first to fail may only have lost its peer."""


def run_locally(
    function: Callable[..., T], world_size: int, arguments: Sequence[Any], timeout_seconds: float = 600.0
) -> list[T]:
    """`function(rank, *arguments)` on each process; the results in rank order.

    function: at module level, with arguments that can be pickled; torch.distributed is initialised with gloo when there
    are several processes. A MegatronError is raised here as it was there. Raises TemporaryError, naming the rank, when
    a process dies or fails otherwise, or when not all are done within the time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory(prefix="parity-") as directory:
        pipes: list[Connection] = []
        processes = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                target = (function, rank, world_size, arguments, f"{directory}/store", timeout_seconds, theirs)
                process = context.Process(target=_perform, args=target, daemon=True)
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            return _collect(pipes, time.monotonic() + timeout_seconds)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _collect(pipes: Sequence[Connection], deadline: float) -> list[Any]:
    waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    results: dict[int, Any] = {}
    failures: dict[int, Exception] = {}
    while waiting and (remaining := deadline - time.monotonic()) > 0:
        ready: list[Any] = list(multiprocessing.connection.wait(list(waiting), timeout=remaining))
        for pipe in ready:
            rank = waiting.pop(pipe)
            error: Exception | None
            try:
                error, value = pipe.recv()
            except (EOFError, OSError):  # also in the middle of a message
                error, value = TemporaryError(f"rank {rank} of {len(pipes)} died without a word"), None
            results[rank] = value
            if error is not None:
                failures[rank] = error
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    if failures:
        raise next((error for error in failures.values() if type(error) is not TemporaryError), [*failures.values()][0])
    if waiting:
        raise TemporaryError(f"no answer from rank(s) {sorted(waiting.values())} of {len(pipes)} in time")
    return [results[rank] for rank in range(len(pipes))]


def _perform(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    arguments: Sequence[Any],
    store: str,
    timeout_seconds: float,
    pipe: Connection,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if world_size > 1:
            timeout = timedelta(seconds=timeout_seconds)
            files = dist.FileStore(store, world_size)
            dist.init_process_group("gloo", store=files, rank=rank, world_size=world_size, timeout=timeout)
        _send(pipe, None, function(rank, *arguments))
    except MegatronError as error:
        _send(pipe, error)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}:{last.lineno}"
        _send(pipe, TemporaryError(f"rank {rank} of {world_size}: {type(error).__name__}: {error} ({where})"))
    # Stay until the parent ends us: a process that leaves early looks like a failure to its peers.
    pipe.poll(timeout_seconds)


def _send(pipe: Connection, error: Exception | None, value: Any = None) -> None:
    """What pipe.send does, with tensors as plain bytes: torch would hand them over as shared memory, a file each."""
    pipe.send_bytes(pickle.dumps((error, value)))
