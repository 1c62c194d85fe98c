# SPDX-License-Identifier: Apache-2.0
"""A tensor of this process as a part of a tensor of the full model: what a checkpoint needs to know, from its
Placement.

    shard [local shape] --blocks--> boxes in the full tensor, stored under `key`

Every process describes what it holds; the save plan lets one process write each box, the load plan finds the saved
boxes that cover what a process holds now. So a checkpoint of one layout can be loaded by another.

Names follow upstream's torch_dist format (`optimizer.state.exp_avg.<parameter>`), with one difference: each layer has a
separate entry instead of a slice of a tensor stacked over layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from megatron.core.flat_ranges import find_boxes
from megatron.core.placement import Box, Piece, Placement

# Put here by a table of upstream's names; declared for type checkers.
ShardedObject: Any
ShardedTensorFactory: Any

OPTIMIZER_PREFIX = "optimizer.state."
RNG_PREFIX = "rng_state."
_STATE_NAMES = {"main_param": "fp32_param"}


@dataclass(frozen=True)
class ShardedTensor:
    """A tensor of this process and where its blocks lie in the full tensor."""

    key: str
    data: Tensor
    """The shard. Loading writes into it."""
    global_shape: tuple[int, ...]
    blocks: tuple[Piece, ...]
    valid_rows: int | None = None
    """Rows of dimension 0 that mean something; the rest is padding, which may differ between save and load."""
    fallback_key: str | None = None
    """Key to load instead where the checkpoint has no `key`."""
    is_copy: bool = False
    """Loaded, but not saved: another process owns it."""
    is_optional: bool = False
    """A checkpoint that lacks it, or has it in another shape, leaves it as it is."""

    @classmethod
    def from_placement(
        cls, data: Tensor, placement: Placement, *, prefix: str = "", fallback: bool = False
    ) -> ShardedTensor:
        """The shard of the parameter with this placement, or of optimizer state that is shaped like it.

        prefix: put before the parameter's name to make the key. fallback: the parameter itself will do as well.
        """
        if tuple(data.shape) != placement.local_shape:
            raise ValueError(f"{placement.name}: shape {tuple(data.shape)}; its placement says {placement.local_shape}")
        return cls(data=data.detach(), blocks=tuple(placement.pieces()), **_describe_whole(placement, prefix, fallback))

    @classmethod
    def whole(cls, key: str, data: Tensor) -> ShardedTensor:
        """A tensor that is not cut."""
        return cls.from_placement(data, Placement(key, tuple(data.shape)))

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: Any = 0,
        prepend_axis_num: int = 0,
        allow_shape_mismatch: bool = False,
    ) -> ShardedTensor:
        """A part of a tensor of a user's program that is cut evenly: (axis, number of this part, of how many) for each
        axis that is cut. prepend_axis_num: axes before `data`'s, one element of them here, which count among the axes.
        replica_id, allow_shape_mismatch: of upstream's signature; who writes is decided when saving, and shapes must be
        equal."""
        shape = [1] * prepend_axis_num + list(data.shape)
        box = [(0, size) for size in shape]
        for axis, number, count in rank_offsets:
            box[axis] = (number * shape[axis], shape[axis])
            shape[axis] *= count
        wide = data.detach().view([1] * prepend_axis_num + list(data.shape))
        local = tuple((0, length) for _, length in box)
        return cls(key=key, data=wide, global_shape=tuple(shape), blocks=(Piece(tuple(box), local, True),))

    @classmethod
    def from_stack(cls, key: str, data: Tensor, start: int, count: int) -> ShardedTensor:
        """Elements [start, start + len(data)) of a stack of `count`, each one block: several processes may have it."""
        rest = tuple((0, size) for size in data.shape[1:])
        blocks = (Piece(((start + i, 1), *rest), ((i, 1), *rest), True) for i in range(len(data)))
        return cls(key=key, data=data.detach(), global_shape=(count, *data.shape[1:]), blocks=tuple(blocks))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return self.data.dtype

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what this process has of it."""
        return tuple(self.data.shape)

    def block(self, index: int) -> Tensor:
        """The part of the shard that block number `index` describes: a view."""
        return self.data[tuple(slice(start, start + length) for start, length in self.blocks[index].local_box)]

    def index_at(self, offsets: Iterable[int]) -> int:
        """Number of the block that starts at these offsets of the full tensor."""
        # Blocks of one tensor never overlap, so their first corner tells them apart.
        start = tuple(offsets)
        return next(i for i, block in enumerate(self.blocks) if tuple(s for s, _ in block.box) == start)


def _describe_whole(placement: Placement, prefix: str, fallback: bool) -> dict[str, Any]:
    """Fields that all parts of a tensor have in common."""
    return {
        "key": prefix + placement.name, "global_shape": placement.full_shape, "valid_rows": placement.valid_rows,
        "fallback_key": placement.name if fallback else None, "is_copy": placement.is_copy,
        # A checkpoint of a model without adapters is where they begin.
        "is_optional": placement.kind == "adapter",
    }  # fmt: skip


@dataclass(frozen=True)
class SlicedTensor(ShardedTensor):
    """A flat slice of a shard: what one of the processes that divide the optimizer's state keeps of a parameter.

    A slice does not end where a row does, so it is several blocks: the end of a row, whole rows, the beginning of
    another, each where it meets the blocks of the shard. `data` is one-dimensional.
    """

    views: tuple[Tensor, ...] = ()
    """The part of `data` that each block is."""

    @classmethod
    def from_slice(
        cls, data: Tensor, start: int, placement: Placement, *, prefix: str = "", fallback: bool = False
    ) -> SlicedTensor:
        """Elements [start, start + len(data)) of the flat shard of the parameter with this placement."""
        shard = placement.local_shape
        if start < 0 or data.dim() != 1 or start + data.numel() > math.prod(shard):
            raise ValueError(
                f"{placement.name}: {tuple(data.shape)} from element {start} is no slice of a shard {shard}"
            )
        data = data.detach()
        blocks: list[Piece] = []
        views: list[Tensor] = []
        # The slice is walked in the order of its elements: the end of a row, whole rows, the beginning of a row.
        place = 0
        for box in find_boxes(shard, start, start + data.numel()):
            lengths = [length for _, length in box]
            region = data[place : place + math.prod(lengths)].view(lengths)
            place += region.numel()
            # A box of the slice may reach over several blocks, for example from the gate's rows into the up
            # projection's.
            for piece in placement.pieces():
                meeting = _meet(box, piece)
                if meeting is not None:
                    blocks.append(meeting)
                    views.append(region[tuple(slice(first, first + length) for first, length in meeting.local_box)])
        whole = _describe_whole(placement, prefix, fallback)
        return cls(data=data, blocks=tuple(blocks), views=tuple(views), **whole)

    def block(self, index: int) -> Tensor:
        """The part of the slice that block number `index` describes: a view."""
        return self.views[index]


def _meet(box: Box, piece: Piece) -> Piece | None:
    """Return what a box of the shard and a block of it have in common; the local box counts from the given box's
    start."""
    full: list[tuple[int, int]] = []
    local: list[tuple[int, int]] = []
    for (start, length), (full_start, _), (local_start, local_length) in zip(
        box, piece.box, piece.local_box, strict=True
    ):
        first, last = max(start, local_start), min(start + length, local_start + local_length)
        if first >= last:
            return None
        full.append((full_start + first - local_start, last - first))
        local.append((first - start, last - first))
    return Piece(tuple(full), tuple(local), piece.owned)


def leave_out_padding(box: Box, target: Tensor, shape: Sequence[int]) -> tuple[Box, Tensor]:
    """The part of a box, and of the memory to fill, that lies in a tensor of this shape, which may have fewer rows."""
    if not box:
        return box, target
    start, length = box[0]
    length = max(0, min(length, shape[0] - start))
    return ((start, length), *box[1:]), target[:length]


ShardedStateDict = dict[str, ShardedTensor]


def describe_chunk(box: Box) -> ChunkStorageMetadata:
    """torch's record of a box: offsets and sizes."""
    return ChunkStorageMetadata(
        offsets=torch.Size([start for start, _ in box]), sizes=torch.Size([length for _, length in box])
    )


def model_state(
    parameters: Iterable[tuple[Tensor, Placement]], starts: Mapping[str, int] | None = None
) -> ShardedStateDict:
    """The model's parameters by key.

    Those in `starts` are flat slices of the shard, from this element on.
    A copy (a tied embedding on the last stage) shares its key with the original, which wins where one process holds
    both.
    """
    state: ShardedStateDict = {}
    for data, placement in parameters:
        # Where the pipeline has one stage, a tied embedding and its copy are one tensor, under one key.
        if placement.name not in state or not placement.is_copy:
            state[placement.name] = _entry(data, placement, starts or {})
    return state


def _entry(
    data: Tensor, placement: Placement, starts: Mapping[str, int], *, prefix: str = "", fallback: bool = False
) -> ShardedTensor:
    """A whole shard, or a flat slice where there is a start for the parameter."""
    if placement.name in starts:
        return SlicedTensor.from_slice(data, starts[placement.name], placement, prefix=prefix, fallback=fallback)
    return ShardedTensor.from_placement(data, placement, prefix=prefix, fallback=fallback)


OUTER_PREFIX = "outer_"
"""Begin of the names of what a run on several sites keeps in addition to the optimizer's state; other runs have none of
it."""


def optimizer_state(
    named_state: Mapping[str, Mapping[str, Tensor]],
    placements: Mapping[str, Placement],
    starts: Mapping[str, int] | None = None,
) -> ShardedStateDict:
    """The optimizer's tensors by key.

    named_state: parameter name -> {"exp_avg": ..., "exp_avg_sq": ..., "main_param": ... when distinct from the
    parameter}, each shaped like the shard, or, for the parameters in `starts`, a flat slice of it from this element on.
    Main parameters may be loaded from the parameters themselves.
    """
    starts = starts or {}
    state: ShardedStateDict = {}
    for parameter, tensors in named_state.items():
        placement = placements[parameter]
        for name, data in tensors.items():
            prefix = f"{OPTIMIZER_PREFIX}{_STATE_NAMES.get(name, name)}."
            entry = _entry(data, placement, starts, prefix=prefix, fallback=name == "main_param")
            state[entry.key] = dataclasses.replace(entry, is_optional=name.startswith(OUTER_PREFIX))
    return state


def whole_optimizer_state(
    named_state: Mapping[str, Mapping[str, Tensor]], stacks: Mapping[str, tuple[int, int]] | None = None
) -> ShardedStateDict:
    """State that is not shaped like its parameter, and the same on all processes that have it.

    stacks: of parameters that are stacks of matrices, of which a process has the state of some: number of the first of
    them, and of all.
    """
    stacks, state = stacks or {}, {}
    for name, kinds in named_state.items():
        for kind, data in kinds.items():
            key = f"{OPTIMIZER_PREFIX}{kind}.{name}"
            state[key] = (
                ShardedTensor.from_stack(key, data, *stacks[name]) if name in stacks else ShardedTensor.whole(key, data)
            )
    return state
