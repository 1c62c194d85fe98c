# SPDX-License-Identifier: Apache-2.0
"""Checks of the machine before a run, and under torchrun of all its machines: `python -m megatron doctor`.

Each process measures, the first one compares: versions, clocks, memory, products, the disk of --save, and the sum that
all of them form together. Nothing is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from megatron.core import device
from megatron.core.errors import ConfigError, TemporaryError, format_bytes
from megatron.training.launch.launch import Launch, read_launch

_MOST_CLOCK_SECONDS = 1.0
_LEAST_SHARE = 0.5
"""Of the median speed: a machine below it makes all others wait."""
_TRIAL_BYTES = 32 << 20
_PRODUCT_SIZE = 512
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
    """`bytes_per_second`, `free_bytes` and `problem` of --save."""


@dataclass(frozen=True)
class Check:
    """One row of the table."""

    name: str
    is_good: bool
    found: str
    where: str = ""
    """The hosts and ranks that failed."""


def measure_machine(launch: Launch, save: Path | None) -> Measured:
    """Measure this process's machine; the others of the job do the same at the same time."""
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
    device.synchronize()
    began_at = time.perf_counter()
    for _ in range(10):
        a @ b
    device.synchronize()
    seconds = time.perf_counter() - began_at
    speed, is_right = _measure_sum(launch, own)
    return Measured(
        rank=launch.rank,
        host=socket.gethostname(),
        versions={"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__}
        | {"device": device.device_name()},
        clock=clock,
        product_flops=20.0 * _PRODUCT_SIZE**3 / seconds,
        product_error=float((first.cpu().double() - exact).abs().max() / exact.abs().max()),
        repeats=torch.equal(first, again),
        free_memory_bytes=os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        sum_bytes_per_second=speed,
        sum_is_right=is_right,
        disk=None if save is None else try_disk(save),
    )


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


def _measure_sum(launch: Launch, own: torch.device) -> tuple[float | None, bool]:
    if launch.world_size == 1:
        return None, True
    values = torch.full((1 << 21,), float(launch.rank + 1), device=own)
    dist.all_reduce(values)
    expected = launch.world_size * (launch.world_size + 1) / 2
    is_right = bool((values == expected).all())
    device.synchronize()
    dist.barrier()
    began_at = time.perf_counter()
    for _ in range(5):
        dist.all_reduce(values)
    device.synchronize()
    return 5 * values.nbytes / (time.perf_counter() - began_at), is_right


def judge(measured: Sequence[Measured]) -> Iterator[Check]:
    """Compare what the processes have measured; every check names those that fail it."""
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
    small = [m for m in measured if m.free_memory_bytes < _LEAST_FREE_BYTES]
    yield _check("free memory", small, f"at least {format_bytes(min(m.free_memory_bytes for m in measured))}")
    if first.sum_bytes_per_second is not None:
        yield _check("sums over all ranks are right", [m for m in measured if not m.sum_is_right], f"{len(measured)}")
        speed = min(m.sum_bytes_per_second or 0.0 for m in measured)
        yield Check("speed of sums", speed > 0, f"{format_bytes(speed)} per second")
    disks = [(m, m.disk) for m in measured if m.disk is not None]
    if disks:
        bad = [m for m, disk in disks if disk["problem"]]
        problem = next((str(disk["problem"]) for _, disk in disks if disk["problem"]), None)
        slowest = format_bytes(min(disk["bytes_per_second"] for _, disk in disks))
        yield _check("write, rename and read in --save", bad, problem or f"{slowest} per second")
        free = min(disk["free_bytes"] for _, disk in disks)
        full = [m for m, disk in disks if disk["free_bytes"] < _LEAST_FREE_BYTES]
        yield _check("room in --save", full, f"{format_bytes(free)} free")


def _check(name: str, failed: Sequence[Measured], found: str) -> Check:
    return Check(name, not failed, found, ", ".join(f"{m.host} (rank {m.rank})" for m in failed))


def check_machines(save: Path | None, *, as_json: bool) -> int:
    """Measure, compare, print; returns 0 where all is good and 1 where a check failed, on every rank alike.

    Raises ConfigError or TemporaryError (which end with exit codes of their own) where it could not look.
    """
    launch = read_launch(os.environ)
    if save is not None and not save.is_dir():
        raise ConfigError(f"--save {save} is no directory; make it, or name the file system by another one")
    if launch.world_size > 1:
        try:
            dist.init_process_group(device.choose_backend(device.current_device()))
        except (RuntimeError, ValueError) as error:
            raise TemporaryError(f"the ranks did not meet: {' '.join(str(error).split())[:200]}") from error
    try:
        own = measure_machine(launch, save)
        measured: list[Any] = [own]
        if launch.world_size > 1:
            measured = [None] * launch.world_size
            dist.all_gather_object(measured, own)
    finally:
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
    checks = list(judge(measured))
    if launch.rank == 0:
        if as_json:
            content = {"checks": [asdict(check) for check in checks], "ranks": [asdict(m) for m in measured]}
            print(json.dumps(content, indent=1))
        else:
            for check in checks:
                state = "good" if check.is_good else f"FAILED on {check.where or 'all'}"
                print(f"  {check.name:34} {check.found:34} {state}")
    return int(not all(check.is_good for check in checks))
