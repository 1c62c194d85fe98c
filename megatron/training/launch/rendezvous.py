# SPDX-License-Identifier: Apache-2.0
"""Meeting of the processes of a job, which notice before the first collective that they do not belong together.

Everybody opens the same key-value store (served by rank 0, or by torchrun's agent), says who it is and with which flags
it was started, and waits for all others. Who never comes is named after a time-out; who was started with other flags is
named at once, on every rank.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from megatron.core.errors import ConfigError, TemporaryError
from megatron.training.launch.launch import Launch

_SHOWN_RANKS = 16
_RETRY_SECONDS = 0.2
_ANSWER_SECONDS = 6.0
"""Seconds that a store that listens may take to answer: it does so within milliseconds..."""
_ANSWER_SECONDS_PER_RANK = 1e-3
"""...unless thousands of ranks come to it at once."""


def open_store(launch: Launch, timeout_seconds: float) -> Store:
    """The job's key-value store at MASTER_ADDR:MASTER_PORT.

    Raises TemporaryError naming host and port when nothing listens there within `timeout_seconds`, when what listens
    does not answer as a store within seconds, or when the port is taken on rank 0.
    """
    addr, port = launch.master_addr, launch.master_port
    assert addr is not None and port is not None, "one process has nobody to meet"
    serves = launch.rank == 0 and not launch.agent_store
    deadline = time.monotonic() + timeout_seconds
    # Plain sockets first: their errors say what is wrong, without the stack traces that torch prints.
    if serves:
        _check_port(addr, port)
    else:
        _wait_for_listener(launch, deadline)
    outcome: queue.Queue[Store | Exception] = queue.Queue()

    def connect() -> None:
        try:
            outcome.put(
                TCPStore(
                    addr,
                    port,
                    launch.world_size,
                    is_master=serves,
                    timeout=timedelta(seconds=timeout_seconds),
                    wait_for_workers=False,
                )
            )
        except Exception as error:
            outcome.put(error)

    # In a thread: a stranger at that port can keep the constructor waiting for ever.
    threading.Thread(target=connect, daemon=True).start()
    patience = _ANSWER_SECONDS + _ANSWER_SECONDS_PER_RANK * launch.world_size
    patience = max(0.1, min(patience, deadline - time.monotonic()))
    try:
        store = outcome.get(timeout=patience)
    except queue.Empty:
        store = TimeoutError(f"no answer within {patience:.1f} s")
    if isinstance(store, Exception):
        raise TemporaryError(
            f"what listens at MASTER_ADDR={addr} MASTER_PORT={port} does not answer as rank 0 of this job "
            f"({str(store).splitlines()[0][:200]}); another program may use the port: choose another MASTER_PORT"
        ) from store
    # torchrun keeps its store over restarts: keys of an earlier attempt would count as ranks that are present.
    return PrefixStore(f"megatron/attempt{launch.attempt}", store)


def _check_port(addr: str, port: int) -> None:
    """Raise TemporaryError when rank 0 cannot listen on the port."""
    try:
        with socket.create_server(("", port)):
            return
    except OSError as error:
        raise TemporaryError(
            f"rank 0 cannot listen on MASTER_PORT={port} ({error.strerror}); choose a free port"
        ) from error


def _wait_for_listener(launch: Launch, deadline: float) -> None:
    """Return when something listens at the meeting point; TemporaryError when nothing does until the deadline."""
    addr, port = launch.master_addr, launch.master_port
    began_at = time.monotonic()
    while True:
        try:
            with socket.create_connection((addr, port), timeout=max(0.1, deadline - time.monotonic())):
                return
        except OSError as error:
            if time.monotonic() + _RETRY_SECONDS > deadline:
                raise TemporaryError(
                    f"rank {launch.rank} cannot reach rank 0 at MASTER_ADDR={addr} MASTER_PORT={port} within "
                    f"{time.monotonic() - began_at:.0f} s ({error.strerror or error}); "
                    "check the address and that rank 0 runs"
                ) from error
        time.sleep(_RETRY_SECONDS)


class StartupCheck:
    """One round of "is everybody here, and are we alike?" over a store."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout_seconds: float) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self.timeout_seconds = timeout_seconds
        self._deadline = time.monotonic() + timeout_seconds

    def check(
        self, flags: dict[str, Any], gpu: str | None = None, obstacles: Mapping[str, str | None] | None = None
    ) -> None:
        """Wait for all ranks and compare.

        flags: flag -> value, JSON-able; must be equal on all ranks. gpu: what identifies this rank's exclusive GPU;
        None where it has none or may share it. obstacles: what ranks compute with, in the plural -> why this one
        cannot, None where it can; all can, or none. Raises TemporaryError naming the ranks that did not come in time;
        ConfigError, the same on all ranks, for a rank given twice, another world size or another flag, two ranks on one
        GPU, or means that only some of them have.
        """
        # `add` is atomic: of two processes with the same rank exactly one sees more than 1.
        if self.store.add(f"present/{self.rank}", 1) > 1:
            self._abort(f"RANK={self.rank} was given to two processes; every process needs its own rank")
        self._check_world_size()
        if gpu is not None:
            self._check_gpu(gpu)
        written = json.dumps({"flags": flags, "obstacles": dict(obstacles or {})}, sort_keys=True)
        self.store.set(f"start/{self.rank}", written)
        self.store.add("present", 1)
        self._wait_for_all("present", self._describe_missing_ranks)
        # As text, which thousands of ranks need not take apart.
        first = self.store.get("start/0").decode()
        difference = None if first == written else self._find_difference(json.loads(written), json.loads(first))
        if difference:
            self._abort(difference)
        # A second round: without it a rank could go on to its first collective while another still reports a
        # difference.
        self.store.add("alike", 1)
        self._wait_for_all("alike", lambda: "some ranks started, but did not go on")

    def _check_world_size(self) -> None:
        """Compare with who came first, since ranks that disagree would wait for each other in vain."""
        mine = f"rank {self.rank} was started with WORLD_SIZE={self.world_size}"
        # compare_set writes only if nobody has: all ranks compare with the same first one.
        first = self.store.compare_set("first", "", mine).decode()
        if first.rpartition("=")[2] != str(self.world_size):
            self._abort(f"{mine}, but {first}; start all ranks alike")

    def _check_gpu(self, gpu: str) -> None:
        """Compare with the first process that named this GPU: NCCL takes each for one process only."""
        first = int(self.store.compare_set(f"gpu/{gpu}", "", str(self.rank)).decode())
        if first != self.rank:
            self._abort(
                f"ranks {min(first, self.rank)} and {max(first, self.rank)} compute on the same GPU ({gpu}), which "
                "NCCL refuses; start as many processes on each machine as it has GPUs (torchrun --nproc-per-node), let "
                "CUDA_VISIBLE_DEVICES show each process its own, or let them share it with --distributed-backend gloo"
            )

    def _wait_for_all(self, counter: str, problem: Callable[[], str]) -> None:
        pause = 0.005
        while self.store.add(counter, 0) < self.world_size:
            if self.store.check(["abort"]):
                raise ConfigError(self.store.get("abort").decode())
            if time.monotonic() > self._deadline:
                raise TemporaryError(
                    f"{problem()} within {self.timeout_seconds:g} s; look at their logs, then start again"
                )
            time.sleep(pause)
            # Short at first, since ranks usually come together; longer later, so that thousands of them do not flood
            # the store.
            pause = min(1.0, 1.5 * pause)
        if self.store.check(["abort"]):
            raise ConfigError(self.store.get("abort").decode())

    def _describe_missing_ranks(self) -> str:
        missing = [rank for rank in range(self.world_size) if not self.store.check([f"start/{rank}"])]
        listing = ", ".join(map(str, missing[:_SHOWN_RANKS])) + (", …" if len(missing) > _SHOWN_RANKS else "")
        return f"rank(s) {listing} of WORLD_SIZE={self.world_size} never joined"

    def _find_difference(self, own: dict[str, Any], first_rank: dict[str, Any]) -> str | None:
        """Return which flag, or what it computes with, this rank has otherwise than the first one."""
        mine, first = own["flags"], first_rank["flags"]
        for flag in sorted(mine.keys() | first.keys()):
            if mine.get(flag) != first.get(flag):
                return (
                    f"rank {self.rank} was started with {flag} {mine.get(flag)}, rank 0 with {flag} {first.get(flag)}; "
                    "start all ranks alike"
                )
        # Ranks that compute the same in different ways meet in other collectives, and wait for each other for ever.
        others = first_rank["obstacles"]
        for means, reason in own["obstacles"].items():
            if (reason is None) != (others.get(means) is None):
                failing, working = (self.rank, 0) if reason is not None else (0, self.rank)
                return (
                    f"{means} cannot be used on rank {failing} ({reason or others[means]}) and can on rank {working}; "
                    "all ranks have to compute alike: install the same on all machines"
                )
        return None

    def _abort(self, problem: str) -> None:
        self.store.set("abort", problem)
        raise ConfigError(problem)
