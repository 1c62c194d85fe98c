#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Saving and loading a checkpoint against plain writing and reading of as many bytes, and how long --async-save holds
up training.

    OMP_NUM_THREADS=1 python benchmarks/checkpointing.py
    OMP_NUM_THREADS=1 python benchmarks/checkpointing.py --gigabytes 10 --ranks 8 --stall-megabytes --directory /data

The state is that of a model with optimizer: a parameter and three more of its size, in float32, for each of 50
matrices. First table, of `--gigabytes` over all ranks; in each round, so that a slow disk slows all of them:

    save        serialization.save(): tensors, checksums, table of contents, documents, manifest, all flushed
    load        serialization.find() and load(): the tensors filled, and every file verified on the way
    plain       each rank writes its bytes to a file of its own, in blocks of 16 MiB, and flushes it; it reads them
                back into the same tensors
    checksums   what a save without them would gain; may come out below 0 where the disk's speed varies more

Files that are read have been dropped from the system's memory before (`from disk`), as for a job that starts, or not
(`from memory`). Second table, of `--stall-megabytes` on each rank: AsyncSaver.start() with a process, as long as
training stands still, and the same save without it. Extra memory is the peak of a rank beyond what it had before, as a
share of its bytes. All ratios are medians over the rounds, of the times of the slowest rank.
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
import types
import zlib
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.conditions import print_conditions
from megatron.core.dist_checkpointing import serialization, shard_files
from megatron.core.dist_checkpointing.async_save import AsyncSaver
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.writer_process import WriterProcess
from megatron.core.process_groups_config import Group, SingleRankGroup
from megatron.training.launch.local_job import run_locally

MATRICES, KINDS = 50, ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.", "optimizer.state.fp32_param.")
BLOCK_BYTES = 16 << 20


class Found(NamedTuple):
    """Medians of ratios over the rounds; seconds and memory besides."""

    save: float
    load: float
    load_warm: float
    checksums: float
    save_seconds: float
    load_seconds: float
    save_memory: float
    load_memory: float


class Times(NamedTuple):
    """Seconds of writing and reading, and extra memory as a share of what was written."""

    write: float
    warm: float
    cold: float
    write_memory: float
    read_memory: float


class Stall(NamedTuple):
    """The same of saving while training goes on."""

    stall: float
    save_seconds: float
    memory: float


def build_state(megabytes: float, rank: int) -> ShardedStateDict:
    """So many bytes of random numbers, of this rank alone."""
    columns = 256
    rows = max(1, round(megabytes * 1e6 / (4 * columns * MATRICES * len(KINDS))))
    keys = [f"{kind}layer{rank}.{number}" for number in range(MATRICES) for kind in KINDS]
    return {key: ShardedTensor.whole(key, torch.randn(rows, columns)) for key in keys}


def measure(rank: int, megabytes: float, rounds: int, directory: str) -> Found:
    """On every rank: saving and loading, each beside its plain counterpart."""
    group: Group = dist.group.WORLD or SingleRankGroup()
    state = build_state(megabytes, rank)
    num_bytes = sum(tensor.data.nbytes for tensor in state.values())
    root, path = Path(directory), Path(directory) / f"plain-{group.rank()}"
    rows: list[Found] = []

    def save() -> None:
        serialization.save(state, root, 1, documents={}, group=group)

    def load() -> None:
        found = serialization.find(root, None, group, leave_tensors=True)
        assert found is not None
        serialization.load(state, found, group)

    def write_and_read(write: Callable[[], None], read: Callable[[], None]) -> Times:
        reset_peak()
        before = read_memory("VmRSS")
        written = time_of(group, write)
        write_memory = (read_memory("VmHWM") - before) / num_bytes
        warm = time_of(group, read)
        forget(group, root)
        reset_peak()
        cold = time_of(group, read)
        read_memory_share = (read_memory("VmHWM") - before) / num_bytes
        # Each finds the same: pages that were given back just now are faster than those of a virtual machine's host.
        clear(group, root)
        return Times(written, warm, cold, write_memory, read_memory_share)

    # One round more, in which memory is made.
    for _ in range(rounds + 1):
        shard_files.zlib = types.SimpleNamespace(crc32=lambda data, value=0: 0)  # type: ignore[assignment]
        without = time_of(group, save)
        shard_files.zlib = zlib
        clear(group, root)
        plain = write_and_read(lambda: write_plainly(state, path), lambda: read_plainly(state, path))
        ours = write_and_read(save, load)
        rows.append(
            Found(plain.write / ours.write, plain.cold / ours.cold, plain.warm / ours.warm, 1 - without / ours.write,
                  ours.write, ours.cold, ours.write_memory, ours.read_memory)
        )  # fmt: skip
    return Found(*(statistics.median(column) for column in zip(*rows[1:], strict=True)))


def measure_stall(rank: int, megabytes: float, rounds: int, directory: str) -> Stall:
    """On every rank: saves with and without a process, in turn."""
    group: Group = dist.group.WORLD or SingleRankGroup()
    state = build_state(megabytes, rank)
    num_bytes = sum(tensor.data.nbytes for tensor in state.values())
    root = Path(directory)
    saver = AsyncSaver(WriterProcess(niceness=10))
    rows: list[tuple[float, float]] = []
    reset_peak()
    before = read_memory("VmRSS")
    memory = 0.0
    # In the first round memory is made and the process starts.
    for number in range(1, 2 * rounds + 3, 2):
        saved = time_of(group, lambda: serialization.save(state, root, number, documents={}, group=group))  # noqa: B023
        clear(group, root)
        stalled = time_of(group, lambda: saver.start(state, root, number + 1, documents={}, group=group))  # noqa: B023
        outcome = saver.wait()
        assert outcome is not None
        outcome.check()
        memory = memory or (read_memory("VmHWM") - before) / num_bytes
        clear(group, root)
        rows.append((stalled / saved, saved))
    saver.close()
    return Stall(*(statistics.median(column) for column in zip(*rows[1:], strict=True)), memory)


def time_of(group: Group, action: Callable[[], object]) -> float:
    """Seconds of the slowest rank."""
    barrier(group)
    began_at = time.perf_counter()
    action()
    elapsed = torch.tensor(time.perf_counter() - began_at, dtype=torch.float64)
    if group.size() > 1:
        dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return elapsed.item()


def write_plainly(state: ShardedStateDict, path: Path) -> None:
    """Each tensor's bytes, and a flush."""
    with open(path, "wb", buffering=0) as file:
        for tensor in state.values():
            view = memoryview(tensor.data.numpy()).cast("B")
            for start in range(0, len(view), BLOCK_BYTES):
                file.write(view[start : start + BLOCK_BYTES])
        os.fsync(file.fileno())


def read_plainly(state: ShardedStateDict, path: Path) -> None:
    """Into the tensors again."""
    with open(path, "rb", buffering=0) as file:
        for tensor in state.values():
            assert file.readinto(memoryview(tensor.data.numpy()).cast("B")) == tensor.data.nbytes


def forget(group: Group, root: Path) -> None:
    """Drop all files from the system's memory, so that they are read from the disk."""
    barrier(group)
    if group.rank() == 0:
        for path in (path for path in root.rglob("*") if path.is_file()):
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    barrier(group)


def reset_peak() -> None:
    """Begin to measure this process's largest memory anew."""
    Path("/proc/self/clear_refs").write_text("5")


def read_memory(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


def clear(group: Group, root: Path) -> None:
    """Remove everything."""
    barrier(group)
    if group.rank() == 0:
        for entry in root.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    barrier(group)


def barrier(group: Group) -> None:
    """Wait for all ranks."""
    if group.size() > 1:
        dist.barrier()


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of all ranks together")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--stall-megabytes", type=float, nargs="*", default=[200, 600], help="of each rank")
    parser.add_argument("--stall-ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="on the disk that is to be measured")
    arguments = parser.parse_args()
    print_conditions()

    def run(function: Callable[..., object], ranks: int, megabytes: float) -> object:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            return run_locally(function, ranks, (megabytes, arguments.rounds, directory))[0]

    if arguments.ranks:
        print(f"{arguments.gigabytes:g} GB over all ranks: plain time / ours (wanted: at least 0.70), checksums' share")
        print("ranks     save   load from disk   from memory   checksums   save (s)   load (s)   extra memory")
    for ranks in arguments.ranks:
        found = run(measure, ranks, arguments.gigabytes * 1000 / ranks)
        assert isinstance(found, Found)
        ratios = f"{found.save:7.2f}   {found.load:14.2f}   {found.load_warm:11.2f}   {found.checksums:9.1%}"
        seconds = f"{found.save_seconds:8.2f}   {found.load_seconds:8.2f}"
        print(f"{ranks:5}  {ratios}   {seconds}   {found.save_memory:.2f}, {found.load_memory:.2f}", flush=True)
    if arguments.stall_megabytes:
        print("while training goes on: stall / save (wanted: at most 0.15 at 200 MB, 0.25 at 600 MB)")
        print("ranks  MB per rank   stall / save   save (s)   extra memory")
    for ranks in arguments.stall_ranks:
        for megabytes in arguments.stall_megabytes:
            stall = run(measure_stall, ranks, megabytes)
            assert isinstance(stall, Stall)
            numbers = f"{stall.stall:12.3f}   {stall.save_seconds:8.2f}   {stall.memory:12.2f}"
            print(f"{ranks:5}  {megabytes:11g}   {numbers}", flush=True)


if __name__ == "__main__":
    main()
