# SPDX-License-Identifier: Apache-2.0
"""Named stopwatches. They wait for the device only when asked, so that measuring does not slow the run down.

timers = Timers()
with timers("forward"):
    ...
timers.min_max(["forward"], group)   # {"forward": (fastest, slowest)} in seconds, across the group's processes
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import torch

from megatron.core.collectives import all_gather_object, all_reduce, barrier
from megatron.core.device import current_device, synchronize
from megatron.core.process_groups_config import Group, SingleRankGroup
from megatron.core.taken_arguments import take_arguments

TimingOption = Literal["max", "minmax", "all"]
FETCHING = "fetch batch"
"""Name in profiles of the stretches in which a step waits for its batches."""


class Timer:
    """One stopwatch; adds up every stretch between start() and stop(), in seconds."""

    def __init__(self, name: str, synchronizes: bool = False, barrier_group: Group | None = None) -> None:
        """barrier_group: whose processes wait for each other before every stretch."""
        self.name = name
        self.synchronizes = synchronizes
        self.barrier_group = barrier_group
        self.count = 0
        """Stretches measured since the last reset."""
        self._total_seconds = 0.0
        self._started_at: float | None = None

    def start(self, barrier_group: Group | None = None) -> None:
        """Start a stretch; with a group, after all its processes have come here."""
        if self._started_at is not None:
            raise RuntimeError(f"timer {self.name!r} was started twice")
        group = barrier_group or self.barrier_group
        if group is not None:
            barrier(group)
        if self.synchronizes:
            synchronize()
        # Last, so that neither the barrier nor the wait for the device is measured.
        self._started_at = time.perf_counter()

    def stop(self) -> None:
        """End the stretch and add it."""
        if self._started_at is None:
            raise RuntimeError(f"timer {self.name!r} was stopped without a start")
        if self.synchronizes:
            synchronize()
        self._total_seconds += time.perf_counter() - self._started_at
        self._started_at = None
        self.count += 1

    def add(self, seconds: float) -> None:
        """Add a stretch that was measured elsewhere."""
        self._total_seconds += seconds
        self.count += 1

    def elapsed(self, reset: bool = True) -> float:
        """Seconds added up so far, counting the stretch under way; then starts from zero unless told otherwise."""
        now = time.perf_counter()
        running = self._started_at is not None
        total = self._total_seconds + (now - self._started_at if self._started_at is not None else 0.0)
        if reset:
            self._total_seconds, self.count = 0.0, 0
            # A stretch under way goes on into the next interval.
            self._started_at = now if running else None
        return total

    def reset(self) -> None:
        """Forget everything measured, and the stretch under way."""
        self._total_seconds, self.count, self._started_at = 0.0, 0, None

    def __enter__(self) -> Timer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _SilentTimer(Timer):
    """Stands in for a timer that is finer than the level asked for."""

    def start(self, barrier_group: Group | None = None) -> None:
        pass

    def stop(self) -> None:
        pass

    def add(self, seconds: float) -> None:
        pass


class Timers:
    """Stopwatches by name, made when first asked for.

    log_level: the finest timers that run (0: few, 2: all). synchronizes: wait for the device at every start and stop.
    barrier_group: whose processes wait for each other at the start of those timers that ask for it.
    """

    @take_arguments("log_level log_option=...")  # the caller that writes them says how
    def __init__(self, log_level: int = 2, synchronizes: bool = False, barrier_group: Group | None = None) -> None:
        self.log_level = log_level
        self.synchronizes = synchronizes
        self.barrier_group = barrier_group
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str, log_level: int = 0, barrier: bool = False) -> Timer:
        """The stopwatch of this name; one finer than the level of this collection measures nothing.

        barrier: it is started by every process of barrier_group at the same place.
        """
        if name not in self._timers:
            # The level of the first call decides, because a name has one level.
            kind = Timer if log_level <= self.log_level else _SilentTimer
            self._timers[name] = kind(name, self.synchronizes, self.barrier_group if barrier else None)
        return self._timers[name]

    def names(self) -> list[str]:
        """Names of the timers that measured something since their last reset."""
        return [name for name, timer in self._timers.items() if timer.count]

    def min_max(
        self, names: Sequence[str], group: Group | None = None, reset: bool = True
    ) -> dict[str, tuple[float, float]]:
        """Name -> (least, most) seconds over the group's processes. All of them must call it with the same names."""
        seconds = [self(name).elapsed(reset) for name in names]
        if not names:
            return {}
        # One reduction gives both ends: the largest of (t, -t).
        both = torch.tensor([seconds, [-s for s in seconds]], dtype=torch.float64, device=current_device())
        all_reduce(both, group or SingleRankGroup(), op="max")
        most, least = both.tolist()
        return {name: (-low, high) for name, low, high in zip(names, least, most, strict=True)}

    def report(
        self,
        names: Sequence[str],
        group: Group | None = None,
        per: float = 1.0,
        reset: bool = True,
        option: TimingOption = "minmax",
    ) -> str:
        """The times in milliseconds as text, divided by `per` (iterations): the largest across the group's processes,
        the smallest and the largest, or all."""
        # The wording is upstream's, so that programs that read its logs can read these.
        if option == "all":
            times = all_gather_object({name: self(name).elapsed(reset) for name in names}, group or SingleRankGroup())
            lines = ["times across ranks (ms):"]
            for name in names:
                lines.append(f"  {name}:")
                # Ranks in the order of the group, which all_gather_object keeps.
                lines += [f"     rank {rank:2d}: {own[name] * 1000 / per:.2f}" for rank, own in enumerate(times)]
            return "\n".join(lines)
        lines = ["max time across ranks (ms):" if option == "max" else "(min, max) time across ranks (ms):"]
        for name, (low, high) in self.min_max(names, group, reset).items():
            shown = f"{high * 1000 / per:.2f}"
            if option == "minmax":
                shown = f"({low * 1000 / per:.2f}, {shown})"
            lines.append(f"    {name:.<32s}: {shown}")
        return "\n".join(lines)
