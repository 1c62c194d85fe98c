# SPDX-License-Identifier: Apache-2.0
"""Model of failures: the share of the time in which a job makes progress that lasts.

Failures come at a constant rate for each GPU (Poisson). Each costs the restart, in which failures count as anywhere
else, and the work since the last save, which is done again; saves hold training up for a moment each. With an interval
T between saves, C seconds of stall for each, R seconds of restart and a mean time M between failures of the job

    share = T / (T + C) * (1 - (R + T / 2) / M)

to first order in T / M: M is counted over all time, restarts included. The best interval is T = sqrt(2 C M) (Young
1974, doi 10.1145/361147.361115).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FAILURES_PER_GPU_HOUR = 419 / (54 * 24 * 16_384)
"""Of training Llama 3 on 16,384 H100: 419 unexpected interruptions in 54 days (arXiv 2407.21783)."""


@dataclass(frozen=True)
class FailureModel:
    """Costs of the failures of one job."""

    failures_per_second: float
    """Of the whole job."""
    restart_seconds: float
    """From a failure to the next new step: found out, ended, started, loaded."""
    replay_seconds: float
    """Work since the last save, done again: half an interval on the average, nothing where the survivors save."""
    stall_share: float = 0.0
    """Fraction of the time in which training waits for saves."""

    @classmethod
    def of_job(
        cls,
        gpus: int,
        restart_seconds: float,
        interval_seconds: float,
        stall_seconds: float = 0.0,
        failures_per_gpu_hour: float = FAILURES_PER_GPU_HOUR,
    ) -> FailureModel:
        """Build a job of so many GPUs that saves every `interval_seconds` and waits `stall_seconds` each time."""
        rate = gpus * failures_per_gpu_hour / 3600
        stall = stall_seconds / (interval_seconds + stall_seconds)
        return cls(rate, restart_seconds, interval_seconds / 2, stall)

    @property
    def useful_share(self) -> float:
        """Share of the time in which steps are computed that need not be computed again."""
        lost = self.failures_per_second * (self.restart_seconds + self.replay_seconds)
        return (1 - self.stall_share) * max(0.0, 1 - lost)


def find_longest_restart(gpus: int, interval_seconds: float, goal: float, stall_seconds: float = 0.0) -> float | None:
    """Seconds that a restart may take so that the useful share is `goal`; None where none is short enough."""
    model = FailureModel.of_job(gpus, 0.0, interval_seconds, stall_seconds)
    room = (1 - goal / (1 - model.stall_share)) / model.failures_per_second
    seconds = room - model.replay_seconds
    return seconds if seconds > 0 else None


def find_best_interval(gpus: int, stall_seconds: float) -> float:
    """Young's interval between saves, in seconds."""
    return math.sqrt(2 * stall_seconds * 3600 / (gpus * FAILURES_PER_GPU_HOUR))
