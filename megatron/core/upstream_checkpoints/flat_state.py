# SPDX-License-Identifier: Apache-2.0
"""Optimizer state as upstream's distributed optimizer saves it in `torch_dist` checkpoints, put back into the shapes of
the parameters.

    dp_reshardable, fully_sharded_bucket_space   flat tensors, one for each bucket of each model-parallel rank
    dp_zero_gather_scatter                       one pickled object of flat tensors for each model-parallel rank
    fully_sharded_model_space                    each rank's shard of a parameter flat: [cuts of each dim, elements]
    fully_reshardable                            tensors shaped like the parameters: nothing to do here

Which parameter lies where in a bucket is written nowhere: it is worked out from the shapes of the weights, from
upstream's settings and from the buckets' sizes (flat_layout.py). The buckets hold the main parameters, too, so the
result proves itself: rounded to the weights' dtype, they must be the weights of the same checkpoint.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron.core.dist_checkpointing.agreement import on_every_rank, with_everyone
from megatron.core.dist_checkpointing.mapping import OPTIMIZER_PREFIX
from megatron.core.dist_checkpointing.saved_boxes import BoxReader, LazyTensor
from megatron.core.errors import CheckpointError
from megatron.core.process_groups_config import Group
from megatron.core.upstream_checkpoints.flat_files import (
    REMEDY,
    Buffers,
    SavedFlatBuffer,
    read_flat_buffers,
    read_flat_shard,
)
from megatron.core.upstream_checkpoints.flat_layout import (
    BucketSlot,
    Parameter,
    SavedLayout,
    find_bucket_size,
    place_in_buckets,
    place_in_joined_buckets,
    sort_as_registered,
)
from megatron.core.upstream_checkpoints.model_outline import ModelOutline, expert_of, iterate_ranks
from megatron.core.upstream_checkpoints.names import find_flat_shards, our_names, translate_table
from megatron.core.upstream_checkpoints.sections import group_sections

_MAIN = "fp32_param"


@dataclass(frozen=True)
class _FlatShard:
    """Place of a shard of a parameter."""

    buffer: SavedFlatBuffer
    slot: BucketSlot
    parameter: Parameter
    tp_rank: int
    expert: int | None

    def read(self, kind: str) -> Tensor:
        start = self.slot.start
        return self.buffer.kinds[kind](self.slot.bucket, start, start + self.parameter.numel).view(self.parameter.shape)


class FlatOptimizerState:
    """Optimizer state in flat buffers, under our keys and in the shapes of the parameters."""

    def __init__(
        self, buffers: Mapping[int, Buffers], shapes: Mapping[str, tuple[int, ...]], args: Mapping[str, Any], where: str
    ) -> None:
        """Find every parameter in the buffers.

        shapes: of the weights in the same checkpoint, by our names. args: upstream's settings. Raises CheckpointError,
        with `where` in it, where the buffers do not belong to these weights.
        """
        self._where = where
        self._args = args
        layout = SavedLayout.read(args, where)
        trained = {name: shape for name, shape in shapes.items() if not name.endswith(".expert_bias")}
        self._outline = ModelOutline(trained, layout, args)
        self._buffers = buffers
        self._shards: dict[str, list[_FlatShard]] = {}

    def locate(self, read_weight: Callable[[str], Tensor], group: Group) -> None:
        """Find out in which order the parameters lie: that in which main parameters and weights agree.

        read_weight: a weight by our name. Every member of `group` calls this, and compares its share of the weights.
        Raises CheckpointError on every member where no order explains the buffers.
        """
        te, grouped = self._args.get("transformer_impl") != "local", bool(self._args.get("moe_grouped_gemm"))
        orders = [(te, grouped), (not te, grouped), (te, not grouped), (not te, not grouped)]
        contradictions: list[str] = []
        for fused, is_grouped in orders:
            arrange = functools.partial(sort_as_registered, fused=fused, grouped=is_grouped)
            try:
                shards = self._find_shards(arrange)
            except CheckpointError as error:
                contradictions.append(str(error))
                continue
            if shards is None:
                contradictions.append("its optimizer state does not fill the flat buffers as upstream lays them out")
                continue
            self._shards = shards
            share = sorted(shards)[group.rank() :: group.size()]
            found = on_every_rank(group, functools.partial(self._find_difference, share, read_weight))
            different = next((name for name in found if name is not None), None)
            if different is None:
                return
            contradictions.append(f"{different} differs from the main parameter in its flat buffers")
        raise CheckpointError(f"{self._where}: {contradictions[0]}; {REMEDY}")

    def list_slots(
        self, *, fused: bool, grouped: bool
    ) -> dict[int, set[tuple[int, str, int | None, BucketSlot]]] | None:
        """For each optimizer (rank, parameter, its expert on this rank, place), only by the sizes of the buckets, in
        this order of registration; None where they have no place for the parameters.

        What the last stage has of the first one's table is not among them. Raises CheckpointError where a parameter
        cannot be cut as upstream does, or where its place is not known.
        """
        shards = self._find_shards(functools.partial(sort_as_registered, fused=fused, grouped=grouped))
        if shards is None:
            return None
        owners = {
            id(buffer): (number, rank)
            for number, buffers in self._buffers.items()
            for rank, chunks in buffers.items()
            for buffer in chunks
        }
        found: dict[int, set[tuple[int, str, int | None, BucketSlot]]] = defaultdict(set)
        for shard in itertools.chain.from_iterable(shards.values()):
            number, rank = owners[id(shard.buffer)]
            found[number].add((rank, shard.parameter.name, shard.parameter.expert, shard.slot))
        return found

    def tensors(self) -> dict[str, LazyTensor]:
        """The state by our keys."""
        found: dict[str, LazyTensor] = {}
        for name, shards in self._shards.items():
            for kind in shards[0].buffer.kinds:
                ours = _MAIN if kind == "param" else kind
                found[f"{OPTIMIZER_PREFIX}{ours}.{name}"] = LazyTensor(
                    self._outline.shapes[name], torch.float32, functools.partial(self._join, name, shards, kind)
                )
        return found

    def _find_shards(
        self, arrange: Callable[[Iterable[Parameter]], list[Parameter]]
    ) -> dict[str, list[_FlatShard]] | None:
        layout = self._outline.layout
        # With expert parallelism the experts have a separate optimizer, which comes second.
        split = layout.ep > 1 and len(self._buffers) > 1
        found: dict[str, list[_FlatShard]] = defaultdict(list)
        for number, buffers in self._buffers.items():
            experts = number > 0 if split else None
            ranks = {(stage, ep, tp): rank for stage in range(layout.pp)
                     for rank, ep, tp in iterate_ranks(layout, stage, experts=experts is True)}  # fmt: skip
            # A stage without experts has no optimizer for them.
            if not (set(buffers) <= set(ranks.values()) and (number or len(buffers) == len(ranks))):
                raise CheckpointError(
                    f"the flat buffers are of {len(buffers)} ranks, upstream's settings name {len(ranks)}"
                )
            place = functools.partial(self._place, buffers, ranks)
            divided = self._outline.divide(place, arrange, experts=experts)
            if divided is None:
                return None
            for (stage, ep, tp), rank in ranks.items():
                filled = filter(None, (divided[stage, chunk] for chunk in range(layout.vpp)))
                places = [(n, *each) for n, content in enumerate(filled) for each in content]
                for buffer, parameter, slot in places:
                    shape = self._outline.shapes.get(parameter.name)
                    # The last stage's copy of a tied table repeats what the first stage has.
                    if shape is not None:
                        expert = expert_of(parameter, ep, shape[0] // layout.ep)
                        shard = _FlatShard(buffers[rank][buffer], slot, parameter, tp, expert)
                        found[parameter.name].append(shard)
        return found

    def _place(
        self,
        buffers: Buffers,
        ranks: Mapping[tuple[int, int, int], int],
        stage: int,
        chunk: int,
        number: int,
        parameters: list[Parameter],
    ) -> list[BucketSlot] | None:
        mine = buffers.get(ranks[stage, 0, 0], [])
        used, is_last = number + bool(parameters), chunk == self._outline.layout.vpp - 1
        if used > len(mine) or (is_last and used < len(mine)):
            return None
        if not parameters:
            return []
        buffer = mine[number]
        if not buffer.is_joined:
            return place_in_buckets(parameters, buffer.sizes)
        total = buffer.sizes[0]
        return place_in_joined_buckets(
            parameters, total, find_bucket_size(self._args, stage, chunk, total)
        ) or place_in_joined_buckets(parameters, total, None)

    def _find_difference(self, names: Iterable[str], read_weight: Callable[[str], Tensor]) -> str | None:
        """The first parameter that is not the weight of this name, where the buffers hold parameters."""
        is_coarse = bool(self._args.get("fp8_param_gather"))
        for name in names:
            shards = self._shards[name]
            if "param" in shards[0].buffer.kinds:
                weight, main = read_weight(name), self._join(name, shards, "param")
                if main.shape != weight.shape or not _is_rounded(main, weight, is_coarse):
                    return name
        return None

    def _join(self, name: str, shards: list[_FlatShard], kind: str) -> Tensor:
        shape = self._outline.shapes[name]
        full = torch.empty(shape, dtype=torch.float32)
        cut, ranks = self._outline.cut_of(name), self._outline.ranks_of(name)
        for shard in shards:
            values = shard.read(kind)
            target = full if shard.expert is None else full[shard.expert]
            if cut.dim is None:
                target.copy_(values)
                continue
            for start, local, length in cut.runs(target.shape[cut.dim], ranks, shard.tp_rank):
                target.narrow(cut.dim, start, length).copy_(values.narrow(cut.dim, local, length))
        return full


def _is_rounded(main: Tensor, weight: Tensor, is_coarse: bool) -> bool:
    """Return whether a weight is its main parameter, rounded to its dtype."""
    if is_coarse:
        # Weights of 8 bits: 3 bits after the binary point, with separate scales.
        return bool(((main - weight).abs() <= 0.07 * weight.abs().max()).all())
    rounded = main.to(weight.dtype)
    return bool(((rounded == weight) | (rounded.isnan() & weight.isnan())).all())


# ---- all of a checkpoint


def read_reshaped_state(reader: BoxReader, args: Mapping[str, Any], group: Group) -> dict[str, LazyTensor]:
    """Optimizer state of a torch_dist checkpoint that is not saved in the shapes of the parameters, by our keys.

    args: upstream's settings. Every member of `group` calls this. Raises CheckpointError on every member where it
    cannot be put together.
    """
    flat = find_flat_shards(reader.metadata)
    found = {
        name: read_flat_shard(reader, key, parameter, layer)
        for key, parameter in flat.items()
        for name, layer in our_names(key, tuple(reader.find(parameter).size))
    }
    buffers = with_everyone(group, lambda: read_flat_buffers(reader))
    if buffers:
        table = translate_table(reader.metadata)
        weights = {
            name: tuple(entry.size)
            for name, entry in table.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not name.startswith(OPTIMIZER_PREFIX)
        }
        sections = group_sections(weights, args)
        for whole, parts in sections.items():
            shapes = [weights.pop(part, ()) for part in parts]
            if () in shapes:
                raise CheckpointError(f"{reader.directory}: {parts[shapes.index(())]} is missing")
            weights[whole] = (sum(rows for rows, *_ in shapes), *shapes[0][1:])

        def read_weight(name: str) -> Tensor:
            return torch.cat([table.read(reader, part) for part in sections.get(name, [name])])

        state = FlatOptimizerState(buffers, weights, args, str(reader.directory))
        state.locate(read_weight, group)
        found |= state.tensors()
    return found
