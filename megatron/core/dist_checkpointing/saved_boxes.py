# SPDX-License-Identifier: Apache-2.0
"""Boxes of tensors in the files of torch.distributed.checkpoint, read one by one, and tensors that are put together
when they are asked for."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron.core.dist_checkpointing.safe_pickle import read_restricted, refuse_outside
from megatron.core.dist_checkpointing.shard_files import SavedBox, read_box
from megatron.core.errors import CheckpointError
from megatron.core.placement import Box


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read, or put together, when it is asked for."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    """The whole tensor; it may be mapped from a file. Raises CheckpointError."""

    @classmethod
    def of(cls, tensor: Tensor) -> LazyTensor:
        """One that is there already."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)


class BoxReader:
    """Reads regions of the tensors in a directory, and of the boxes they were saved in only those that are concerned.

    Sizes that the table of contents claims are compared with the files before any memory is asked for.
    """

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        self.directory = directory
        self.metadata = metadata

    def find(self, key: str) -> TensorStorageMetadata:
        """The record of a tensor. Raises CheckpointError where there is none of this key."""
        entry = self.metadata.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{self.directory}: {key} is no tensor in its table of contents")
        return entry

    def read_region(self, key: str, region: Box) -> Tensor:
        """The values of a box of a tensor, whatever boxes it was saved in. Raises CheckpointError."""
        entry = self.find(key)
        reads = []
        for chunk in entry.chunks:
            meeting = [
                (max(start, at), min(start + length, at + size))
                for (start, length), at, size in zip(region, chunk.offsets, chunk.sizes, strict=True)
            ]
            if all(first < last for first, last in meeting):
                reads.append((self._locate_box(key, chunk), chunk, meeting))
        shape = [length for _, length in region]
        # Boxes of one tensor do not overlap, so that as many elements as the region has are all of it; what is missing
        # would otherwise stay whatever the memory held.
        filled = sum(math.prod(last - first for first, last in meeting) for _, _, meeting in reads)
        if filled != math.prod(shape):
            raise CheckpointError(f"{self.directory}: {key}: {filled} of {math.prod(shape)} elements are saved")
        values = torch.empty(shape, dtype=entry.properties.dtype)
        for (path, box), chunk, meeting in reads:
            place = values[_slices(meeting, [start for start, _ in region])]
            offsets = [first - at for (first, _), at in zip(meeting, chunk.offsets, strict=True)]
            self._fill(key, path, box, offsets, place)
        return values

    def read_whole(self, key: str) -> Tensor:
        """A whole tensor. Raises CheckpointError."""
        return self.read_region(key, tuple((0, size) for size in self.find(key).size))

    def read_boxes(self, key: str) -> Iterator[tuple[Box, Tensor]]:
        """Yield the boxes that a tensor was saved in, each with its values. Raises CheckpointError."""
        for chunk in self.find(key).chunks:
            yield tuple(zip(chunk.offsets, chunk.sizes, strict=True)), self.read_chunk(key, chunk)

    def read_chunk(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        """The values of one saved box. Raises CheckpointError."""
        path, box = self._locate_box(key, chunk)
        values = torch.empty(box.shape, dtype=box.dtype)
        self._fill(key, path, box, [0] * len(box.shape), values)
        return values

    def _locate_box(self, key: str, chunk: ChunkStorageMetadata) -> tuple[Path, SavedBox]:
        dtype = self.find(key).properties.dtype
        path, start, length = self._locate(key, chunk.offsets, math.prod(chunk.sizes) * dtype.itemsize)
        return path, SavedBox(start, length, dtype, tuple(chunk.sizes))

    @staticmethod
    def _fill(key: str, path: Path, box: SavedBox, offsets: Sequence[int], target: Tensor) -> None:
        """Fill `target` with the part of a saved box that begins at `offsets`."""
        try:
            with io.FileIO(path) as file:
                read_box(file, box, offsets, target)
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
        except Exception as error:  # a damaged archive may raise anything
            raise CheckpointError(f"{path} is damaged: {key} cannot be read ({type(error).__name__})") from None

    def read_object(self, key: str) -> Any:
        """An entry that is no tensor, by the restricted unpickler. Raises CheckpointError."""
        entry = self.metadata.state_dict_metadata.get(key)
        if not isinstance(entry, BytesStorageMetadata):
            raise CheckpointError(f"{self.directory} holds no object {key}")
        path, offset, length = self._locate(key, None, 0)
        where = f"{path} ({key})"
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                content = file.read(length)
        except OSError as error:
            raise CheckpointError(f"{where} cannot be read: {error.strerror or error}") from error
        return read_restricted(io.BytesIO(content), where)

    def _locate(self, key: str, offsets: Sequence[int] | None, num_bytes: int) -> tuple[Path, int, int]:
        """(file, start, length) of an entry that holds so many bytes of values."""
        index = MetadataIndex(key, None if offsets is None else torch.Size(offsets))
        stored = (self.metadata.storage_data or {}).get(index)
        if stored is None:
            where = "" if offsets is None else f": the box at {tuple(offsets)}"
            raise CheckpointError(f"{self.directory}: {key}{where} lies in no file")
        name, offset, length = stored.relative_path, stored.offset, stored.length
        refuse_outside(self.directory, name)
        path = self.directory / name
        try:
            size = path.stat().st_size
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
        # The table of contents comes with the checkpoint, which anyone may have made.
        are_numbers = isinstance(offset, int) and isinstance(length, int)
        if not are_numbers or offset < 0 or not num_bytes <= length <= size - offset:
            raise CheckpointError(
                f"{path} is damaged: {key}, with {num_bytes} bytes of values, is said to be {length} bytes from "
                f"{offset} on; the file has {size}"
            )
        return path, offset, length


class SavedSlice(NamedTuple):
    """Place of a tensor of ours in a checkpoint that has other names."""

    key: str
    layer: int | None
    """Index along the leading dimension; None where the tensor is not one of a stack."""
    starts: Mapping[tuple[int, ...], int]
    """Of a stack: where the saved box that has the layer starts along the leading dimension, by its other offsets."""


@dataclass(frozen=True)
class RenamedTable:
    """A table of contents under our names, and where each tensor really lies."""

    metadata: Metadata
    slices: Mapping[str, SavedSlice]

    def read(self, reader: BoxReader, name: str) -> Tensor:
        """A whole tensor of ours. Raises CheckpointError."""
        key, layer, _ = self.slices[name]
        if layer is None:
            return reader.read_whole(key)
        return reader.read_region(key, ((layer, 1), *((0, size) for size in reader.find(key).size[1:])))[0]


def _slices(bounds: Sequence[tuple[int, int]], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first - at, last - at) for (first, last), at in zip(bounds, origin, strict=True))
