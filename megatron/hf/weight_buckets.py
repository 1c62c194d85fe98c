# SPDX-License-Identifier: Apache-2.0
"""Weights of a running model on their way to another process, in buckets of whole tensors.

    sender, every rank of its job                                     receiver
    stream_weights(run) -> send_buckets(..., address)  --shared memory-->  receive_buckets(address)
    stream_weights(run) -> broadcast_buckets(..., group)  --gloo, NCCL-->  broadcast_buckets(None, group)
    AutoBridge.from_run(run).save_hf(directory)  --files-->  any program

A bucket is one flat piece of memory with its tensors one after the other, each aligned to 16 bytes: one message
for many small tensors. A tensor that is larger than a bucket has one to itself.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.collectives import broadcast, broadcast_object
from megatron.core.errors import TemporaryError
from megatron.core.process_groups_config import Group
from megatron.hf.auto_bridge import AutoBridge
from megatron.training.run import Run

_ALIGNMENT = 16
BUCKET_BYTES = 2**28
_Entries = list[tuple[str, str, list[int]]]
"""Name, dtype and shape of each tensor of a bucket."""


def stream_weights(
    run: Run, bucket_bytes: int = BUCKET_BYTES, *, on_all_ranks: bool = False
) -> Iterator[dict[str, Tensor]]:
    """Yield the weights of a run by their Hugging Face names, in buckets of so many bytes, on the run's device.

    Every rank must call this and take all buckets: they come only to the first rank, while the others take part and get
    none, or to all. They are copies, which training does not change. Raises ConfigError for a model that no family of
    Hugging Face's computes.
    """
    tensors = AutoBridge.from_run(run).export_weights(on_all_ranks=on_all_ranks)
    yield from pack_buckets(tensors, bucket_bytes)


def pack_buckets(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield tensors in groups of at most so many bytes; the tensors of a group share one piece of memory."""
    waiting: dict[str, Tensor] = {}
    used = 0
    for name, tensor in tensors:
        size = _round_up(tensor.nbytes)
        if waiting and used + size > bucket_bytes:
            yield _copy_together(waiting)
            waiting, used = {}, 0
        # What is waiting may share memory with parameters, which the next update changes: only within this loop.
        waiting[name] = tensor
        used += size
    if waiting:
        yield _copy_together(waiting)


def send_buckets(
    buckets: Iterable[Mapping[str, Tensor]], address: str | Path, *, timeout_seconds: float = 600.0
) -> None:
    """Hand buckets to the process of this machine that receives at an address (a path), by shared memory.

    Call this on every rank of a run: those without buckets send nothing. Raises TemporaryError where nobody receives.
    """
    connection: Connection[Any, Any] | None = None
    with tempfile.TemporaryDirectory(prefix="weights.", dir=_find_shared_directory()) as directory:
        for bucket in buckets:
            connection = connection or _connect(address, timeout_seconds)
            entries, size = _describe(bucket)
            file = Path(directory, "bucket")
            _lay_out(bucket, torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8))
            connection.send_bytes(json.dumps({"file": str(file), "entries": entries}).encode())
            if not connection.poll(timeout_seconds):
                raise TemporaryError(f"nobody took a bucket at {address} within {timeout_seconds:g} seconds; try again")
            connection.recv_bytes()
            file.unlink()
        if connection is not None:
            connection.send_bytes(b"null")
            connection.close()


def receive_buckets(address: str | Path) -> Iterator[dict[str, Tensor]]:
    """Yield the buckets that `send_buckets` hands to this address, a path that does not exist yet. The tensors are in
    memory of this process. Raises TemporaryError where the sender goes away in between."""
    with Listener(str(address), family="AF_UNIX") as listener, listener.accept() as connection:
        try:
            while (header := json.loads(connection.recv_bytes())) is not None:
                _, size = _place(header["entries"])
                flat = torch.from_file(header["file"], shared=False, size=size, dtype=torch.uint8).clone()
                connection.send_bytes(b"taken")
                yield _cut(flat, header["entries"])
        except (EOFError, ConnectionError) as error:
            raise TemporaryError(f"the sender of weights at {address} has gone; let it send them again") from error


def broadcast_buckets(
    buckets: Iterable[Mapping[str, Tensor]] | None,
    group: Group,
    source: int = 0,
    device: torch.device | str = "cpu",
) -> Iterator[Mapping[str, Tensor]]:
    """Yield the buckets of one member of a group, such as the first rank of a run, on all of them, such as the ranks of
    an inference engine. Ranks of the run outside the group take all of its (empty) stream instead.

    buckets: None on the others. device: of the tensors: one that the group's backend sends from (gloo: cpu, NCCL:
    cuda). Every member calls this.
    """
    own = iter(buckets or ())
    while True:
        bucket = next(own, None)
        described = broadcast_object(_describe(bucket)[0] if bucket else None, group, source)
        if described is None:
            return
        if group.rank() == source:
            assert bucket is not None
            _, size = _place(described)
            broadcast(_lay_out(bucket, torch.empty(size, dtype=torch.uint8, device=device)), group, source)
            yield bucket
        else:
            _, size = _place(described)
            flat = torch.empty(size, dtype=torch.uint8, device=device)
            broadcast(flat, group, source)
            yield _cut(flat, described)


def _round_up(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _describe(bucket: Mapping[str, Tensor]) -> tuple[_Entries, int]:
    entries = [(name, str(each.dtype).removeprefix("torch."), [*each.shape]) for name, each in bucket.items()]
    return entries, sum(_round_up(each.nbytes) for each in bucket.values())


def _place(entries: _Entries) -> tuple[list[tuple[int, int]], int]:
    """First byte and bytes of each tensor, and the bytes of all."""
    places, first = [], 0
    for _, dtype, shape in entries:
        size = math.prod(shape) * getattr(torch, dtype).itemsize
        places.append((first, size))
        first += _round_up(size)
    return places, first


def _cut(flat: Tensor, entries: _Entries) -> dict[str, Tensor]:
    """Return the tensors that are stored in a flat piece of bytes."""
    return {
        name: flat[first : first + size].view(getattr(torch, dtype)).view(shape)
        for (name, dtype, shape), (first, size) in zip(entries, _place(entries)[0], strict=True)
    }


def _lay_out(bucket: Mapping[str, Tensor], flat: Tensor) -> Tensor:
    """Copy the tensors of a bucket into bytes; returns these."""
    for target, tensor in zip(_cut(flat, _describe(bucket)[0]).values(), bucket.values(), strict=True):
        target.copy_(tensor)
    return flat


def _copy_together(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    entries, size = _describe(tensors)
    device = next(iter(tensors.values())).device
    return _cut(_lay_out(tensors, torch.empty(size, dtype=torch.uint8, device=device)), entries)


def _find_shared_directory() -> str | None:
    """A directory in memory, where the system has one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _connect(address: str | Path, timeout_seconds: float) -> Any:
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            return Client(str(address), family="AF_UNIX")
        except OSError as error:
            if time.monotonic() > deadline:
                raise TemporaryError(f"nobody receives weights at {address} ({error}); start the receiver") from error
            time.sleep(0.05)
