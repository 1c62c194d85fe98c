# SPDX-License-Identifier: Apache-2.0
"""The file of tensors that one process writes, `__<rank>_0.distcp`: the boxes assigned to it, each in a separate
archive (tensor_archives.py), one after the other.

Values go from where they lie into the file, and from the file to where they belong. Where that is one range of host
memory, nothing is in between; otherwise, as on a GPU, a few buffers of 8 MiB.
"""

from __future__ import annotations

import io
import math
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megatron.core import device
from megatron.core.dist_checkpointing.checksums import combine_crc32
from megatron.core.dist_checkpointing.crash_points import reach
from megatron.core.dist_checkpointing.durable import begin_flush
from megatron.core.dist_checkpointing.manifest import DamagedCheckpointError, FileRecord
from megatron.core.dist_checkpointing.safe_pickle import read_restricted
from megatron.core.dist_checkpointing.tensor_archives import find_values, render_head, render_tail
from megatron.core.errors import CheckpointError

_PIECE_BYTES = 8 << 20
_PIECES = 3
"""So many may be waiting to be written."""
_SHORT_BYTES = 256 << 10
"""Pieces shorter than this are gathered."""
_LARGE_BYTES = 64 << 20
_FLUSH_BYTES = 16 << 20
_VERIFIED_PIECE_BYTES = 1 << 20
"""Short enough to be in the processor's cache still when its checksum is computed."""
_SHORTEST_READ_BYTES = 256 << 10
"""Of rows of which less is wanted, all is read: a disk takes as long for a few bytes."""


BoxSource = Callable[[WriteItem], Tensor]
"""Finds the values of a box, on any device and with any strides; called when they are written."""


# ---- writing


def write_boxes(path: Path, items: Sequence[WriteItem], source: BoxSource) -> tuple[list[WriteResult], FileRecord]:
    """Write a new file and flush it to the device; returns where in it each box lies, and its record.

    Raises OSError, with the file's name.
    """
    results = []
    try:
        # The thread ends before the file is closed, whose number might then be another file's.
        with io.FileIO(path, "xb") as file, ThreadPoolExecutor(1) as thread:
            reach("shard-created")
            shard = _ShardWriter(file, thread)
            for item in items:
                start = shard.num_bytes
                shard.put_archive(source(item).detach())
                length = shard.num_bytes - start
                results.append(WriteResult(item.index, length, _StorageInfo(path.name, start, length)))
            shard.finish()
            os.fsync(file.fileno())
        reach("shard-flushed")
    except OSError as error:
        error.filename = error.filename or os.fspath(path)
        raise
    return results, FileRecord(shard.num_bytes, shard.crc32)


class _ShardWriter:
    """A file that is written by a thread, a few pieces behind the one that computes checksums."""

    def __init__(self, file: io.FileIO, thread: ThreadPoolExecutor) -> None:
        self._file, self._thread = file, thread
        self.num_bytes, self.crc32 = 0, 0
        self._short = bytearray()
        """Pieces too short to be written by themselves."""
        self._under_way: deque[Future[None]] = deque()
        self._buffers: list[Tensor] = []
        self._copied = 0
        """Pieces that have been copied into them, of all tensors."""
        self._flushed_bytes = 0

    def put_archive(self, values: Tensor) -> None:
        """Write a tensor, whose memory is read until `finish`; one of more than 64 MiB is written when this returns."""
        head = render_head(values.dtype, values.shape)
        self._put(head.content)
        crc32, count = 0, 0
        for piece in self._pieces(values):
            ours = self._put(piece)
            crc32 = combine_crc32(crc32, ours, len(piece)) if count else ours
            count += len(piece)
        self._put(render_tail(head, crc32))
        # Two large tensors that were made for this need not be in memory together.
        if values.nbytes > _LARGE_BYTES:
            self._wait(0)

    def finish(self) -> None:
        """Wait until all has been written."""
        self._write_short()
        self._wait(0)

    def _pieces(self, values: Tensor) -> Iterator[memoryview]:
        """The values row by row, in pieces."""
        if _is_memory(values):
            yield from (_bytes_of(part) for part in _flatten(values).split(_PIECE_BYTES))
            return
        for part in split_rows(values, _PIECE_BYTES):
            # One more than may be under way: the piece that was in this one before has been written.
            if len(self._buffers) <= _PIECES:
                self._buffers.append(torch.empty(_PIECE_BYTES, dtype=torch.uint8))
            place = self._buffers[self._copied % (_PIECES + 1)][: part.nbytes]
            self._copied += 1
            place.view(part.dtype).view(part.shape).copy_(part)
            yield _bytes_of(place)

    def _put(self, data: bytes | memoryview) -> int:
        """Have it written, and return the checksum of only this data."""
        crc32 = zlib.crc32(data)
        self.num_bytes += len(data)
        if len(data) < _SHORT_BYTES:
            self.crc32 = zlib.crc32(data, self.crc32)
            self._short += data
            if len(self._short) >= _SHORT_BYTES:
                self._write_short()
            return crc32
        self.crc32 = combine_crc32(self.crc32, crc32, len(data))
        self._write_short()
        self._submit(data)
        return crc32

    def _write_short(self) -> None:
        if self._short:
            self._submit(memoryview(self._short))
            self._short = bytearray()

    def _submit(self, data: memoryview | bytes) -> None:
        self._under_way.append(self._thread.submit(self._write, data))
        self._wait(_PIECES)

    def _wait(self, most: int) -> None:
        """Wait until no more than so many pieces are under way. Raises what writing has raised."""
        while len(self._under_way) > most:
            self._under_way.popleft().result()

    def _write(self, data: memoryview | bytes) -> None:
        """On the thread."""
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
            reach("shard-begun")
        # The device is busy from the start, instead of only when all has been written. Whole pages: one that is on its
        # way cannot be added to.
        ready = self._file.tell() // _FLUSH_BYTES * _FLUSH_BYTES
        if ready > self._flushed_bytes:
            begin_flush(self._file.fileno(), self._flushed_bytes, ready - self._flushed_bytes)
            self._flushed_bytes = ready


def _is_memory(values: Tensor) -> bool:
    """Return whether the values are one stretch of host memory."""
    return device.is_cpu(values) and values.is_contiguous()


def _flatten(values: Tensor) -> Tensor:
    """A stretch of host memory as bytes [num_bytes], uint8."""
    # Dimensions of one element may have any stride, which view() and reshape() keep.
    return values.as_strided((values.numel(),), (1,)).view(torch.uint8)


def split_rows(values: Tensor, most_bytes: int, itemsize: int | None = None) -> Iterator[Tensor]:
    """Views of consecutive values, row by row, each of so many bytes at most.

    itemsize: bytes of each value, if not its dtype's.
    """
    itemsize = itemsize or values.itemsize
    if values.numel() * itemsize <= most_bytes:
        yield values
    elif len(values) == 1:
        yield from split_rows(values[0], most_bytes, itemsize)
    else:
        rows = max(1, most_bytes * len(values) // (values.numel() * itemsize))
        for part in values.split(rows):
            yield from split_rows(part, most_bytes, itemsize)


def _bytes_of(values: Tensor) -> memoryview:
    return values.numpy().data


# ---- reading


class SavedBox(NamedTuple):
    """A box in a file."""

    start: int
    """Of its archive."""
    length: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Fill(NamedTuple):
    """A part of a box, and where it belongs."""

    offsets: Sequence[int]
    """Of the part in the box."""
    target: Tensor
    """On any device, of any strides and dtype, in the shape of the part."""


def read_boxes(file: io.FileIO, box: SavedBox, fills: Sequence[Fill], *, verify: bool) -> int | None:
    """Fill several targets with parts of one box; verify: read all of it once, and return the crc32 of its archive.

    Raises OSError, CheckpointError where the file does not hold such a box.
    """
    if not verify:
        for fill in fills:
            read_box(file, box, fill.offsets, fill.target)
        return None
    for fill in fills:
        _check_part(file, box, fill.offsets, fill.target)
    values = find_values(file, box.start, box.length, box.dtype, box.shape)
    # What says where they are may be damaged itself.
    end = box.start + box.length - math.prod(box.shape) * box.dtype.itemsize
    if values is None or not box.start <= values <= end:
        raise DamagedCheckpointError(
            f"{file.name!s} is damaged: no tensor of shape {box.shape} lies at byte {box.start}"
        )
    crc32 = compute_range_checksum(file, box.start, values - box.start)
    memory = torch.empty(0, dtype=torch.uint8)
    num_bytes = 0
    for piece in _list_pieces(box.shape, box.dtype.itemsize):
        shape = [length for _, length in piece]
        places = [_meet(piece, fill) for fill in fills]
        found = [place for place in places if place is not None]
        # Values that belong to one place, as they are, need no other memory.
        into = found[0][1] if len(found) == 1 and list(found[0][1].shape) == shape else None
        if into is None or not _is_memory(into) or into.dtype != box.dtype:
            size = math.prod(shape) * box.dtype.itemsize
            memory = memory if len(memory) >= size else torch.empty(_VERIFIED_PIECE_BYTES, dtype=torch.uint8)
            into = memory[:size].view(box.dtype).view(shape)
        flat = _flatten(into)
        _read_exactly(file, values + num_bytes, flat)
        crc32 = zlib.crc32(_bytes_of(flat), crc32)
        num_bytes += len(flat)
        for part, target in found:
            if target is not into:
                target.copy_(into[part])
    end = values + num_bytes
    return compute_range_checksum(file, end, box.start + box.length - end, crc32)


def compute_range_checksum(file: io.FileIO, start: int, num_bytes: int, crc32: int = 0) -> int:
    """crc32 of a range of a file, after data whose checksum is `crc32`. Raises OSError, CheckpointError where the file
    is too short."""
    memory = torch.empty(min(num_bytes, _VERIFIED_PIECE_BYTES), dtype=torch.uint8)
    for first in range(start, start + num_bytes, _VERIFIED_PIECE_BYTES):
        piece = memory[: start + num_bytes - first]
        _read_exactly(file, first, piece)
        crc32 = zlib.crc32(_bytes_of(piece), crc32)
    return crc32


def _list_pieces(shape: Sequence[int], itemsize: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Boxes (start, length for each dimension) of values that follow each other, of an array of this shape, in the
    order of the values; each fits into what is read at once."""
    if math.prod(shape) * itemsize <= _VERIFIED_PIECE_BYTES:
        yield tuple((0, size) for size in shape)
        return
    row_bytes = math.prod(shape[1:]) * itemsize
    rows = _VERIFIED_PIECE_BYTES // row_bytes
    for first in range(0, shape[0], max(1, rows)):
        if rows:
            yield ((first, min(rows, shape[0] - first)), *((0, size) for size in shape[1:]))
        else:
            yield from (((first, 1), *inner) for inner in _list_pieces(shape[1:], itemsize))


def _meet(piece: Sequence[tuple[int, int]], fill: Fill) -> tuple[tuple[slice, ...], Tensor] | None:
    """Return what a piece of a box and a part of it have in common: where in the piece, and the view of the target."""
    inner, outer = [], []
    for (start, length), offset, size in zip(piece, fill.offsets, fill.target.shape, strict=True):
        first, last = max(start, offset), min(start + length, offset + size)
        if first >= last:
            return None
        inner.append(slice(first - start, last - start))
        outer.append(slice(first - offset, last - offset))
    return tuple(inner), fill.target[tuple(outer)]


def read_box(file: io.FileIO, box: SavedBox, offsets: Sequence[int], target: Tensor) -> None:
    """Fill `target`, on any device, of any strides and dtype, with the part of a box that begins at `offsets`.

    Raises OSError, CheckpointError where the file does not hold such a box, and what torch raises where a damaged
    archive is none of torch's.
    """
    _check_part(file, box, offsets, target)
    if not target.numel():
        return
    values = find_values(file, box.start, box.length, box.dtype, box.shape)
    if values is None:
        _read_other(file, box, offsets, target)
        return
    _BoxReader(file, box.dtype).fill(values, box.shape, offsets, target)


def _check_part(file: io.FileIO, box: SavedBox, offsets: Sequence[int], target: Tensor) -> None:
    """Raise CheckpointError unless there is such a part in the box, and such a stretch in the file."""
    if len(target.shape) != len(box.shape) or any(
        not 0 <= first <= first + count <= size
        for first, count, size in zip(offsets, target.shape, box.shape, strict=True)
    ):
        raise CheckpointError(
            f"{file.name!s}: the box at byte {box.start} is {box.shape}; elements {tuple(target.shape)} from "
            f"{tuple(offsets)} on are not in it"
        )
    size = os.fstat(file.fileno()).st_size
    if not (type(box.start) is type(box.length) is int and box.start >= 0 and 0 <= box.length <= size - box.start):
        raise CheckpointError(
            f"{file.name!s} has {size} bytes; its table of contents says {box.length} from {box.start} on"
        )


def _read_exactly(file: io.FileIO, position: int, memory: Tensor) -> None:
    file.seek(position)
    view = _bytes_of(memory)
    while view:
        count = file.readinto(view)
        if not count:
            raise CheckpointError(f"{file.name!s} ends {len(view)} bytes too early; its table of contents says more")
        view = view[count:]


def _read_other(file: io.FileIO, box: SavedBox, offsets: Sequence[int], target: Tensor) -> None:
    """The same from any archive that torch reads, with the whole box in memory."""
    file.seek(box.start)
    content = read_restricted(io.BytesIO(file.read(box.length)), f"{file.name!s}: the box at byte {box.start}")
    if not isinstance(content, Tensor) or tuple(content.shape) != box.shape:
        raise CheckpointError(f"{file.name!s}: no tensor of shape {box.shape} lies at byte {box.start}")
    target.copy_(content[tuple(slice(first, first + n) for first, n in zip(offsets, target.shape, strict=True))])


class _BoxReader:
    """Reads parts of a box whose values lie row by row. Positions are the file's."""

    def __init__(self, file: io.FileIO, dtype: torch.dtype) -> None:
        self._file, self._dtype = file, dtype
        self._memory = torch.empty(0, dtype=torch.uint8)

    def fill(self, position: int, shape: Sequence[int], offsets: Sequence[int], target: Tensor) -> None:
        """Fill `target` with the part at `offsets` of an array of this shape that begins at `position`."""
        row_bytes = torch.Size(shape[1:]).numel() * self._dtype.itemsize
        if tuple(target.shape[1:]) == tuple(shape[1:]):
            self._fill_stretch(position + (offsets[0] * row_bytes if offsets else 0), target)
            return
        wanted_bytes = target[0].numel() * self._dtype.itemsize
        if row_bytes > _PIECE_BYTES or wanted_bytes >= _SHORTEST_READ_BYTES:
            for row in range(len(target)):
                self.fill(position + (offsets[0] + row) * row_bytes, shape[1:], offsets[1:], target[row])
            return
        rows = _PIECE_BYTES // row_bytes
        wanted = tuple(slice(first, first + n) for first, n in zip(offsets[1:], target.shape[1:], strict=True))
        for first in range(0, len(target), rows):
            part = target[first : first + rows]
            whole = self._take(position + (offsets[0] + first) * row_bytes, (len(part), *shape[1:]))
            part.copy_(whole[(slice(None), *wanted)])

    def _fill_stretch(self, position: int, target: Tensor) -> None:
        """Fill `target` with values that follow each other in the file."""
        if _is_memory(target) and target.dtype == self._dtype:
            _read_exactly(self._file, position, _flatten(target))
            return
        for part in split_rows(target, _PIECE_BYTES, self._dtype.itemsize):
            part.copy_(self._take(position, part.shape))
            position += part.numel() * self._dtype.itemsize

    def _take(self, position: int, shape: Sequence[int]) -> Tensor:
        """Values that follow each other in the file, in memory that the next ones take."""
        num_bytes = torch.Size(shape).numel() * self._dtype.itemsize
        if len(self._memory) < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        place = self._memory[:num_bytes]
        _read_exactly(self._file, position, place)
        return place.view(self._dtype).view(torch.Size(shape))
