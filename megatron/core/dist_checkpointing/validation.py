"""Do the boxes of a checkpoint make up its tensors, and do its tensors fit this model?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata

from megatron.core.dist_checkpointing.mapping import OPTIMIZER_PREFIX, RNG_PREFIX, ShardedTensor
from megatron.core.errors import CheckpointError

_LISTED = 30


class ModelMismatchError(CheckpointError):
    """The checkpoint's tensors are not those of this model."""


def check_coverage(metadata: Metadata) -> None:
    """Raise CheckpointError unless the boxes of every tensor cover it, each element once."""
    for key, tensor in metadata.state_dict_metadata.items():
        if isinstance(tensor, TensorStorageMetadata):
            # As many elements as the tensor has, and none twice: together that means each one once.
            covered = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
            if covered != math.prod(tensor.size) or _overlap(tensor.chunks):
                raise CheckpointError(
                    f"{key}: the shards of all processes hold {covered} elements of a tensor of shape "
                    f"{tuple(tensor.size)}, or overlap; a placement is wrong"
                )


def saved_key(tensor: ShardedTensor, metadata: Metadata) -> str | None:
    """The key to load the tensor from; None when the checkpoint has none."""
    for key in (tensor.key, tensor.fallback_key):
        if key is not None and isinstance(metadata.state_dict_metadata.get(key), TensorStorageMetadata):
            return key
    return None


def saved_shape(key: str, metadata: Metadata) -> tuple[int, ...]:
    """Shape of a saved tensor."""
    tensor = metadata.state_dict_metadata[key]
    assert isinstance(tensor, TensorStorageMetadata)
    return tuple(tensor.size)


def fits(tensor: ShardedTensor, shape: tuple[int, ...], saved_valid_rows: int | None) -> bool:
    """Whether a saved tensor of this shape can be loaded: the same shape, or the same rows with other padding."""
    # Rows of padding are neither compared nor loaded: the vocabulary may have been padded for another tensor-parallel
    # size.
    if shape == tensor.global_shape:
        return tensor.valid_rows == saved_valid_rows or None in (tensor.valid_rows, saved_valid_rows)
    if tensor.valid_rows is None or len(shape) != len(tensor.global_shape) or shape[1:] != tensor.global_shape[1:]:
        return False
    return shape[0] >= tensor.valid_rows if saved_valid_rows is None else saved_valid_rows == tensor.valid_rows


def check_fit(tensors: Iterable[ShardedTensor], metadata: Metadata, valid_rows: Mapping[str, int]) -> None:
    """Raise ModelMismatchError that lists every tensor which the checkpoint lacks or has in another shape.

    valid_rows: rows without padding of the saved tensors that are padded, by key.
    """
    problems = []
    for tensor in tensors:
        key = saved_key(tensor, metadata)
        if key is None:
            problems.append(f"{tensor.key} is missing (the model's shape is {tensor.global_shape})")
            continue
        shape, rows = saved_shape(key, metadata), valid_rows.get(key)
        if not fits(tensor, shape, rows):
            ours = _shape_text(tensor.global_shape, tensor.valid_rows)
            problems.append(f"{key} is {_shape_text(shape, rows)} in the checkpoint, {ours} in the model")
    refuse_mismatch(problems)


def check_all_used(wanted: Iterable[str], metadata: Metadata) -> None:
    """Raise ModelMismatchError when the checkpoint holds parameters that the model, on whatever process, does not."""
    saved = {key for key in metadata.state_dict_metadata if not key.startswith((OPTIMIZER_PREFIX, RNG_PREFIX))}
    refuse_mismatch(f"{key} is in the checkpoint only" for key in sorted(saved - set(wanted)))


def refuse_mismatch(problems: Iterable[str]) -> None:
    """Raise ModelMismatchError that lists the problems, if there are any."""
    problems = list(problems)
    if problems:
        # Another model differs in every tensor: a screenful shows it as well as thousands of lines.
        shown = problems[:_LISTED]
        more = [f"and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
        raise ModelMismatchError(f"the checkpoint is of another model: {'; '.join([*shown, *more])}")


def _shape_text(shape: tuple[int, ...], valid_rows: int | None) -> str:
    return f"{shape}" if valid_rows is None else f"{shape} ({valid_rows} rows used)"


def _overlap(chunks: list[ChunkStorageMetadata]) -> bool:
    """Whether two of the boxes share an element. Sorted by start along dimension 0, only neighbours need a look."""
    ordered = sorted(chunks, key=lambda chunk: tuple(chunk.offsets))
    for position, first in enumerate(ordered):
        for second in ordered[position + 1 :]:
            if first.offsets and second.offsets[0] >= first.offsets[0] + first.sizes[0]:
                break
            if all(
                a < b + m and b < a + n
                for a, n, b, m in zip(first.offsets, first.sizes, second.offsets, second.sizes, strict=True)
            ):
                return True
    return False
