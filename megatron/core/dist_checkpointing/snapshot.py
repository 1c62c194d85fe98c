# SPDX-License-Identifier: Apache-2.0
"""State that a process is to save, copied into host memory, so that training can go on while it is written.

HostMemory    one block that is kept from save to save, and that another process can map
Snapshot      the boxes of one save in it; a source of values for torch's writer
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from megatron.core import device
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.save_plan import find_block
from megatron.core.dist_checkpointing.shard_files import split_rows

_PIECE_BYTES = 8 << 20
_THREADS = 4
_ALIGNMENT = 64
"""Each box begins at a multiple of it: a view in another dtype needs one of that dtype's size."""


class SnapshotMemory:
    """A block of host memory that grows and is used again. Pinned where this process computes on a GPU."""

    def __init__(self) -> None:
        self.descriptor = -1
        """A file without a name; a process that gets this descriptor maps the same memory."""
        self.generation = 0
        """Number of the block: descriptors are numbers that are given out again."""
        self.num_bytes = 0
        self.data = torch.empty(0, dtype=torch.uint8)
        """[num_bytes] as uint8."""
        self._unpin = lambda: None

    def reserve(self, num_bytes: int) -> None:
        """Make it at least as large; a larger one is a new block, and the old content is gone. Raises OSError."""
        if num_bytes <= self.num_bytes:
            return
        self.release()
        descriptor = _create_nameless_file()
        try:
            # Writing into pages that the system cannot provide would end the process; here it is an error.
            os.posix_fallocate(descriptor, 0, num_bytes)
            self.data = map_memory(descriptor, num_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        self.descriptor, self.num_bytes = descriptor, num_bytes
        self.generation += 1
        self._unpin = device.pin_memory(self.data)

    def release(self) -> None:
        """Give the memory back, once no snapshot refers to it."""
        if self.descriptor < 0:
            return
        self._unpin()
        os.close(self.descriptor)
        self.descriptor, self.num_bytes, self.data = -1, 0, torch.empty(0, dtype=torch.uint8)
        self._unpin = lambda: None


class BoxPlace(NamedTuple):
    """Place of a box in the memory."""

    start: int
    """First byte."""
    dtype: torch.dtype
    shape: tuple[int, ...]


class Snapshot:
    """Boxes in host memory."""

    def __init__(self, memory: torch.Tensor, places: Mapping[MetadataIndex, BoxPlace]) -> None:
        self.memory, self.places = memory, places

    def find(self, box: WriteItem) -> torch.Tensor:
        """The tensor of a box: a view of the memory."""
        start, dtype, shape = self.places[box.index]
        return self.memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def take_snapshot(memory: SnapshotMemory, tensors: ShardedStateDict, share: SavePlan) -> Snapshot:
    """Copy the boxes of `share` out of the tensors, which may change as soon as this returns.

    Raises OSError where there is not so much memory.
    """
    blocks = [(item, find_block(tensors, item)) for item in share.items]
    places: dict[MetadataIndex, BoxPlace] = {}
    end = 0
    for item, block in blocks:
        places[item.index] = BoxPlace(end, block.dtype, tuple(block.shape))
        end += math.ceil(block.numel() * block.dtype.itemsize / _ALIGNMENT) * _ALIGNMENT
    memory.reserve(end)
    snapshot = Snapshot(memory.data, places)
    _copy_all([(snapshot.find(item), block) for item, block in blocks])
    # The copies of a GPU into pinned memory are only under way.
    device.synchronize()
    return snapshot


def _copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second of each pair into the first one."""
    # A GPU copies by itself, and torch with several threads divides each copy already.
    if torch.get_num_threads() > 1 or not all(device.is_cpu(block) for _, block in pairs):
        for place, block in pairs:
            place.copy_(block, non_blocking=True)
        return
    waiting = iter(
        [
            piece
            for place, block in pairs
            for piece in zip(split_rows(place, _PIECE_BYTES), split_rows(block, _PIECE_BYTES), strict=True)
        ]
    )
    lock = threading.Lock()

    def copy() -> None:
        while True:
            with lock:
                pair = next(waiting, None)
            if pair is None:
                return
            pair[0].copy_(pair[1])

    # A single processor does not keep the memory busy.
    with ThreadPoolExecutor(_THREADS) as threads:
        for done in [threads.submit(copy) for _ in range(_THREADS)]:
            done.result()


def map_memory(descriptor: int, num_bytes: int) -> torch.Tensor:
    """The first bytes of a file as memory [num_bytes], uint8. It stays mapped as long as the tensor lives."""
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)


def _create_nameless_file() -> int:
    # /dev/shm is as small as 64 MiB in many containers; this memory has no such limit, and goes with its last user.
    if hasattr(os, "memfd_create"):
        return os.memfd_create("checkpoint", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
