# SPDX-License-Identifier: Apache-2.0
"""What one training step asks of the device: waits of the host, and kernels with their times."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType

from megatron.core import device as device_module
from megatron.training.run import Hook, Phase, Run, Step


class Watch(Hook):
    """Waits of the host in one step, and the kernels of the next."""

    phase = Phase.SAVE

    def __init__(self) -> None:
        self.waits: list[str] = []
        self.profile: torch.profiler.profile | None = None

    def wrap_step(self, step: Step) -> Step:
        """The second step is watched for waits, the third is profiled."""

        def watched(run: Run, batches: Iterator[Any]) -> None:
            if run.progress.iteration == 1:
                with warnings.catch_warnings(record=True) as caught, _sync_warnings():
                    warnings.simplefilter("always")
                    step(run, batches)
                self.waits = [f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchron" in str(w.message)]
            elif run.progress.iteration == 2:
                device_module.synchronize()
                with torch.profiler.profile(activities=device_module.list_profiler_activities()) as self.profile:
                    step(run, batches)
                    device_module.synchronize()
            else:
                step(run, batches)

        return watched


@contextlib.contextmanager
def _sync_warnings() -> Iterator[None]:
    on_device = not device_module.is_cpu(device_module.current_device())
    if on_device:
        torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        if on_device:
            torch.cuda.set_sync_debug_mode("default")


def list_kernels(entries: Iterable[Any], *, on_device: bool) -> list[dict[str, Any]]:
    """Name, calls and seconds of the profile's kernels, or on a CPU of its operations, the longest first."""
    rows = []
    for entry in entries:
        # A kernel's time stands in its own entry, in that of the operation that launched it, and in named ranges.
        if on_device and (entry.device_type == DeviceType.CPU or entry.is_user_annotation):
            continue
        seconds = (entry.self_device_time_total if on_device else entry.self_cpu_time_total) / 1e6
        rows.append({"name": entry.key, "calls": entry.count, "seconds": seconds})
    return sorted(rows, key=lambda row: -row["seconds"])
