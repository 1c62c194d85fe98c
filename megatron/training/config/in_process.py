# SPDX-License-Identifier: Apache-2.0
"""Restarts inside the processes of a job (docs/reliability.md): upstream's flags and their rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.config_base import CheckedConfig, flag
from megatron.core.setting import Needs

_RESTARTS = Needs("--inprocess-restart", lambda run: run.inprocess_restart)
_SHARED = (
    _RESTARTS,
    Needs("several processes", lambda run: run.world_size > 1 or run.inprocess_active_world_size is not None),
)
_ORDER = (
    ("inprocess_soft_timeout", "inprocess_hard_timeout"),
    ("inprocess_hard_timeout", "inprocess_barrier_timeout"),
    ("inprocess_heartbeat_interval", "inprocess_heartbeat_timeout"),
    ("inprocess_heartbeat_timeout", "inprocess_barrier_timeout"),
    ("inprocess_monitor_thread_interval", "inprocess_soft_timeout"),
    ("inprocess_monitor_process_interval", "inprocess_soft_timeout"),
)
"""Pairs of which the first must be less than the second."""


@dataclass(kw_only=True)
class InProcessConfig(CheckedConfig):
    """Restarts inside the processes: a failure that leaves enough of them does not end the program."""

    usual_kind = "report"

    inprocess_restart: bool = False
    """After a failure, begin again from the newest checkpoint with the remaining processes, without restarting them.
    Their launcher must leave them alive; torchrun's agent does where no process has ended."""
    inprocess_max_iterations: int | None = flag(None, minimum=1, unit="beginnings", needs=_RESTARTS)
    """Begin at most so many times, the first one included; without limit when not given."""
    inprocess_active_world_size: int | None = flag(None, minimum=1, unit="processes", kind="layout", needs=_RESTARTS)
    """Train with so many processes, those with the lowest RANK. The others wait, and take the places of those that are
    lost; all of WORLD_SIZE train when not given."""
    inprocess_granularity: Literal["node", "rank"] = flag("node", needs=_SHARED)
    """Give up all processes of a lost process's node, or only that one."""
    inprocess_soft_timeout: float = flag(60.0, above=0.0, unit="seconds", needs=_SHARED)
    """Take a step that makes no progress for so long for hung, and begin again; --hang-timeout goes before it."""
    inprocess_hard_timeout: float = flag(90.0, above=0.0, unit="seconds", needs=_SHARED)
    """End a process that has not come to begin again so long after its last progress."""
    inprocess_barrier_timeout: float = flag(120.0, above=0.0, unit="seconds", needs=_SHARED)
    """Wait so long for the others, at a meeting after a failure and before a beginning."""
    inprocess_completion_timeout: float = flag(120.0, above=0.0, unit="seconds", needs=_SHARED)
    """Wait so long for the others at the end of training."""
    inprocess_heartbeat_interval: float = flag(30.0, above=0.0, unit="seconds", needs=_SHARED)
    """Time between two signs of life of a process."""
    inprocess_heartbeat_timeout: float = flag(60.0, above=0.0, unit="seconds", needs=_SHARED)
    """Count a process as lost after so long without a sign of life: its machine may be gone."""
    inprocess_monitor_thread_interval: float = flag(1.0, above=0.0, unit="seconds", needs=_SHARED)
    """Time between two looks of each process for a failure of another one."""
    inprocess_monitor_process_interval: float = flag(1.0, above=0.0, unit="seconds", needs=_SHARED)
    """Time between two looks, on each host, of the program that watches its processes for hangs."""
    inprocess_last_call_wait: float = flag(1.0, minimum=0.0, unit="seconds", needs=_SHARED)
    """Wait so long after a failure for others that come with it, before ranks are assigned again."""
    inprocess_termination_grace_time: float = flag(1.0, minimum=0.0, unit="seconds", needs=_SHARED)
    """Time between SIGTERM and SIGKILL where a process must be ended."""
    inprocess_empty_cuda_cache: bool = flag(False, needs=_RESTARTS)
    """Give the GPU's cached memory back before each new beginning."""

    def rules(self) -> Iterator[str]:
        """Each time must be shorter than what it is part of."""
        for less, more in _ORDER:
            if getattr(self, less) >= getattr(self, more):
                yield f"{self.say(less)} is not less than {self.say(more)}; give a shorter one, or a longer other"
