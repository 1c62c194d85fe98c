# SPDX-License-Identifier: Apache-2.0
"""Upstream's optimizer state as it lies in files: flat buffers of each model-parallel rank, and shards of parameters
that were saved flat."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron.core.dist_checkpointing.safe_pickle import refuse_expanded
from megatron.core.dist_checkpointing.saved_boxes import BoxReader, LazyTensor
from megatron.core.errors import CheckpointError
from megatron.core.upstream_checkpoints.names import FLAT_KEY

_BUCKET = re.compile(r"gbuf_idx_(?P<buffer>\d+)\.dtype_.+\.bucket_idx_(?P<bucket>\d+)\.(?P<kind>\w+)")
REMEDY = "save it there with --dist-ckpt-optim-fully-reshardable, or go on with a fresh optimizer: --no-load-optim"
"""What to do where the state cannot be read."""

Read = Callable[[int, int, int], Tensor]
"""(bucket, start, stop) -> these elements of it."""


@dataclass
class SavedFlatBuffer:
    """A buffer of one model-parallel rank: the optimizer state of a model chunk's parameters."""

    sizes: list[int] = field(default_factory=list)
    """Elements of each bucket, without what pads its end."""
    is_joined: bool = False
    """True if its buckets were concatenated, so that `sizes` is one number for all of them."""
    kinds: dict[str, Read] = field(default_factory=dict)
    """`param`, `exp_avg`, ...: how to read it."""


Buffers = Mapping[int, list[SavedFlatBuffer]]
"""By the number of the model-parallel rank: its buffers, one for each model chunk that has parameters."""


# ---- from the files of torch_dist


def read_flat_buffers(reader: BoxReader) -> dict[int, Buffers]:
    """The flat buffers of a checkpoint by the number of the optimizer: 0, and 1 for experts where they have separate
    ones.

    Raises CheckpointError where they are not as upstream writes them.
    """
    ranks: dict[int, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for key in reader.metadata.state_dict_metadata:
        found = FLAT_KEY.fullmatch(key)
        if found is not None:
            ranks[int(found["optimizer"] or 0)][int(found["rank"])].append(key)
    return {
        optimizer: {rank: _read_buffers(reader, keys) for rank, keys in sorted(by_rank.items())}
        for optimizer, by_rank in sorted(ranks.items())
    }


def _read_buffers(reader: BoxReader, keys: list[str]) -> list[SavedFlatBuffer]:
    """Read the buffers of one model-parallel rank."""
    whole = next((key for key in keys if ".param_state/" in key), None)
    if whole is not None:
        return parse_joined_buffers(reader.read_object(whole), f"{reader.directory} ({whole})")
    buckets: dict[int, dict[str, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
    for key in keys:
        found = FLAT_KEY.fullmatch(key)
        place = _BUCKET.fullmatch(found["rest"]) if found is not None else None
        if place is not None and isinstance(reader.metadata.state_dict_metadata[key], TensorStorageMetadata):
            buckets[int(place["buffer"])][place["kind"]][int(place["bucket"])] = key
    listed = next((key for key in keys if ".per_bucket_numel_unpadded/" in key), None)
    unpadded = _list_sizes(reader.read_object(listed)) if listed is not None else {}
    return [
        _describe_buffer(reader, number, by_kind, unpadded.get(number)) for number, by_kind in sorted(buckets.items())
    ]


def _describe_buffer(
    reader: BoxReader, number: int, by_kind: Mapping[str, Mapping[int, str]], listed: list[int] | None
) -> SavedFlatBuffer:
    lengths = {kind: [math.prod(reader.find(keys[i]).size) for i in sorted(keys)] for kind, keys in by_kind.items()}
    any_kind = next(iter(lengths.values()))
    # fully_sharded_bucket_space saves what pads a bucket's end as well; what is listed never counts it.
    sizes = any_kind if listed is None or len(listed) != len(any_kind) else listed
    complete = all(sorted(keys) == list(range(len(sizes))) for keys in by_kind.values())
    if not complete or any(
        length < size for all_ in lengths.values() for length, size in zip(all_, sizes, strict=True)
    ):
        raise CheckpointError(f"{reader.directory}: buckets of optimizer buffer {number} are missing or too short")

    def read(kind: str, bucket: int, start: int, stop: int) -> Tensor:
        return reader.read_region(by_kind[kind][bucket], ((start, stop - start),))

    return SavedFlatBuffer(list(sizes), False, {kind: functools.partial(read, kind) for kind in by_kind})


def _list_sizes(content: Any) -> dict[int, list[int]]:
    """per_bucket_numel_unpadded: for each buffer {dtypes: [elements of each bucket]}."""
    content = (
        content[0] if isinstance(content, list) and len(content) == 1 and isinstance(content[0], list) else content
    )
    sizes: dict[int, list[int]] = {}
    for number, formats in enumerate(content if isinstance(content, list) else []):
        values = list(formats.values()) if isinstance(formats, dict) else []
        if len(values) == 1 and isinstance(values[0], list) and all(isinstance(n, int) for n in values[0]):
            sizes[number] = values[0]
    return sizes


def parse_joined_buffers(content: Any, where: str) -> list[SavedFlatBuffer]:
    """The buffers in what dp_zero_gather_scatter and distrib_optim.pt hold:
    {0: {formats: {"param": flat tensor, ...}}}.

    Raises CheckpointError for anything else.
    """
    content = content[0] if isinstance(content, list) and len(content) == 1 else content
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{where} holds no optimizer state; found {type(content).__name__}, expected a dictionary"
        )
    buffers: list[SavedFlatBuffer] = []
    for number in sorted(key for key in content if isinstance(key, int) and not isinstance(key, bool)):
        by_format = content[number]
        states = list(by_format.values()) if isinstance(by_format, dict) else []
        if len(states) != 1:
            raise CheckpointError(f"{where}: buffer {number} has {len(states)} number formats; expected one; {REMEDY}")
        buffers.append(_parse_state(states[0], f"{where}: buffer {number}"))
    return buffers


def _parse_state(state: Any, where: str) -> SavedFlatBuffer:
    # Before buckets were joined there was one dictionary for each of them.
    parts = state if isinstance(state, list) else [state]
    tensors: list[dict[str, Tensor]] = []
    for part in parts:
        found = {k: v for k, v in part.items() if isinstance(v, Tensor)} if isinstance(part, dict) else {}
        if not found or any(tensor.dim() != 1 for tensor in found.values()) or len({*map(len, found.values())}) != 1:
            raise CheckpointError(f"{where} holds no flat tensors of one length")
        for kind, tensor in found.items():
            refuse_expanded(tensor, f"{where}: {kind}")
        tensors.append(found)
    if any(found.keys() != tensors[0].keys() for found in tensors):
        raise CheckpointError(f"{where}: its buckets hold different state")

    def read(kind: str, bucket: int, start: int, stop: int) -> Tensor:
        return tensors[bucket][kind][start:stop]

    sizes = [len(next(iter(found.values()))) for found in tensors]
    if not isinstance(state, list) and isinstance(unpadded := state.get("numel_unpadded"), int):
        sizes = [min(sizes[0], unpadded)]
    return SavedFlatBuffer(
        sizes, not isinstance(state, list), {kind: functools.partial(read, kind) for kind in tensors[0]}
    )


# ---- shards of parameters flat


def read_flat_shard(reader: BoxReader, key: str, parameter: str, layer: int | None) -> LazyTensor:
    """A tensor of which each rank's shard was saved flat; of a stack one layer."""
    entry, full = reader.find(key), tuple(reader.find(parameter).size)
    cuts = tuple(entry.size)[:-1]
    if any(cut < 1 or size % cut for size, cut in zip(full, cuts, strict=True)):
        raise CheckpointError(f"{reader.directory}: {key} {tuple(entry.size)} holds no equal shards of {full}")
    shard = tuple(size // cut for size, cut in zip(full, cuts, strict=True))
    lead = 0 if layer is None else 1
    if lead and shard[0] != 1:
        raise CheckpointError(f"{reader.directory}: {key} holds several layers in one shard; {REMEDY}")

    def read() -> Tensor:
        values = torch.empty(full[lead:], dtype=entry.properties.dtype)
        for place in itertools.product(*(range(cut) for cut in cuts[lead:])):
            at = (*(() if layer is None else (layer,)), *place)
            flat = reader.read_region(key, (*((index, 1) for index in at), (0, entry.size[-1])))
            bounds = zip(place, shard[lead:], strict=True)
            values[tuple(slice(i * size, (i + 1) * size) for i, size in bounds)] = flat.view(shard[lead:])
        return values

    return LazyTensor(full[lead:], entry.properties.dtype, read)
