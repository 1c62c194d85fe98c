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
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron.core.dist_checkpointing.agreement import on_every_rank, with_everyone
from megatron.core.dist_checkpointing.mapping import OPTIMIZER_PREFIX
from megatron.core.dist_checkpointing.safe_pickle import refuse_expanded
from megatron.core.dist_checkpointing.saved_boxes import BoxReader, LazyTensor
from megatron.core.errors import CheckpointError
from megatron.core.process_groups_config import Group
from megatron.core.upstream_checkpoints.flat_layout import (
    BucketSlot,
    ModelOutline,
    Parameter,
    SavedLayout,
    expert_of,
    find_bucket_size,
    iterate_ranks,
    place_in_buckets,
    place_in_joined_buckets,
    sort_as_registered,
)
from megatron.core.upstream_checkpoints.names import FLAT_KEY, find_flat_shards, our_names, translate_table
from megatron.core.upstream_checkpoints.sections import group_sections

_BUCKET = re.compile(r"gbuf_idx_(?P<buffer>\d+)\.dtype_.+\.bucket_idx_(?P<bucket>\d+)\.(?P<kind>\w+)")
_MAIN = "fp32_param"
_REMEDY = "save it there with --dist-ckpt-optim-fully-reshardable, or go on with a fresh optimizer: --no-load-optim"

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
            raise CheckpointError(f"{where}: buffer {number} has {len(states)} number formats; expected one; {_REMEDY}")
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
        raise CheckpointError(f"{reader.directory}: {key} holds several layers in one shard; {_REMEDY}")

    def read() -> Tensor:
        values = torch.empty(full[lead:], dtype=entry.properties.dtype)
        for place in itertools.product(*(range(cut) for cut in cuts[lead:])):
            at = (*(() if layer is None else (layer,)), *place)
            flat = reader.read_region(key, (*((index, 1) for index in at), (0, entry.size[-1])))
            bounds = zip(place, shard[lead:], strict=True)
            values[tuple(slice(i * size, (i + 1) * size) for i, size in bounds)] = flat.view(shard[lead:])
        return values

    return LazyTensor(full[lead:], entry.properties.dtype, read)


# ---- from buffers to parameters


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
        raise CheckpointError(f"{self._where}: {contradictions[0]}; {_REMEDY}")

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
