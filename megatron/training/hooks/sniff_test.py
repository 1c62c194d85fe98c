# SPDX-License-Identifier: Apache-2.0
"""--gpu-sniff-test-interval: the preflight's measurements of devices and groups, repeated between steps."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from megatron.core.collectives import all_gather_object
from megatron.core.errors import say
from megatron.training.config.container import RunConfig
from megatron.training.launch.launch import Launch
from megatron.training.launch.machine_checks import Measured, measure_machine
from megatron.training.launch.preflight import list_kinds
from megatron.training.run import Hook, HookContext, Run, StepResult

_SHARE = 0.1
"""An outlier is farther from the median than this share of it, and than the median deviation, as upstream's is."""


class SniffTestHook(Hook):
    """Measures on all ranks, and prints on the first one."""

    def __init__(self, interval: int) -> None:
        self._interval = interval

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> SniffTestHook | None:
        """Return the hook for --gpu-sniff-test-interval; None where it is not asked for."""
        interval = config.reliability.gpu_sniff_test_interval
        return None if interval is None else cls(interval)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Measure where it is due."""
        if run.progress.iteration % self._interval:
            return
        world = run.groups.world
        place = Launch(rank=world.rank(), world_size=world.size())
        measured = all_gather_object(measure_machine(place, None, list_kinds(run.groups)), world)
        if run.is_first_rank:
            say(f"sniff test after iteration {run.progress.iteration}")
            for line in describe(measured):
                say(f"  {line}")


def describe(measured: Sequence[Measured]) -> Iterator[str]:
    """Return a line for each measurement, and one for each rank that is far from the median of the others."""
    hosts = {m.rank: m.host for m in measured}
    yield from _compare("products, GFLOP/s", {m.rank: m.product_flops / 1e9 for m in measured}, hosts)
    for kind in dict.fromkeys(kind for m in measured for kind in m.groups):
        found = {m.rank: (m.groups[kind]["bytes_per_second"] or 0.0) / 1e9 for m in measured if kind in m.groups}
        yield from _compare(f"sums over {kind}, GB/s", found, hosts)


def _compare(name: str, values: Mapping[int, float], hosts: Mapping[int, str]) -> Iterator[str]:
    every = list(values.values())
    median = statistics.median(every)
    yield (
        f"{name}: median {median:.4g}, mean {statistics.mean(every):.4g}, min {min(every):.4g}, max {max(every):.4g}"
    )
    deviation = statistics.median(abs(value - median) for value in every)
    for rank, value in values.items():
        if abs(value - median) > max(deviation, _SHARE * median):
            yield f"OUTLIER rank {rank} ({hosts[rank]}): {value:.4g} ({100 * (value / median - 1):+.1f} %)"
