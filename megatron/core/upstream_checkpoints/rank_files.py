# SPDX-License-Identifier: Apache-2.0
"""Upstream's `torch` checkpoints: the files of all model-parallel ranks as one.

    mp_rank_01_002_003/model_optim_rng.pt   tensor-parallel rank 1, pipeline stage 2, expert-parallel rank 3;
                                            the last two only where there are several
                      /distrib_optim.pt     flat buffers of a distributed optimizer

A file holds its stage's layers, numbered from 0 in each model chunk, and of each tensor its rank's shard. How a tensor
is cut and where a parameter lies in a flat buffer is written nowhere in it (flat_layout.py).
"""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.mapping import OPTIMIZER_PREFIX
from megatron.core.dist_checkpointing.safe_pickle import read_restricted
from megatron.core.dist_checkpointing.saved_boxes import LazyTensor
from megatron.core.errors import CheckpointError
from megatron.core.process_groups_config import Group
from megatron.core.upstream_checkpoints.common_state import CommonState
from megatron.core.upstream_checkpoints.flat_files import Buffers, parse_joined_buffers
from megatron.core.upstream_checkpoints.flat_layout import Cut, SavedLayout, find_cut
from megatron.core.upstream_checkpoints.flat_state import FlatOptimizerState
from megatron.core.upstream_checkpoints.names import our_names
from megatron.core.upstream_checkpoints.rank_file import FILE_NAME, RankFile, parse_expert_name, read_rank_file

FLAT_FILE_NAME = "distrib_optim.pt"
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?")
_LAYER = re.compile(r"(?P<start>(?:.*\.)?decoder\.layers)\.(?P<number>\d+)\.(?P<rest>.+)")

Rank = tuple[int, int, int]
"""Tensor-parallel rank, pipeline stage, expert-parallel rank."""


@dataclass
class LegacyCheckpoint:
    """The full tensors of a checkpoint, put together when they are read."""

    path: Path
    """Its directory, iter_0000010."""
    tensors: dict[str, LazyTensor]
    """By our names; the optimizer's state under the keys of mapping.py."""
    ignored: list[str]
    """Entries that have no place here: `_extra_state`."""
    common: CommonState
    """State that is no tensor."""
    world_size: int
    """Files of ranks."""
    flat_state: FlatOptimizerState | None = None
    """Optimizer state that has to be located before it can be read."""

    def locate_state(self, group: Group) -> None:
        """Add the optimizer state that lies in flat buffers; every member of `group` calls this.

        Raises CheckpointError on every member where it does not belong to these weights.
        """
        if self.flat_state is not None:
            self.flat_state.locate(lambda name: self.tensors[name].read(), group)
            self.tensors |= self.flat_state.tensors()


def open_legacy(file: Path, *, with_optimizer: bool = False) -> LegacyCheckpoint:
    """A checkpoint, given the file of its first rank.

    Raises CheckpointError where files are missing or damaged, or for a layout that is not known.
    """
    directory = file.parent.parent
    first = read_rank_file(file, with_optimizer=with_optimizer)
    paths = {path.parent.name: path for path in sorted(directory.glob(f"mp_rank_*/{FILE_NAME}"))}
    args = first.common.args
    # A checkpoint of only weights says nothing about their layout; a single file is then taken to be all.
    is_alone = len(paths) == 1 and not any((args.get(name) or 1) != 1 for name in _SIZES)
    if not is_alone:
        _refuse_unknown_layout(args, file)
    layout = SavedLayout() if is_alone else SavedLayout.read(args, str(file))
    if is_alone and len(first.chunks) > 1:
        layout = SavedLayout(vpp=len(first.chunks))
    places = {(0, 0, 0): file} if is_alone else _place_files(paths, layout, directory)
    files = {rank: read_rank_file(path, with_optimizer=with_optimizer) for rank, path in places.items()}
    if any(len(content.chunks) != layout.vpp for content in files.values()):
        raise CheckpointError(
            f"{directory}: a rank's file has {len(first.chunks)} model chunks; the settings say {layout.vpp}"
        )
    tensors = _join_files(files, layout, args, directory)
    found = LegacyCheckpoint(
        directory, tensors, [name for content in files.values() for name in content.ignored], first.common, len(files)
    )
    if first.has_flat_state:
        weights = {name: tensor.shape for name, tensor in tensors.items()}
        buffers = _read_flat_files(places, layout)
        found.flat_state = FlatOptimizerState(buffers, weights, {**args, **_sizes_of(layout)}, str(directory))
    return found


def _sizes_of(layout: SavedLayout) -> dict[str, int]:
    return dict(zip(_SIZES, (layout.tp, layout.pp, layout.ep), strict=True))


def _refuse_unknown_layout(args: Mapping[str, Any], file: Path) -> None:
    for name in _SIZES[:2]:
        if not isinstance(args.get(name), int):
            raise CheckpointError(
                f"{file} was written by several model-parallel ranks, and its settings do not say {name}; merge it to "
                "tensor- and pipeline-parallel size 1 first"
            )
    tp, experts_tp = args.get(_SIZES[0]), args.get("expert_tensor_parallel_size")
    if (args.get(_SIZES[2]) or 1) != 1 and experts_tp not in (None, tp):
        raise CheckpointError(
            f"{file.parent.parent} was written with expert_tensor_parallel_size {experts_tp} and {_SIZES[0]} {tp}, "
            "which its files cannot be joined of; save it with upstream's --ckpt-format torch_dist"
        )


def _place_files(paths: Mapping[str, Path], layout: SavedLayout, directory: Path) -> dict[Rank, Path]:
    """Each rank's file. Raises CheckpointError where they do not match the layout."""
    found: dict[Rank, Path] = {}
    for name, path in paths.items():
        match = _RANK.fullmatch(name)
        numbers = [int(number) for number in match.groups() if number is not None] if match else []
        # Sizes of 1 leave their number out, so that a second number may be of either kind.
        tp, rest = (numbers[0], numbers[1:]) if numbers else (-1, [])
        stage = rest.pop(0) if layout.pp > 1 and rest else 0
        ep = rest.pop(0) if layout.ep > 1 and rest else 0
        found[(tp, stage, ep) if not rest else (-1, -1, -1)] = path
    expected = {(tp, pp, ep) for tp in range(layout.tp) for pp in range(layout.pp) for ep in range(layout.ep)}
    if set(found) != expected or len(found) != len(paths):
        raise CheckpointError(
            f"{directory} holds the files of {len(paths)} ranks ({', '.join(sorted(paths)[:4])}); its "
            f"settings say tensor-parallel size {layout.tp}, pipeline-parallel size {layout.pp} and expert-parallel "
            f"size {layout.ep}: files are missing or mixed up"
        )
    return found


# ---- tensors


def _join_files(
    files: Mapping[Rank, RankFile], layout: SavedLayout, args: Mapping[str, Any], directory: Path
) -> dict[str, LazyTensor]:
    joined: dict[str, LazyTensor] = {}
    stacks: dict[str, dict[int, LazyTensor]] = defaultdict(dict)
    layers = 0
    for stage, chunk in layout.order_of_chunks:
        contents = {(tp, ep): files[tp, stage, ep] for tp in range(layout.tp) for ep in range(layout.ep)}
        first = contents[0, 0].chunks[chunk]
        experts_per_rank = Counter(expert.stack for expert in map(parse_expert_name, first) if expert is not None)
        for prefix, name in _list_entries(contents[0, 0], chunk):
            # Where it is tied to the embedding, the last stage has a copy.
            if name.endswith("output_layer.weight") and not args.get("untie_embeddings_and_output_weights", True):
                continue
            expert = parse_expert_name(name)
            cut = find_cut(name if expert is None else expert.stack, args)
            for ep in range(layout.ep if expert is not None else 1):
                shards = [_take(contents[tp, ep], chunk, prefix, name, directory) for tp in range(layout.tp)]
                tensor = _join(shards, cut)
                if expert is None:
                    # With multi-token prediction the last stage has a copy of the embedding, too.
                    joined.setdefault(prefix + our_names(_renumber(name, layers), ())[0][0], tensor)
                else:
                    number = ep * experts_per_rank[expert.stack] + expert.number
                    stacks[prefix + _renumber(expert.stack, layers)][number] = tensor
        layers += _count_layers(first)
    return joined | {name: _stack(name, experts, directory) for name, experts in stacks.items()}


def _list_entries(content: RankFile, chunk: int) -> list[tuple[str, str]]:
    """(prefix of the key, upstream's name) of the weights of a model chunk and of the state that belongs to them."""
    state = [(f"{OPTIMIZER_PREFIX}{kind}.", name) for kind, names in content.state[chunk].items() for name in names]
    return [("", name) for name in content.chunks[chunk]] + state


def _take(content: RankFile, chunk: int, prefix: str, name: str, directory: Path) -> Tensor:
    kind = prefix.removeprefix(OPTIMIZER_PREFIX).removesuffix(".")
    tensors = content.state[chunk].get(kind, {}) if prefix else content.chunks[chunk]
    if name not in tensors:
        raise CheckpointError(f"{directory}: {prefix}{name} is missing in the file of one rank, and others have it")
    return tensors[name]


def _join(shards: list[Tensor], cut: Cut) -> LazyTensor:
    """The tensor whose shards these are."""
    first = shards[0]
    if len(shards) == 1 or cut.dim is None or cut.dim >= first.dim():
        return LazyTensor.of(first)
    return LazyTensor(
        cut.full_shape(first.shape, len(shards)), first.dtype, functools.partial(_concatenate, shards, cut)
    )


def _concatenate(shards: list[Tensor], cut: Cut) -> Tensor:
    assert cut.dim is not None
    pieces = [shard.split(cut.sizes(shard.shape[cut.dim]), cut.dim) for shard in shards]
    return torch.cat([piece for part in zip(*pieces, strict=True) for piece in part], cut.dim)


def _stack(name: str, experts: Mapping[int, LazyTensor], directory: Path) -> LazyTensor:
    # Experts are numbered from 0 without gaps; a gap means that the files are not all.
    missing = sorted(set(range(max(experts) + 1)) - set(experts))
    if missing or len({tensor.shape for tensor in experts.values()}) > 1:
        what = f"expert {missing[0]} is missing" if missing else "the experts differ in shape"
        raise CheckpointError(f"{directory} cannot be used: {name}: {what}")
    ordered = [experts[number] for number in range(len(experts))]
    return LazyTensor(
        (len(ordered), *ordered[0].shape), ordered[0].dtype, lambda: torch.stack([expert.read() for expert in ordered])
    )


def _renumber(name: str, layers_before: int) -> str:
    found = _LAYER.fullmatch(name)
    if found is None:
        return name
    return f"{found['start']}.{int(found['number']) + layers_before}.{found['rest']}"


def _count_layers(names: Mapping[str, Tensor]) -> int:
    """Return how many layers a model chunk has."""
    numbers = {int(found["number"]) for found in map(_LAYER.fullmatch, names) if found is not None}
    return max(numbers, default=-1) + 1


# ---- flat buffers


def _read_flat_files(places: Mapping[Rank, Path], layout: SavedLayout) -> dict[int, Buffers]:
    """distrib_optim.pt of every rank: for each optimizer the buffers of each model-parallel rank."""
    found: dict[int, dict[int, Any]] = defaultdict(dict)
    for (tp, stage, ep), path in sorted(places.items()):
        file = path.with_name(FLAT_FILE_NAME)
        if not file.is_file():
            raise CheckpointError(
                f"{file} is missing: the state of upstream's distributed optimizer lies there; pass --no-load-optim "
                "or --finetune"
            )
        content = read_restricted(file, str(file), mmap=True)
        # Several optimizers are a list; what another rank has saved is None there.
        for number, state in enumerate(content if isinstance(content, list) else [content]):
            of_experts = number > 0 and layout.ep > 1
            rank = (stage * layout.ep + ep) * layout.tp + tp if of_experts else stage * layout.tp + tp
            if state is not None and rank not in found[number]:
                found[number][rank] = parse_joined_buffers(state, str(file))
    if not found:
        raise CheckpointError(f"{next(iter(places.values())).with_name(FLAT_FILE_NAME)} holds no optimizer state")
    return {number: dict(buffers) for number, buffers in found.items()}
