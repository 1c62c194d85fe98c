"""The tensors of a checkpoint on disk, one after the other, without a model: for tools that look into one.

    for tensor in open_checkpoint(path).tensors:
        print(tensor.key, tensor.shape, tensor.dtype)
        for box, values in tensor.boxes():      # as it was saved, box by box
            ...
        full = tensor.read()                    # or the whole of it

Reads our checkpoints, upstream's `torch_dist` ones and upstream's `torch` ones of one model-parallel rank. In memory is
what was asked for: a box, or a tensor. Nothing is executed from a pickle: tables of contents go through safe_pickle.py,
tensors through torch's restricted unpickler.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron.core.dist_checkpointing.directory import find_directory, saved_iterations
from megatron.core.dist_checkpointing.legacy import find_legacy_file, read_legacy_weights
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, read_manifest
from megatron.core.dist_checkpointing.mapping import RNG_PREFIX
from megatron.core.dist_checkpointing.safe_pickle import read_metadata
from megatron.core.dist_checkpointing.serialization import TENSORS_DOCUMENT, read_document
from megatron.core.dist_checkpointing.shard_files import SavedBox, read_box
from megatron.core.dist_checkpointing.torch_dist import METADATA_NAME
from megatron.core.errors import CheckpointError
from megatron.core.paths import explain_no_directory
from megatron.core.placement import Box


class StoredTensor(Protocol):
    """A tensor in a file."""

    @property
    def key(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def valid_rows(self) -> int | None:
        """Rows of dimension 0 that mean something; None for all of them."""

    def boxes(self) -> Iterator[tuple[Box, Tensor]]:
        """The boxes it was saved in, each with its values. Raises CheckpointError."""

    def read(self) -> Tensor:
        """The whole tensor. Raises CheckpointError."""


@dataclass(frozen=True)
class StoredCheckpoint:
    """One checkpoint on disk."""

    path: Path
    format: str
    """`torch_dist`, `torch_dist (upstream)` or `torch (upstream)`."""
    iteration: int | None
    world_size: int | None
    """Processes that wrote it; None where that is written nowhere."""
    tensors: list[StoredTensor]
    """Sorted by key."""
    objects: list[str] = field(default_factory=list)
    """Keys of entries that are no tensors, which upstream pickles. They are never opened."""


def open_checkpoint(root: Path, iteration: int | None = None) -> StoredCheckpoint:
    """The checkpoint in `root`, or that of an iteration, or the one that the tracker names, where `root` has several.

    Its files are not verified. Raises CheckpointError when there is none, or its table of contents cannot be read.
    """
    obstacle = explain_no_directory(root)
    if obstacle is not None:
        raise CheckpointError(f"{root} {obstacle}; give a checkpoint, or a directory of checkpoints")
    path = root if (root / METADATA_NAME).exists() else find_directory(root, iteration)
    if path is None and iteration is not None:
        saved = ", ".join(map(str, saved_iterations(root))) or "none"
        raise CheckpointError(f"{root} holds no iteration {iteration}; saved iterations: {saved}")
    if path is not None and (path / METADATA_NAME).exists():
        return _open_torch_dist(path)
    legacy = find_legacy_file(root, iteration)
    if legacy is not None:
        return _open_legacy(legacy)
    where = root if path is None else path
    raise CheckpointError(f"{where} holds no checkpoint in the formats torch_dist or torch: it has no {METADATA_NAME}")


def count_bytes(tensor: StoredTensor) -> int:
    """Bytes of all its elements, padding included."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def kind_of(key: str) -> str:
    """What a tensor is to a run: `weights`, `optimizer` or `random numbers`."""
    if key.startswith("optimizer."):
        return "optimizer"
    return "random numbers" if key.startswith((RNG_PREFIX, "rng_state")) else "weights"


def trim_padding(tensor: StoredTensor, box: Box, values: Tensor) -> Tensor:
    """The values of a box without rows that are padding."""
    if tensor.valid_rows is None or not box:
        return values
    return values[: max(0, tensor.valid_rows - box[0][0])]


def _iteration_in_name(directory: Path) -> int | None:
    number = directory.name.removeprefix("iter_")
    return int(number) if number.isdecimal() else None


# ---- torch_dist


def _open_torch_dist(path: Path) -> StoredCheckpoint:
    metadata = read_metadata(path / METADATA_NAME)
    is_ours = (path / MANIFEST_NAME).exists()
    manifest = read_manifest(path) if is_ours else None
    valid_rows = read_document(path, TENSORS_DOCUMENT)["valid_rows"] if is_ours else {}
    entries = metadata.state_dict_metadata
    tensors: list[StoredTensor] = [
        _Shards(path, key, entry, metadata, _own_valid_rows(key, valid_rows))
        for key, entry in sorted(entries.items())
        if isinstance(entry, TensorStorageMetadata)
    ]
    return StoredCheckpoint(
        path,
        "torch_dist" if is_ours else "torch_dist (upstream)",
        _iteration_in_name(path) if manifest is None else manifest.iteration,
        None if manifest is None else manifest.world_size,
        tensors,
        sorted(key for key, entry in entries.items() if isinstance(entry, BytesStorageMetadata)),
    )


def _own_valid_rows(key: str, valid_rows: Mapping[str, Any]) -> int | None:
    rows = valid_rows.get(key)
    return rows if isinstance(rows, int) else None


@dataclass(frozen=True)
class _Shards:
    """A tensor in the files of all processes."""

    directory: Path
    key: str
    entry: TensorStorageMetadata
    metadata: Metadata
    valid_rows: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.entry.size)

    @property
    def dtype(self) -> torch.dtype:
        return self.entry.properties.dtype

    def boxes(self) -> Iterator[tuple[Box, Tensor]]:
        for chunk in self.entry.chunks:
            yield tuple(zip(chunk.offsets, chunk.sizes, strict=True)), self._read_chunk(chunk)

    def read(self) -> Tensor:
        full = torch.empty(self.shape, dtype=self.dtype)
        covered = 0
        for chunk in self.entry.chunks:
            box = tuple(zip(chunk.offsets, chunk.sizes, strict=True))
            place = full[tuple(slice(start, start + length) for start, length in box)]
            self._read_chunk(chunk, place)
            covered += place.numel()
        if covered != full.numel():
            raise CheckpointError(f"{self.directory}: {self.key}: {covered} of {full.numel()} elements are saved")
        return full

    def _read_chunk(self, chunk: ChunkStorageMetadata, target: Tensor | None = None) -> Tensor:
        """Fill `target`, by default a new tensor, with a box, and return it."""
        stored = self.metadata.storage_data.get(MetadataIndex(self.key, chunk.offsets))
        if stored is None:
            raise CheckpointError(f"{self.directory}: {self.key}: the box at {tuple(chunk.offsets)} lies in no file")
        name = stored.relative_path
        # A table of contents may come from anywhere: "../../etc/passwd" is not read.
        if Path(name).name != name:
            raise CheckpointError(
                f"{self.directory}: the table of contents names the file {name!r} outside of it; refused"
            )
        path = self.directory / name
        try:
            with io.FileIO(path) as file:
                # Where a damaged table of contents makes the box longer than any memory, this is what fails.
                target = torch.empty(chunk.sizes, dtype=self.dtype) if target is None else target
                box = SavedBox(stored.offset, stored.length, self.dtype, tuple(chunk.sizes))
                read_box(file, box, [0] * len(chunk.sizes), target)
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
        except Exception as error:  # a damaged archive may raise anything
            raise CheckpointError(f"{path} is damaged: {self.key} cannot be read ({type(error).__name__})") from None
        return target


# ---- torch


def _open_legacy(path: Path) -> StoredCheckpoint:
    weights = read_legacy_weights(path)
    directory = path.parent.parent
    tensors: list[StoredTensor] = [_Whole(key, weights.tensors[key]) for key in sorted(weights.tensors)]
    return StoredCheckpoint(
        directory, "torch (upstream)", _iteration_in_name(directory), 1, tensors, sorted(weights.ignored)
    )


@dataclass(frozen=True)
class _Whole:
    """A tensor of one file, which is mapped and read when it is used."""

    key: str
    data: Tensor
    valid_rows: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def boxes(self) -> Iterator[tuple[Box, Tensor]]:
        yield tuple((0, size) for size in self.shape), self.data

    def read(self) -> Tensor:
        return self.data
