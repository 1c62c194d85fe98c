"""Upstream's `torch` checkpoints of several model-parallel ranks: their files as one.

    mp_rank_01_002/model_optim_rng.pt       tensor-parallel rank 1 of pipeline stage 2; mp_rank_01 without stages

A file holds its stage's layers, numbered from 0, and of each tensor its rank's shard. How a tensor is cut is written
nowhere in it; it follows from the shapes of the shard and of the model's tensor, and from what upstream does: a cut
runs along one dimension, the ranks lie in order, and a gated first layer is cut in its gate and its up projection.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.legacy import FILE_NAME, LegacyWeights, read_legacy_weights
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.errors import CheckpointError

_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
_LAYER = re.compile(r"(?P<start>(?:.*\.)?decoder\.layers)\.(?P<number>\d+)\.(?P<rest>.+)")


def read_all_ranks(file: Path, tensors: Iterable[ShardedTensor], *, with_optimizer: bool = False) -> LegacyWeights:
    """The full tensors of a checkpoint, as far as `tensors` asks for them; of others a shard, which tells the name.

    file: of its first rank. Raises CheckpointError where files are missing, or for a layout that is not known.
    """
    first = read_legacy_weights(file, with_optimizer=with_optimizer)
    paths = {path.parent.name: path for path in sorted(file.parent.parent.glob(f"mp_rank_*/{FILE_NAME}"))}
    args = first.common.args
    # Weights alone say nothing about their layout; a single file is then taken to be all.
    if len(paths) == 1 and not any((args.get(name) or 1) != 1 for name in _SIZES):
        return first
    tp, pp = (_size(args, name, file) for name in _SIZES)
    for name in ("expert_model_parallel_size", "virtual_pipeline_model_parallel_size"):
        if (args.get(name) or 1) != 1:
            raise CheckpointError(
                f"{file.parent.parent} was written with {name} {args[name]}, which its files cannot be joined of; "
                "save it with upstream's --ckpt-format torch_dist"
            )
    places = {_place(name): path for name, path in paths.items()}
    expected = [(rank, stage) for stage in range(pp) for rank in range(tp)]
    if sorted(places, key=str) != sorted(expected, key=str):
        raise CheckpointError(
            f"{file.parent.parent} holds the files of {len(paths)} ranks ({', '.join(sorted(paths)[:4])}); its "
            f"settings say tensor-parallel size {tp} and pipeline-parallel size {pp}: files are missing or mixed up"
        )
    files = {place: read_legacy_weights(path, with_optimizer=with_optimizer) for place, path in places.items()}
    wanted = {key: tensor for tensor in tensors for key in (tensor.key, tensor.fallback_key) if key is not None}
    is_gated = bool(args.get("swiglu") or args.get("quick_geglu"))
    joined: dict[str, Tensor] = {}
    layers = 0
    for stage in range(pp):
        shards = [files[rank, stage].tensors for rank in range(tp)]
        for name in shards[0]:
            missing = [rank for rank in range(tp) if name not in shards[rank]]
            if missing:
                raise CheckpointError(f"{places[missing[0], stage]}: {name} is missing, which other ranks have")
            full_name = _renumber(name, layers)
            # Where it is tied to the embedding, the last stage has a copy.
            if name.endswith("output_layer.weight") and not args.get("untie_embeddings_and_output_weights", True):
                continue
            parts = 2 if is_gated and ".linear_fc1." in name else 1
            target = wanted.get(full_name)
            cut = [shard[name] for shard in shards]
            joined[full_name] = cut[0] if target is None else _join(cut, target, parts)
        layers += _count_layers(shards[0])
    return LegacyWeights(joined, [name for weights in files.values() for name in weights.ignored], first.common)


def _join(shards: list[Tensor], target: ShardedTensor, parts: int) -> Tensor:
    """The tensor whose shards these are; the first of them where it was not cut, or where no cut explains the shapes,
    which the comparison of shapes then refuses."""
    found, full = shards[0].shape, target.global_shape
    if len(shards) == 1 or len(found) != len(full):
        return shards[0]
    # A vocabulary may be padded to another number of rows, so that its rows tell nothing; it is always cut along them.
    cut = [0] if target.valid_rows is not None else [dim for dim, size in enumerate(found) if size != full[dim]]
    if len(cut) != 1:
        return shards[0]
    (dim,) = cut
    if parts > 1 and found[dim] % parts == 0:
        pieces = [shard.chunk(parts, dim) for shard in shards]
        return torch.cat([piece[part] for part in range(parts) for piece in pieces], dim)
    return torch.cat(shards, dim)


def _place(name: str) -> tuple[int, int]:
    match = _RANK.fullmatch(name)
    return (-1, -1) if match is None else (int(match[1]), int(match[2] or 0))


def _size(args: Mapping[str, Any], name: str, file: Path) -> int:
    size = args.get(name)
    if not isinstance(size, int) or size < 1:
        raise CheckpointError(
            f"{file} was written by several model-parallel ranks, and its settings do not say {name}; merge it to "
            "tensor- and pipeline-parallel size 1 first"
        )
    return size


def _renumber(name: str, layers_before: int) -> str:
    found = _LAYER.fullmatch(name)
    if found is None:
        return name
    return f"{found['start']}.{int(found['number']) + layers_before}.{found['rest']}"


def _count_layers(names: Iterable[str]) -> int:
    """How many layers a stage has."""
    numbers = {int(found["number"]) for found in map(_LAYER.fullmatch, names) if found is not None}
    return max(numbers, default=-1) + 1
