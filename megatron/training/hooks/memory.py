"""--log-memory-interval: every rank's memory."""

from __future__ import annotations

from megatron.core import device
from megatron.core.collectives import all_gather_object
from megatron.training.run import Hook, Run, StepResult


class MemoryHook(Hook):
    """Prints a line for each rank at the interval."""

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Gather and print. Every rank takes part."""
        if run.progress.iteration % self.interval:
            return
        own = (device.memory_stats(), device.device_memory_used())
        of_all = all_gather_object(own, run.groups.world)
        if run.is_first_rank:
            print(*(line(run.progress.iteration, rank, *found) for rank, found in enumerate(of_all)), sep="\n")


def line(iteration: int, rank: int, stats: dict[str, int], used: int) -> str:
    """What one process holds, and what all processes of its device or machine do."""
    return (
        f" [rank {rank}] memory (MB) after iteration {iteration}: allocated {stats['allocated_bytes'] / 2**20:.0f} | "
        f"peak {stats['peak_bytes'] / 2**20:.0f} | used on the device {used / 2**20:.0f}"
    )
