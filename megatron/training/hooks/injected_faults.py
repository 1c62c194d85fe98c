# SPDX-License-Identifier: Apache-2.0
"""--fault-injector-*: upstream's spelling of simulated faults, which come after a time and are drawn by chance."""

from __future__ import annotations

import ctypes
import math
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.dist_checkpointing.agreement import on_first_rank
from megatron.core.errors import ConfigError, say
from megatron.training.config.container import RunConfig
from megatron.training.config.reliability import INJECTED_TYPES, ReliabilityConfig, split_list
from megatron.training.hooks.simulated_faults import StrikeNotes
from megatron.training.run import Hook, HookContext, Run

Injection = tuple[int, str, float]
"""Rank, type and delay in seconds."""


def draw_injections(settings: ReliabilityConfig, world_size: int) -> list[Injection]:
    """Draw which ranks meet which fault after how long. Raises ConfigError for a rank that does not exist."""
    generator = random.Random(settings.fault_injector_seed)
    ranks = [int(rank) for rank in split_list(settings.fault_injector_ranks)]
    if settings.fault_injector_num_ranks is not None:
        number = settings.fault_injector_num_ranks
        if number >= world_size:
            raise ConfigError(
                f"--fault-injector-num-ranks {number} draws from ranks 1 to {world_size - 1}, all but the first one; "
                "give fewer, or name the ranks with --fault-injector-ranks"
            )
        ranks = sorted(generator.sample(range(1, world_size), number))
    for rank in ranks:
        if rank >= world_size:
            raise ConfigError(f"--fault-injector-ranks {rank}: there are ranks 0 to {world_size - 1} only")
    types = [name.upper() for name in split_list(settings.fault_injector_fault_types)] or list(INJECTED_TYPES)
    shares = [float(share) for share in split_list(settings.fault_injector_fault_probabilities)] or None
    delay = settings.fault_injector_fault_delay
    if settings.fault_injector_mtti_seconds is not None:
        drawn = -settings.fault_injector_mtti_seconds * math.log(1.0 - generator.random())
        delay = (settings.fault_injector_offset_seconds or 0.0) + drawn
    assert delay is not None, "checked with the flags"
    return [(rank, generator.choices(types, shares)[0], delay) for rank in ranks]


class InjectedFaultsHook(Hook):
    """Brings the fault of this rank about, once in the life of a run."""

    def __init__(self, settings: ReliabilityConfig, save: str | None) -> None:
        self._settings, self._notes = settings, StrikeNotes(save)
        self._own: Sequence[Injection] = ()
        self._error: str | None = None
        self._main = threading.main_thread().ident
        self._is_over = threading.Event()

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> InjectedFaultsHook | None:
        """Return the hook for --fault-injector-*; None where no rank is to meet a fault."""
        settings = config.reliability
        wants = settings.fault_injector_ranks is not None or settings.fault_injector_num_ranks is not None
        return cls(settings, config.checkpoint.save) if wants else None

    def on_train_start(self, run: Run) -> None:
        """Let the first rank draw for all. Raises ConfigError on every rank for one that does not exist."""
        world = run.groups.world
        drawn = on_first_rank(world, lambda: draw_injections(self._settings, world.size()))
        self._own = [injection for injection in drawn if injection[0] == world.rank()]
        if any(kind == "SIGNAL_EXC" for _, kind, _ in self._own):
            signal.signal(signal.SIGUSR2, self._raise_in_handler)

    def on_step_start(self, run: Run) -> None:
        """Start the clock in its iteration, and raise what is to be raised by the program itself."""
        begins = self._settings.fault_injector_delay_start_iteration or 0
        if self._own and run.progress.iteration + 1 >= begins:
            for injection in self._own:
                threading.Thread(target=self._wait, args=injection, name="fault injector", daemon=True).start()
            self._own = ()
        if self._error is not None:
            raise RuntimeError(self._error)

    def on_close(self, run: Run) -> None:
        """No fault comes after training."""
        self._is_over.set()

    def _wait(self, rank: int, kind: str, delay: float) -> None:
        if self._is_over.wait(delay) or not self._notes.is_first_time(f"fault injector {rank}"):
            return
        words = f"--fault-injector-fault-types {kind} on rank {rank}"
        say(f"note: {words}", sys.stderr)
        if kind == "WORKLOAD_EXC":
            self._error = words
        elif kind == "ASYNC_EXC":
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._main or 0), ctypes.py_object(RuntimeError))
        elif kind == "SIGNAL_EXC":
            os.kill(os.getpid(), signal.SIGUSR2)
        else:
            _STRIKES.get(kind, lambda: os.kill(os.getpid(), signal.Signals[kind]))()

    def _raise_in_handler(self, *_: Any) -> None:
        raise RuntimeError("--fault-injector-fault-types SIGNAL_EXC")


def _lock_interpreter() -> None:
    # A call through PyDLL keeps the interpreter lock.
    while True:
        ctypes.PyDLL(None).sleep(3600)


def _read_null() -> None:
    ctypes.string_at(0)


_STRIKES: dict[str, Callable[[], Any]] = {
    "OS_ABORT": os.abort,
    "LOCK_GIL": _lock_interpreter,
    "SEGFAULT": _read_null,
}
