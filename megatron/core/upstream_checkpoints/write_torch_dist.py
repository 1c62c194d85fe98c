# SPDX-License-Identifier: Apache-2.0
"""Upstream's `torch_dist` checkpoints, written: our tensors under its keys, and the objects that it has in addition.

    here      decoder.layers.3.mlp.linear_fc1.weight [rows, columns]
    upstream  decoder.layers.mlp.linear_fc1.weight [layers, rows, columns]: box 3, in its gate and its up projection

| upstream                                  | what                                                                    |
|-------------------------------------------|-------------------------------------------------------------------------|
| one tensor of all layers                  | where all layers are alike; otherwise one for each, with its number     |
| boxes                                     | a layer's, an expert's, a gate's and an up projection's each by itself  |
| <linear layer>._extra_state/shard_3_4     | pickled None: what Transformer Engine keeps there is not kept here      |
| common_state/shard_0_1, rng_state/...     | pickled objects that the caller gives                                   |

Objects come after the tensors in the file of the process that writes them. names.py is the reader.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import json
import os
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from megatron.core.dist_checkpointing.agreement import on_every_rank, on_first_rank
from megatron.core.dist_checkpointing.directory import COMMON_NAME
from megatron.core.dist_checkpointing.durable import write_file
from megatron.core.dist_checkpointing.manifest import FileRecord, record_file
from megatron.core.dist_checkpointing.mapping import OPTIMIZER_PREFIX, ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.save_plan import find_block
from megatron.core.dist_checkpointing.serialization import FORMAT_DOCUMENT, copy_attachments, write_documents
from megatron.core.dist_checkpointing.torch_dist import Written, plan_write, write_contents, write_share
from megatron.core.placement import Box, Piece
from megatron.core.plan.model_plan import ModelPlan
from megatron.core.process_groups_config import Group
from megatron.core.upstream_checkpoints.names import list_kept, name_upstream
from megatron.core.upstream_checkpoints.pickles import write_pickle

_LAYER = re.compile(r"(?P<start>decoder|mtp)\.layers\.(?P<number>\d+)\.(?:mtp_model_layer\.)?(?P<rest>.+)")
_LINEAR = re.compile(r"(.*\.(?:linear_\w+|(?:eh|e|h)_proj|in_proj|out_proj))\.weight")
_EXPERTS = re.compile(r".*\.mlp\.experts\.linear_fc[12]\.(weight|bias)")


@dataclass(frozen=True)
class UpstreamNaming:
    """Rules that give the keys of a model."""

    plan: ModelPlan
    is_stacked: bool
    """The decoder's layers are one tensor."""
    fused: bool
    """Norms belong to the linear layers after them, as with Transformer Engine."""
    is_gated: bool
    """The first layer of an MLP is a gate and an up projection."""

    def find_key(self, name: str) -> tuple[str, int | None]:
        """Upstream's key of a parameter, and the index in the stack where it is one of it."""
        layer = self.plan.find(name)
        key = name_upstream(name, kept=list_kept(layer, fused=self.fused, renames_norms=True), layer=layer)
        if layer is None or not self.is_stacked or layer not in self.plan.decoder:
            return key, None
        return key.replace(f"{layer.name}.", "decoder.layers.", 1), layer.number - 1

    def list_extra_states(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Keys of the objects that linear layers have, for the parameters with these names and full shapes."""
        keys: list[str] = []
        for name, shape in shapes.items():
            linear, layer = _LINEAR.fullmatch(name), _LAYER.fullmatch(name)
            if linear is None or layer is None:
                continue
            key, number = self.find_key(name)
            module = key.removesuffix(".weight")
            place = [] if number is None else [(number, len(self.plan.decoder))]
            experts: Iterable[list[tuple[int, int]]] = [[]]
            if _EXPERTS.fullmatch(name):
                experts = ([(expert, shape[0])] for expert in range(shape[0]))
            modules = [module]
            # Its attention has one as well.
            if self.fused and ".linear_proj." in name:
                modules.append(module.replace(".linear_proj", ".core_attention"))
            keys += [name_object(f"{module}._extra_state", place + expert) for expert in experts for module in modules]
        return keys


def name_object(key: str, places: Iterable[tuple[int, int]]) -> str:
    """The key of an object, `key/shard_0.2_4.4`.

    places: (index, size) along each dimension of what it is one element of; none where there is only one.
    """
    indices, sizes = zip(*(list(places) or [(0, 1)]), strict=True)
    return f"{key}/shard_{'.'.join(map(str, indices))}_{'.'.join(map(str, sizes))}"


# ---- tensors


@dataclass(frozen=True)
class _BoxOfStack:
    """A box of one of our tensors."""

    source: ShardedTensor
    block: int
    box: Box
    """Inside the block."""


@dataclass(frozen=True)
class StackedTensor(ShardedTensor):
    """One of upstream's tensors, put together of boxes of ours."""

    parts: tuple[_BoxOfStack, ...] = ()
    is_stacked: bool = False

    def block(self, index: int) -> Tensor:
        """The values of a box: a view of one of our tensors."""
        part = self.parts[index]
        view = part.source.block(part.block)[tuple(slice(start, start + length) for start, length in part.box)]
        return view.unsqueeze(0) if self.is_stacked else view

    def index_at(self, offsets: Iterable[int]) -> int:
        """Number of the block that starts at these offsets of the full tensor."""
        return self._numbers[tuple(offsets)]

    @functools.cached_property
    def _numbers(self) -> dict[tuple[int, ...], int]:
        return {tuple(start for start, _ in block.box): number for number, block in enumerate(self.blocks)}


def stack_tensors(tensors: ShardedStateDict, naming: UpstreamNaming) -> ShardedStateDict:
    """Our tensors under upstream's keys; several layers' tensors are one."""
    stacks: dict[str, list[tuple[ShardedTensor, int | None]]] = {}
    for tensor in tensors.values():
        prefix, name = _split_key(tensor.key)
        key, number = naming.find_key(name)
        stacks.setdefault(prefix + key, []).append((tensor, number))
    return {key: _stack(key, members, naming) for key, members in stacks.items()}


def _stack(key: str, members: list[tuple[ShardedTensor, int | None]], naming: UpstreamNaming) -> StackedTensor:
    first, number = members[0]
    blocks: list[Piece] = []
    parts: list[_BoxOfStack] = []
    for tensor, layer in members:
        before = () if layer is None else ((layer, 1),)
        cuts = _list_cuts(_split_key(tensor.key)[1], tensor.global_shape, naming)
        for index, block in enumerate(tensor.blocks):
            for box, inner in _cut(block.box, cuts):
                local = tuple((0, length) for _, length in (*before, *box))
                blocks.append(Piece((*before, *box), local, block.owned))
                parts.append(_BoxOfStack(tensor, index, inner))
    shape = first.global_shape if number is None else (len(naming.plan.decoder), *first.global_shape)
    return StackedTensor(
        key=key, data=first.data, global_shape=shape, blocks=tuple(blocks), is_copy=first.is_copy,
        parts=tuple(parts), is_stacked=number is not None,
    )  # fmt: skip


def _split_key(key: str) -> tuple[str, str]:
    """(`optimizer.state.exp_avg.`, the parameter's name); nothing before the name of a parameter itself."""
    if not key.startswith(OPTIMIZER_PREFIX):
        return "", key
    kind, _, name = key.removeprefix(OPTIMIZER_PREFIX).partition(".")
    return f"{OPTIMIZER_PREFIX}{kind}.", name


def _list_cuts(name: str, shape: tuple[int, ...], naming: UpstreamNaming) -> list[int | None]:
    """For each dimension the length of upstream's boxes, which begin at its multiples; None where it has no such."""
    lengths: list[int | None] = [None] * len(shape)
    rows = 0
    if _EXPERTS.fullmatch(name):
        lengths[0], rows = 1, 1
    if naming.is_gated and ".linear_fc1." in name:
        lengths[rows] = shape[rows] // 2
    return lengths


def _cut(box: Box, lengths: list[int | None]) -> Iterator[tuple[Box, Box]]:
    """Yield the parts of a box, each in the full tensor and inside the box."""
    runs: list[list[tuple[tuple[int, int], tuple[int, int]]]] = []
    for (start, size), length in zip(box, lengths, strict=True):
        stop, edges = start + size, [start]
        if length is not None:
            edges += range((start // length + 1) * length, stop, length)
        ends = [*edges[1:], stop]
        runs.append([((a, b - a), (a - start, b - a)) for a, b in zip(edges, ends, strict=True)])
    for combination in itertools.product(*runs):
        yield tuple(full for full, _ in combination), tuple(inner for _, inner in combination)


# ---- files


def write_upstream_dist(
    directory: Path, tensors: ShardedStateDict, objects: Mapping[str, Any], group: Group
) -> dict[str, FileRecord]:
    """Write the tensors of all members of `group`, as `stack_tensors` returned them, and their objects, by key.

    What several members have under one key is written once. Returns the records of all files, on every member. Raises,
    on every member, StorageError where one of them could not write.
    """
    plan = plan_write(directory, tensors, group)
    own = _choose_own(objects, group)

    def write() -> Written:
        written = write_share(directory, plan.share, functools.partial(find_block, tensors))
        (name,) = written.records
        results, record = _append_objects(directory / name, {key: objects[key] for key in own}, written.records[name])
        return Written([*written.results, *results], {name: record})

    everyone = on_every_rank(group, write)
    keys = [result.index.fqn for written in everyone for result in written.results if result.index.offset is None]

    def finish() -> dict[str, FileRecord]:
        assert plan.contents is not None, "only the first process of a group has the table of contents"
        table = plan.contents.state_dict_metadata | {key: BytesStorageMetadata() for key in keys}
        contents = dataclasses.replace(plan.contents, state_dict_metadata=table)
        return write_contents(
            directory, dataclasses.replace(plan, contents=contents), [written.results for written in everyone]
        )

    records = on_first_rank(group, finish)
    for written in everyone:
        records |= written.records
    return records


def _choose_own(objects: Collection[str], group: Group) -> list[str]:
    """The keys that this member writes: those that no member before it has."""
    everyone = on_every_rank(group, lambda: list(objects))
    before = {key for keys in everyone[: group.rank()] for key in keys}
    return [key for key in objects if key not in before]


def _append_objects(path: Path, objects: Mapping[str, Any], record: FileRecord) -> tuple[list[WriteResult], FileRecord]:
    """Write objects after the tensors of a file, flushed; where they lie, and the file's new record.

    Raises OSError, with the file's name.
    """
    results, crc32, end = [], record.crc32, record.bytes
    try:
        with open(path, "ab") as file:
            for key, value in objects.items():
                content = io.BytesIO()
                # An object is a list of one, as upstream's planner has it.
                write_pickle([value], content)
                data = content.getvalue()
                file.write(data)
                crc32 = zlib.crc32(data, crc32)
                results.append(WriteResult(MetadataIndex(key), len(data), _StorageInfo(path.name, end, len(data))))
                end += len(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or os.fspath(path)
        raise
    return results, FileRecord(end, crc32)


def write_upstream_documents(
    directory: Path, attachments: Mapping[str, Path], common: Mapping[str, Any] | None
) -> dict[str, FileRecord]:
    """Write what upstream has next to the tensors, and copy files by their names there; return their records. Raises
    OSError.

    common: settings and progress, for the file in which earlier releases of upstream have them; None for no such file.
    """
    records = {}
    if common is not None:
        content = io.BytesIO()
        write_pickle(dict(common), content)
        write_file(directory / COMMON_NAME, content.getvalue(), "document")
        records[COMMON_NAME] = record_file(directory / COMMON_NAME)
    texts = {name: json.dumps(content) for name, content in FORMAT_DOCUMENT.items()}
    return records | write_documents(directory, texts) | copy_attachments(directory, attachments)
