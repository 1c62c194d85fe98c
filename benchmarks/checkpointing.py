#!/usr/bin/env python
"""How long a save takes against plain writing of as many bytes, and for how long --async-save holds up training.

    OMP_NUM_THREADS=1 python benchmarks/checkpointing.py
    OMP_NUM_THREADS=1 python benchmarks/checkpointing.py --megabytes 200 600 --ranks 1 2 --directory /data

The state is that of a model with optimizer: a parameter and three more of its size, in float32, for each of 50
matrices; every rank holds as much of it. Compared are, in turn, so that a slow disk slows all of them:

    plain     each rank writes its bytes to a file of its own, in blocks of 16 MiB, and flushes it
    save      serialization.save(), checksums and manifest included
    stall     AsyncSaver.start() with a process: as long as training stands still; memory is that of the save before

Printed are medians: plain / save, and stall / save.
"""

# ruff: noqa: E402 - the path comes before the imports
from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.conditions import print_conditions
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.async_save import AsyncSaver
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.writer_process import WriterProcess
from megatron.core.process_groups_config import Group, SingleRankGroup
from megatron.training.launch.local_job import run_locally

MATRICES, KINDS = 50, ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.", "optimizer.state.fp32_param.")
BLOCK_BYTES = 16 << 20


class Seconds(NamedTuple):
    """Medians over the rounds, of the slowest rank."""

    plain: float
    save: float
    stall: float


def build_state(megabytes: float, rank: int) -> ShardedStateDict:
    """So many bytes of random numbers, of this rank alone."""
    columns = 256
    rows = max(1, round(megabytes * 1e6 / (4 * columns * MATRICES * len(KINDS))))
    keys = [f"{kind}layer{rank}.{number}" for number in range(MATRICES) for kind in KINDS]
    return {key: ShardedTensor.whole(key, torch.randn(rows, columns)) for key in keys}


def measure(rank: int, megabytes: float, rounds: int, directory: str) -> Seconds:
    """On every rank: all three in turn."""
    group: Group = dist.group.WORLD or SingleRankGroup()
    state = build_state(megabytes, rank)
    root = Path(directory)
    saver = AsyncSaver(WriterProcess(niceness=10))
    found: list[Seconds] = []
    # One round more, in which memory is made and the process starts.
    for number in range(1, 2 * rounds + 3, 2):
        plain = _time(group, lambda: _write_plainly(state, root / f"plain-{group.rank()}"))
        _clear(group, root)
        save = _time(group, lambda: serialization.save(state, root, number, documents={}, group=group))  # noqa: B023
        _clear(group, root)
        stall = _time(group, lambda: saver.start(state, root, number + 1, documents={}, group=group))  # noqa: B023
        outcome = saver.wait()
        assert outcome is not None
        outcome.check()
        _clear(group, root)
        found.append(Seconds(plain, save, stall))
    saver.close()
    return Seconds(*(statistics.median(column) for column in zip(*found[1:], strict=True)))


def _time(group: Group, action: Callable[[], object]) -> float:
    """Seconds of the slowest rank."""
    _barrier(group)
    began_at = time.perf_counter()
    action()
    elapsed = torch.tensor(time.perf_counter() - began_at, dtype=torch.float64)
    if group.size() > 1:
        dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return elapsed.item()


def _write_plainly(state: ShardedStateDict, path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        for tensor in state.values():
            view = memoryview(tensor.data.numpy()).cast("B")
            for start in range(0, len(view), BLOCK_BYTES):
                file.write(view[start : start + BLOCK_BYTES])
        os.fsync(file.fileno())


def _clear(group: Group, root: Path) -> None:
    _barrier(group)
    if group.rank() == 0:
        for entry in root.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    _barrier(group)


def _barrier(group: Group) -> None:
    if group.size() > 1:
        dist.barrier()


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[200, 600], help="of each rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="on the disk that is to be measured")
    arguments = parser.parse_args()
    print_conditions()
    print("ranks  MB per rank   plain / save   stall / save   save (s)")
    for ranks in arguments.ranks:
        for megabytes in arguments.megabytes:
            with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
                found = run_locally(measure, ranks, (megabytes, arguments.rounds, directory))[0]
            ratios = f"{found.plain / found.save:12.2f}   {found.stall / found.save:12.3f}"
            print(f"{ranks:5}  {megabytes:11g}   {ratios}   {found.save:8.2f}")


if __name__ == "__main__":
    main()
