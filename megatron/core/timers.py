"""Named stopwatches. They wait for the device only when asked, so that measuring does not slow the run down.

timers = Timers()
with timers("forward"):
    ...
timers.min_max(["forward"], group)   # {"forward": (fastest, slowest)} in seconds, across the group's processes
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from megatron.core.collectives import all_reduce, barrier
from megatron.core.device import current_device, synchronize
from megatron.core.process_groups_config import Group, SingleRankGroup


class Timer:
    """One stopwatch; adds up every stretch between start() and stop(), in seconds."""

    def __init__(self, name: str, synchronizes: bool = False) -> None:
        self.name = name
        self.synchronizes = synchronizes
        self.count = 0
        """Stretches measured since the last reset."""
        self._total_seconds = 0.0
        self._started_at: float | None = None

    def start(self, barrier_group: Group | None = None) -> None:
        """Start a stretch; with a group, after all its processes have come here."""
        if self._started_at is not None:
            raise RuntimeError(f"timer {self.name!r} was started twice")
        if barrier_group is not None:
            barrier(barrier_group)
        if self.synchronizes:
            synchronize()
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

    def elapsed(self, reset: bool = True) -> float:
        """Seconds added up so far, counting the stretch under way; then starts from zero unless told otherwise."""
        now = time.perf_counter()
        running = self._started_at is not None
        total = self._total_seconds + (now - self._started_at if self._started_at is not None else 0.0)
        if reset:
            self._total_seconds, self.count = 0.0, 0
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


class Timers:
    """Stopwatches by name, made when first asked for.

    log_level: the finest timers that run (0: few, 2: all). synchronizes: wait for the device at every start and stop.
    """

    def __init__(self, log_level: int = 2, synchronizes: bool = False) -> None:
        self.log_level = log_level
        self.synchronizes = synchronizes
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str, log_level: int = 0) -> Timer:
        """The stopwatch of this name; one finer than the level of this collection measures nothing."""
        if name not in self._timers:
            kind = Timer if log_level <= self.log_level else _SilentTimer
            self._timers[name] = kind(name, self.synchronizes)
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

    def report(self, names: Sequence[str], group: Group | None = None, per: float = 1.0, reset: bool = True) -> str:
        """The times in milliseconds as text, (min, max) across the group's processes, divided by `per` (iterations)."""
        times = self.min_max(names, group, reset)
        lines = ["(min, max) time across ranks (ms):"]
        lines += [
            f"    {name:.<32s}: ({low * 1000 / per:.2f}, {high * 1000 / per:.2f})"
            for name, (low, high) in times.items()
        ]
        return "\n".join(lines)
