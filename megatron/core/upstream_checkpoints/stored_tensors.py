# SPDX-License-Identifier: Apache-2.0
"""The tensors of a checkpoint on disk, one after the other, without a model: for tools that look into one.

    for tensor in open_checkpoint(path).tensors:
        print(tensor.key, tensor.shape, tensor.dtype)
        for box, values in tensor.boxes():      # as it was saved, box by box
            ...
        full = tensor.read()                    # or the whole of it

Reads our checkpoints and upstream's, `torch_dist` and `torch` ones of any layout. In memory is what was asked for: a
box, or a tensor. Nothing is executed from a pickle: tables of contents go through safe_pickle.py, tensors through
torch's restricted unpickler.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from megatron.core.dist_checkpointing.directory import find_directory, saved_iterations
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, read_manifest
from megatron.core.dist_checkpointing.mapping import RNG_PREFIX
from megatron.core.dist_checkpointing.safe_pickle import read_metadata
from megatron.core.dist_checkpointing.saved_boxes import BoxReader, LazyTensor
from megatron.core.dist_checkpointing.serialization import TENSORS_DOCUMENT, read_valid_rows
from megatron.core.dist_checkpointing.torch_dist import METADATA_NAME
from megatron.core.errors import CheckpointError
from megatron.core.paths import explain_no_directory
from megatron.core.placement import Box
from megatron.core.upstream_checkpoints.common_state import name_format
from megatron.core.upstream_checkpoints.diagnosis import explain_other_content
from megatron.core.upstream_checkpoints.rank_file import find_legacy_file
from megatron.core.upstream_checkpoints.rank_files import open_legacy

OUR_FORMAT = "torch_dist"
"""`StoredCheckpoint.format` of what this program saves for itself."""


@dataclass(frozen=True)
class StoredTensor(LazyTensor):
    """A tensor in files; reading it raises CheckpointError."""

    key: str
    boxes: Callable[[], Iterator[tuple[Box, Tensor]]]
    """The boxes it was saved in, each with its values."""
    valid_rows: int | None = None
    """Rows of dimension 0 that mean something; None for all of them."""


@dataclass(frozen=True)
class StoredCheckpoint:
    """One checkpoint on disk."""

    path: Path
    format: str
    """`torch_dist`; `torch_dist (upstream)`, `torch (upstream)`, `torch_dcp (upstream)`, `fsdp_dtensor (upstream)` or
    `state_dict (upstream)`, only the weights; `torch_dist without its manifest.json`, of ours; or `of
    torch.distributed.checkpoint`, where another program wrote it."""
    iteration: int | None
    world_size: int | None
    """Processes that wrote it; None where that is written nowhere."""
    tensors: list[StoredTensor]
    """Sorted by key."""
    objects: list[str] = field(default_factory=list)
    """Keys of entries that are no tensors, which upstream pickles. They are never opened."""


def open_checkpoint(root: Path, iteration: int | None = None) -> StoredCheckpoint:
    """The checkpoint in `root`, or an iteration's, or the one that the tracker names, where `root` has several.

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
    if (other := explain_other_content(where)) is not None:
        raise CheckpointError(f"{where} {other[0]}; {other[1]}")
    raise CheckpointError(f"{where} holds no checkpoint in the formats torch_dist or torch: it has no {METADATA_NAME}")


def count_bytes(tensor: StoredTensor) -> int:
    """Bytes of all its elements, padding included."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def kind_of(key: str) -> str:
    """Return what a tensor is to a run: `weights`, `optimizer` or `random numbers`."""
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
    manifest = read_manifest(path) if (path / MANIFEST_NAME).exists() else None
    # What we save for upstream has a manifest, too; only our format has this document.
    is_ours = manifest is not None and f"{TENSORS_DOCUMENT}.json" in manifest.files
    valid_rows = read_valid_rows(path) if is_ours else {}
    entries = metadata.state_dict_metadata
    reader = BoxReader(path, metadata)
    tensors = [
        StoredTensor(
            tuple(entry.size),
            entry.properties.dtype,
            functools.partial(reader.read_whole, key),
            key,
            functools.partial(reader.read_boxes, key),
            valid_rows.get(key),
        )  # fmt: skip
        for key, entry in sorted(entries.items())
        if isinstance(entry, TensorStorageMetadata)
    ]
    return StoredCheckpoint(
        path,
        OUR_FORMAT if is_ours else _name_other(path, metadata),
        _iteration_in_name(path) if manifest is None else manifest.iteration,
        None if manifest is None else manifest.world_size,
        tensors,
        sorted(key for key, entry in entries.items() if isinstance(entry, BytesStorageMetadata)),
    )


def _name_other(path: Path, metadata: Metadata) -> str:
    if (path / f"{TENSORS_DOCUMENT}.json").exists():
        return f"{OUR_FORMAT} without its {MANIFEST_NAME}"
    found = name_format(path, metadata)
    return "of torch.distributed.checkpoint" if found is None else f"{found} (upstream)"


# ---- torch


def _open_legacy(path: Path) -> StoredCheckpoint:
    found = open_legacy(path)
    tensors = [_stored(key, found.tensors[key]) for key in sorted(found.tensors)]
    return StoredCheckpoint(
        found.path,
        "torch (upstream)",
        _iteration_in_name(found.path),
        found.world_size,
        tensors,
        sorted(set(found.ignored)),
    )


def _stored(key: str, data: LazyTensor) -> StoredTensor:
    """A tensor that is put together from the files of all ranks when it is used."""
    box = tuple((0, size) for size in data.shape)
    return StoredTensor(data.shape, data.dtype, data.read, key, lambda: iter([(box, data.read())]))
