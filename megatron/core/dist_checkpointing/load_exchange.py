# SPDX-License-Identifier: Apache-2.0
"""Loading by shares: of what all members of a group want to read each member reads a part, and they exchange it.

With replicas, as data-parallel ranks are, every byte is read once per group instead of once per rank. That is faster
where the storage is slower than the network between the ranks and does not keep in memory what another node has read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron.core import device
from megatron.core.collectives import all_gather_object, broadcast
from megatron.core.dist_checkpointing.shard_files import split_rows
from megatron.core.process_groups_config import Group

_BUFFER_BYTES = 32 << 20
_ALIGNMENT = 16


class Read(NamedTuple):
    """A part of a saved box, and where it belongs on this process."""

    box_index: MetadataIndex
    offsets: tuple[int, ...]
    """Of the part in the box."""
    target: Tensor
    """A view of a tensor of this process, in the shape of the part."""


@dataclass(frozen=True)
class SharedReads:
    """Division of the reads among processes, as this process sees it."""

    own_reads: list[Read]
    """Reads that this process does itself."""
    exchanged: list[tuple[Group, list[list[Tensor]]]]
    """For each group what each member reads for all of them, in an order that is the same on all."""


def choose_readers(reads: list[Read], groups: Sequence[Group]) -> SharedReads:
    """Divide what all members of a group want among them, evenly by bytes; all members call this.

    A read belongs to the first of the groups in which all want it, into tensors of the same dtype on the device that
    computes; what belongs to none each process reads itself.
    """
    own: list[Read] = []
    exchanged = []
    for group in groups:
        if group.size() == 1:
            continue
        by_key = _name_reads(reads)
        everyone = all_gather_object({key: read.target.nbytes for key, read in by_key.items()}, group)
        sizes = everyone[0]
        load = [0] * group.size()
        members: list[list[Tensor]] = [[] for _ in load]
        others: set[int] = set()
        # Largest first keeps the shares close to equal.
        for key in sorted(set(sizes).intersection(*everyone[1:]), key=lambda key: (-sizes[key], key)):
            read = by_key[key]
            reader = min(range(len(load)), key=load.__getitem__)
            load[reader] += sizes[key]
            members[reader].append(read.target)
            others.add(id(read.target))
            if reader == group.rank():
                own.append(read)
        exchanged.append((group, members))
        reads = [read for read in reads if id(read.target) not in others]
    return SharedReads(own + reads, exchanged)


def _name_reads(reads: Sequence[Read]) -> dict[tuple[Any, ...], Read]:
    """The reads that can be exchanged, by what is the same for two processes that want the same."""
    where = device.current_device().type
    times: Counter[tuple[Any, ...]] = Counter()
    named: dict[tuple[Any, ...], Read] = {}
    for read in reads:
        index, offsets, target = read
        if target.device.type != where:
            continue
        what = (index.fqn, tuple(index.offset or ()), offsets, tuple(target.shape), str(target.dtype))
        # A weight may be read twice: as the parameter, and as the main parameter.
        named[*what, times[what]] = read
        times[what] += 1
    return named


def exchange(shared: SharedReads) -> None:
    """Send what this process has read to the others, and fill the rest of its tensors with what they have read.

    Beside the tensors a buffer of 32 MiB is in memory.
    """
    for group, members in shared.exchanged:
        for source, targets in enumerate(members):
            for pieces in _batch(targets):
                _pass(pieces, group, source)


def _batch(targets: Sequence[Tensor]) -> list[list[Tensor]]:
    """Views of the tensors, in lists that fit into a buffer."""
    batches: list[list[Tensor]] = []
    free = 0
    for target in targets:
        for piece in split_rows(target, _BUFFER_BYTES):
            if piece.nbytes > free:
                batches.append([])
                free = _BUFFER_BYTES
            batches[-1].append(piece)
            free -= _align(piece.nbytes)
    return batches


def _pass(pieces: Sequence[Tensor], group: Group, source: int) -> None:
    buffer = torch.empty(sum(_align(piece.nbytes) for piece in pieces), dtype=torch.uint8, device=pieces[0].device)
    places = []
    start = 0
    for piece in pieces:
        places.append(buffer[start : start + piece.nbytes].view(piece.dtype).view(piece.shape))
        start += _align(piece.nbytes)
    if group.rank() == source:
        for piece, place in zip(pieces, places, strict=True):
            place.copy_(piece)
    broadcast(buffer, group, source)
    if group.rank() != source:
        for piece, place in zip(pieces, places, strict=True):
            piece.copy_(place)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
