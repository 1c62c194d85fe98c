# SPDX-License-Identifier: Apache-2.0
"""Do the boxes of a checkpoint make up its tensors, and do its tensors fit this model?"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata

from megatron.core.collectives import all_gather_object
from megatron.core.dist_checkpointing.agreement import on_every_rank
from megatron.core.dist_checkpointing.mapping import OPTIMIZER_PREFIX, RNG_PREFIX, ShardedStateDict, ShardedTensor
from megatron.core.errors import CheckpointError
from megatron.core.process_groups_config import Group

# Put here by a table of upstream's names; declared for type checkers.
StrictHandling: Any
verify_checkpoint: Any

_LISTED = 30
_LAYER = re.compile(r"(.*?\.layers\.)(\d+)(\..*)", re.DOTALL)


class ModelMismatchError(CheckpointError):
    """The checkpoint's tensors are not this model's."""


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


def list_shapes(metadata: Metadata) -> dict[str, tuple[int, ...]]:
    """Shape of each saved tensor by its key."""
    entries = metadata.state_dict_metadata.items()
    return {key: tuple(entry.size) for key, entry in entries if isinstance(entry, TensorStorageMetadata)}


def fits(tensor: ShardedTensor, shape: tuple[int, ...], saved_valid_rows: int | None) -> bool:
    """Return whether a saved tensor of this shape can be loaded: the same shape, or the same rows with other
    padding."""
    # Rows of padding are neither compared nor loaded: the vocabulary may have been padded for another tensor-parallel
    # size.
    if shape == tensor.global_shape:
        return tensor.valid_rows == saved_valid_rows or None in (tensor.valid_rows, saved_valid_rows)
    if tensor.valid_rows is None or len(shape) != len(tensor.global_shape) or shape[1:] != tensor.global_shape[1:]:
        return False
    return shape[0] >= tensor.valid_rows if saved_valid_rows is None else saved_valid_rows == tensor.valid_rows


@dataclass(frozen=True)
class WantedTensors:
    """Tensors that one process asks a checkpoint for, and those that it cannot have. Travels to the process that judges
    for all."""

    keys: frozenset[str]
    """Under which its tensors are looked for, main parameters' second choice included."""
    found: frozenset[str]
    """Keys in the checkpoint that they are loaded from."""
    lacking: Mapping[str, tuple[int, ...]]
    """Tensors that the checkpoint does not have, with the shape that the model expects."""
    mismatched: tuple[str, ...]
    """A sentence for each tensor of another shape."""


@dataclass(frozen=True)
class KeyReport:
    """Differences between the tensors of a model, on all processes together, and a checkpoint's."""

    lacking: tuple[str, ...]
    """Tensors that only the model has (upstream calls them unexpected): `key (shape)`. The optimizer state of such a
    parameter has no separate entry."""
    surplus: tuple[str, ...]
    """Parameters that only the checkpoint has (upstream calls them missing): their keys."""


def list_wanted(
    tensors: Iterable[ShardedTensor], shapes: Mapping[str, tuple[int, ...]], valid_rows: Mapping[str, int]
) -> tuple[WantedTensors, dict[str, str]]:
    """Return what a process asks for, and for each tensor that can be loaded the key to load it from.

    shapes: of the saved tensors, by key. valid_rows: rows without padding of the saved tensors that are padded, by key.
    """
    sources: dict[str, str] = {}
    keys: set[str] = set()
    lacking: dict[str, tuple[int, ...]] = {}
    mismatched = []
    for tensor in tensors:
        names = [key for key in (tensor.key, tensor.fallback_key) if key is not None]
        keys.update(names)
        key = next((key for key in names if key in shapes), None)
        if tensor.is_optional and (key is None or shapes[key] != tensor.global_shape):
            continue
        if key is None:
            lacking[tensor.key] = tensor.global_shape
            continue
        shape, rows = shapes[key], valid_rows.get(key)
        if fits(tensor, shape, rows):
            sources[tensor.key] = key
        else:
            ours = _shape_text(tensor.global_shape, tensor.valid_rows)
            remedy = _advise_rows(tensor, shape, rows)
            mismatched.append(f"{key} is {_shape_text(shape, rows)} in the checkpoint, {ours} in the model{remedy}")
    return WantedTensors(frozenset(keys), frozenset(sources.values()), lacking, tuple(mismatched)), sources


def _advise_rows(tensor: ShardedTensor, shape: tuple[int, ...], saved_valid_rows: int | None) -> str:
    """Return how a vocabulary that fits into the checkpoint's rows is told to use them all; nothing for other
    tensors."""
    rows = saved_valid_rows or shape[0] if shape else 0
    if tensor.valid_rows is None or tensor.valid_rows >= rows or shape[1:] != tensor.global_shape[1:]:
        return ""
    return f" (--use-checkpoint-args, or --vocab-size {rows}, takes all rows of the checkpoint)"


def judge_wanted(
    wanted: Iterable[WantedTensors], saved: Iterable[str], *, may_lack: bool, may_have_more: bool
) -> KeyReport:
    """Return how the model of all processes and the checkpoint, whose tensors have the keys `saved`, differ, where that
    is tolerated.

    may_lack: parameters and optimizer state that the checkpoint lacks keep their values, as long as it has any
    parameter of the model. may_have_more: parameters that the model lacks are left out. Raises ModelMismatchError that
    lists what is not tolerated: a tensor of another shape never is, nor are random-number states that are not there.
    """
    wanted = list(wanted)
    lacking: dict[str, tuple[int, ...]] = {}
    for part in wanted:
        lacking |= part.lacking
    # Its moments and main parameter say nothing more than that a parameter is new.
    new = {key for key in lacking if not key.startswith((OPTIMIZER_PREFIX, RNG_PREFIX))}
    lacking = {
        key: shape
        for key, shape in lacking.items()
        if not (key.startswith(OPTIMIZER_PREFIX) and key.removeprefix(OPTIMIZER_PREFIX).partition(".")[2] in new)
    }
    asked, found = (frozenset().union(*sets) for sets in zip(*((p.keys, p.found) for p in wanted), strict=True))
    surplus = sorted(key for key in saved if not key.startswith((OPTIMIZER_PREFIX, RNG_PREFIX)) and key not in asked)
    # Nothing in common is no model with additions, but the wrong directory.
    may_lack = may_lack and any(not key.startswith((OPTIMIZER_PREFIX, RNG_PREFIX)) for key in found)
    refused = dict.fromkeys(sentence for part in wanted for sentence in part.mismatched)
    refused |= {
        f"{key} is missing (the model's shape is {shape})": None
        for key, shape in lacking.items()
        if not may_lack or key.startswith(RNG_PREFIX)
    }
    if not may_have_more:
        refused |= {f"{key} is in the checkpoint only": None for key in surplus}
    if refused:
        raise ModelMismatchError(f"the checkpoint is of another model: {'; '.join(shorten_list(refused))}")
    return KeyReport(tuple(f"{key} {shape}" for key, shape in lacking.items()), tuple(surplus))


def fill_wanted(
    tensors: ShardedStateDict,
    shapes: Mapping[str, tuple[int, ...]],
    fill: Callable[[ShardedTensor, str], None],
    group: Group,
    *,
    valid_rows: Mapping[str, int] | None = None,
    may_lack: bool = False,
    may_have_more: bool = False,
) -> KeyReport:
    """Compare the tensors of all members of `group` with the saved ones, and fill one after the other; returns what was
    tolerated. fill: fills a tensor from what is saved under a key. The rest is as in `list_wanted` and `judge_wanted`.
    Raises CheckpointError on every member; tensors may then be half filled."""
    wanted, keys = list_wanted(tensors.values(), shapes, valid_rows or {})
    report = judge_wanted(all_gather_object(wanted, group), shapes, may_lack=may_lack, may_have_more=may_have_more)

    def fill_all() -> None:
        with torch.no_grad():
            for tensor in tensors.values():
                if tensor.key in keys:
                    fill(tensor, keys[tensor.key])

    on_every_rank(group, fill_all)
    return report


def shorten_list(lines: Iterable[str]) -> list[str]:
    """The same with one line for tensors that differ by the number of their layer only, and a screenful at most."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for line in lines:
        match = _LAYER.fullmatch(line)
        before, number, behind = match.groups() if match else (line, None, "")
        numbers.setdefault((before, behind), []).extend([] if number is None else [int(number)])
    folded = [f"{before}{_list_ranges(sorted(found))}{behind}" for (before, behind), found in numbers.items()]
    # Another model differs in every tensor: a screenful shows it as well as thousands of lines.
    more = [f"and {len(folded) - _LISTED} more"] if len(folded) > _LISTED else []
    return [*folded[:_LISTED], *more]


def _list_ranges(numbers: list[int]) -> str:
    """`0-2,5` for 0, 1, 2, 5."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def _shape_text(shape: tuple[int, ...], valid_rows: int | None) -> str:
    return f"{shape}" if valid_rows is None else f"{shape} ({valid_rows} rows used)"


def _overlap(chunks: list[ChunkStorageMetadata]) -> bool:
    """Return whether two of the boxes share an element. Sorted by start along dimension 0, only neighbours need a
    look."""
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
