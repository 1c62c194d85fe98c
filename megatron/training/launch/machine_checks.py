# SPDX-License-Identifier: Apache-2.0
"""Checks of the machines of a job: each process measures, all compare. Versions, clocks, memory, products, the disk of
--save, and sums over groups of processes. They leave nothing behind.

`python -m megatron doctor` (megatron/cli/check_machine.py) looks without a run, --preflight (preflight.py) before one.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from megatron.core import device
from megatron.core.errors import format_bytes
from megatron.core.host_memory import list_control_groups
from megatron.planner.devices import DEVICES
from megatron.planner.links import Link
from megatron.training.launch.launch import Launch

ALL_RANKS = "all ranks"
_MOST_CLOCK_SECONDS = 1.0
_LEAST_SHARE = 0.5
"""Of the median speed: a machine below it makes all others wait."""
_LEAST_OF_EXPECTED = 0.25
"""Of what the planner's table of devices expects of a link: less is a link that fails, or another way than meant."""
_TRIAL_BYTES = 32 << 20
_PRODUCT_SIZE = 512
_SPEED_SIZE = {True: 4096, False: 512}
"""Of the product whose speed is measured, on a GPU and on a CPU: one that takes longer than its launch."""
_SUM_ELEMENTS = 1 << 21
_TRIALS = 5
_TRIAL_SECONDS = 0.25
"""Of products at least: ranks that share a busy machine each get some undisturbed ones in this time."""
_LEAST_FREE_BYTES = 1 << 30


@dataclass(frozen=True)
class Measured:
    """One process's measurements."""

    rank: int
    host: str
    versions: dict[str, str]
    clock: float
    """Seconds since 1970, right after all have met."""
    product_flops: float
    product_error: float
    """Largest error of a product against float64, relative to its largest element."""
    repeats: bool
    """The same product twice has the same bits."""
    free_memory_bytes: int
    sum_bytes_per_second: float | None
    """Of an all-reduce over all processes; None for one."""
    sum_is_right: bool
    disk: dict[str, Any] | None
    """`bytes_per_second`, `free_bytes` and `problem` of --save; None on all but the first process of a machine."""
    processors: float = 1.0
    """Processors that this process may use, by its affinity and the quotas of its control groups."""
    free_device_bytes: int | None = None
    """Of a GPU's memory."""
    groups: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """For each kind of group of several processes: `bytes_per_second` of an all-reduce, and `expected` by the planner's
    table of devices, None where that does not know this one."""


@dataclass(frozen=True)
class Check:
    """One row of the table."""

    name: str
    is_good: bool
    found: str
    where: str = ""
    """The hosts and ranks that failed."""


def measure_machine(
    launch: Launch, save: Path | None, groups: Mapping[str, dist.ProcessGroup] | None = None
) -> Measured:
    """Measure this process's machine; the others of the job do the same at the same time.

    save: a directory whose file system is tried, by one process of each machine. groups: by kind, the groups of this
    process that have several members, in an order in which the members of each meet; all processes when None.
    """
    own = device.current_device()
    device.activate(own)
    is_alone = launch.world_size == 1
    if not is_alone:
        dist.barrier()
    clock = time.time()
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(_PRODUCT_SIZE, _PRODUCT_SIZE, generator=generator) for _ in range(2))
    a, b = left.to(own), right.to(own)
    first, again = a @ b, a @ b
    exact = left.double() @ right.double()
    kinds = {} if is_alone else {ALL_RANKS: dist.group.WORLD, **(groups or {})}
    sums = {kind: _measure_sum(group, own) for kind, group in kinds.items() if group is not None}
    is_cpu = device.is_cpu(own)
    return Measured(
        rank=launch.rank,
        host=socket.gethostname(),
        versions={"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__}
        | {"device": device.device_name()},
        clock=clock,
        product_flops=_measure_product(own),
        product_error=float((first.cpu().double() - exact).abs().max() / exact.abs().max()),
        repeats=torch.equal(first, again),
        free_memory_bytes=os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        sum_bytes_per_second=sums[ALL_RANKS][0] if sums else None,
        sum_is_right=all(is_right for _, is_right in sums.values()),
        disk=None if save is None or not launch.is_first_of_host else try_disk(save),
        processors=count_processors(),
        free_device_bytes=None if is_cpu else device.read_total_memory_bytes() - device.read_used_memory_bytes(),
        groups={
            kind: {"bytes_per_second": speed, "expected": _expect_speed(dist.get_process_group_ranks(kinds[kind]))}
            for kind, (speed, _) in sums.items()
        },
    )


def count_processors() -> float:
    """Count the processors that this process may use: its affinity, or less where a control group has a quota."""
    found = [float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)]
    for directory in list_control_groups("cpu"):
        for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
            with contextlib.suppress(OSError, ValueError):  # no such file; `max`, which is no number
                quota, period = map(int, " ".join((directory / name).read_text() for name in names).split())
                found += [quota / period] if quota > 0 else []
    return min(found)


def _measure_product(own: torch.device) -> float:
    """Floating-point operations a second, by the best of some trials: what else a machine does is not its fault."""
    size = _SPEED_SIZE[not device.is_cpu(own)]
    values = torch.ones(size, size, device=own)
    seconds: list[float] = []
    while len(seconds) < _TRIALS or sum(seconds) < _TRIAL_SECONDS:
        device.synchronize()
        began_at = time.perf_counter()
        values @ values
        device.synchronize()
        seconds.append(time.perf_counter() - began_at)
    return 2.0 * size**3 / min(seconds)


def try_disk(directory: Path) -> dict[str, Any]:
    """Write, flush, rename, read and remove a file there, as a checkpoint's files are."""
    content = os.urandom(1 << 20)
    problem, speed = None, 0.0
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=directory) as name:
            path, final = Path(name) / "part", Path(name) / "whole"
            began_at = time.perf_counter()
            with path.open("xb") as file:
                for _ in range(_TRIAL_BYTES // len(content)):
                    file.write(content)
                file.flush()
                os.fsync(file.fileno())
            path.rename(final)
            speed = _TRIAL_BYTES / (time.perf_counter() - began_at)
            if final.read_bytes() != content * (_TRIAL_BYTES // len(content)):
                problem = "what was read is not what was written"
    except OSError as error:
        problem = f"{error.strerror}"
    return {"bytes_per_second": speed, "free_bytes": shutil.disk_usage(directory).free, "problem": problem}


def _measure_sum(group: dist.ProcessGroup, own: torch.device) -> tuple[float, bool]:
    """Bytes a second of an all-reduce, by the best of some trials, and True where the sum is right."""
    ranks = dist.get_process_group_ranks(group)
    values = torch.full((_SUM_ELEMENTS,), float(dist.get_rank() + 1), device=own)
    dist.all_reduce(values, group=group)
    is_right = bool((values == sum(ranks) + len(ranks)).all())
    seconds = []
    for _ in range(_TRIALS):
        device.synchronize()
        dist.barrier(group)
        began_at = time.perf_counter()
        dist.all_reduce(values, group=group)
        device.synchronize()
        seconds.append(time.perf_counter() - began_at)
    return values.nbytes / min(seconds), is_right


def _expect_speed(ranks: Sequence[int]) -> float | None:
    """Bytes a second of an all-reduce over these ranks of a known device, with fast links inside of a node."""
    name = device.device_name()
    known = next((row for row in DEVICES.values() if re.search(rf"\b{row.name}\b", name, re.IGNORECASE)), None)
    if known is None or device.is_cpu(device.current_device()):
        return None
    size = _SUM_ELEMENTS * 4.0
    return size / Link(known, len(ranks), max(1, ranks[1] - ranks[0])).reduce(size)


def judge(measured: Sequence[Measured], needed_bytes: int = 0, wanted: str = "") -> Iterator[Check]:
    """Compare what the processes have measured; every check names those that fail it.

    needed_bytes: room that the file system of --save must have, and `wanted` what for."""
    first = measured[0]
    for name, value in first.versions.items():
        other = [m for m in measured if m.versions.get(name) != value]
        found = ", ".join(sorted({m.versions.get(name, "none") for m in measured}))
        yield _check(f"same {name}", other, found)
    middle = statistics.median(m.clock for m in measured)
    spread = max(abs(m.clock - middle) for m in measured)
    late = [m for m in measured if abs(m.clock - middle) > _MOST_CLOCK_SECONDS]
    yield _check("clocks", late, f"at most {spread:.3f} s from the median")
    wrong = [m for m in measured if m.product_error > 1e-2 or not m.repeats]
    yield _check("products are right", wrong, f"error {max(m.product_error for m in measured):.1e}")
    usual = statistics.median(m.product_flops for m in measured)
    slow = [m for m in measured if m.product_flops < _LEAST_SHARE * usual]
    yield _check("speed of products", slow, f"{usual / 1e9:.0f} GFLOP/s in the median")
    most = statistics.median(m.processors for m in measured)
    few = [m for m in measured if m.processors < _LEAST_SHARE * most]
    yield _check("processors", few, f"{min(m.processors for m in measured):g} at least, {most:g} in the median")
    yield _judge_memory("free memory", [(m, m.free_memory_bytes) for m in measured])
    if on_devices := [(m, m.free_device_bytes) for m in measured if m.free_device_bytes is not None]:
        yield _judge_memory("free memory of devices", on_devices)
    if first.sum_bytes_per_second is not None:
        yield _check("sums over all ranks are right", [m for m in measured if not m.sum_is_right], f"{len(measured)}")
        for kind in dict.fromkeys(kind for m in measured for kind in m.groups):
            yield _judge_sums(kind, [m for m in measured if kind in m.groups])
    disks = [(m, m.disk) for m in measured if m.disk is not None]
    if disks:
        bad = [m for m, disk in disks if disk["problem"]]
        problem = next((str(disk["problem"]) for _, disk in disks if disk["problem"]), None)
        slowest = format_bytes(min(disk["bytes_per_second"] for _, disk in disks))
        yield _check("write, rename and read in --save", bad, problem or f"{slowest} per second")
        free = min(disk["free_bytes"] for _, disk in disks)
        needed = max(needed_bytes, _LEAST_FREE_BYTES)
        full = [m for m, disk in disks if disk["free_bytes"] < needed]
        wants = f", {format_bytes(needed_bytes)} for {wanted}" if wanted else ""
        yield _check("room in --save", full, f"{format_bytes(free)} free{wants}")


def _judge_sums(kind: str, members: Sequence[Measured]) -> Check:
    """Compare the groups of one kind with each other, and with what their device's links should do."""
    speeds = [float(m.groups[kind]["bytes_per_second"] or 0.0) for m in members]
    usual = statistics.median(speeds)
    slow = []
    for m, speed in zip(members, speeds, strict=True):
        least = max(_LEAST_SHARE * usual, _LEAST_OF_EXPECTED * float(m.groups[kind]["expected"] or 0.0))
        if speed < least:
            slow.append(m)
    expected = members[0].groups[kind]["expected"]
    beside = "" if expected is None else f", {format_bytes(expected)} expected"
    name = "speed of sums" if kind == ALL_RANKS else f"speed of sums, {kind}"
    return _check(name, slow, f"{format_bytes(min(speeds))} per second{beside}")


def _check(name: str, failed: Sequence[Measured], found: str) -> Check:
    return Check(name, not failed, found, ", ".join(f"{m.host} (rank {m.rank})" for m in failed))


def _judge_memory(name: str, found: Sequence[tuple[Measured, int]]) -> Check:
    small = [m for m, free in found if free < _LEAST_FREE_BYTES]
    return _check(name, small, f"at least {format_bytes(min(free for _, free in found))}")


def write_table(checks: Iterable[Check]) -> str:
    """Return a line for each check: its name, what was found, and whom it accuses."""
    lines = []
    for check in checks:
        state = "good" if check.is_good else f"FAILED on {check.where or 'all'}"
        lines.append(f"  {check.name:33} {check.found:44} {state}")
    return "\n".join(lines)
