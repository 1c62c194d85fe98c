# SPDX-License-Identifier: Apache-2.0
"""Which saved boxes cover what this process holds: the same layout or another one."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, describe_chunk
from megatron.core.dist_checkpointing.upstream_dist import translate_table
from megatron.core.dist_checkpointing.validation import KeyReport, judge_wanted, list_wanted


class ShardLoadPlanner(LoadPlanner):
    """torch's load planner over ShardedTensors. Values are copied into them, converted to their number format.

    valid_rows: see validation.list_wanted. may_lack, may_have_more: see validation.judge_wanted. `report` says after
    loading, on every process, what was tolerated.
    """

    report = KeyReport((), ())

    def __init__(self, valid_rows: Mapping[str, int], *, may_lack: bool = False, may_have_more: bool = False) -> None:
        self.valid_rows = valid_rows
        self.may_lack = may_lack
        self.may_have_more = may_have_more

    def set_up_planner(
        self, state_dict: ShardedStateDict, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """On every process: its tensors, and the checkpoint's table of contents."""
        assert metadata is not None
        self.tensors = state_dict
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """On every process: what to read of what it asks for."""
        wanted, sources = list_wanted(self.tensors.values(), self.metadata, self.valid_rows)
        items: list[ReadItem] = []
        for tensor in self.tensors.values():
            if tensor.key in sources:
                items.extend(self._reads(tensor, sources[tensor.key]))
        return LoadPlan(items, planner_data=wanted)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """On the first process: do checkpoint and model fit? Raises ModelMismatchError for all where they do not."""
        report = judge_wanted(
            (plan.planner_data for plan in global_plan),
            self.metadata,
            may_lack=self.may_lack,
            may_have_more=self.may_have_more,
        )
        return [dataclasses.replace(plan, planner_data=report) for plan in global_plan]

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """On every process: the plan as the first process leaves it."""
        self.report = central_plan.planner_data
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Never asked for: everything but tensors lies in JSON files."""
        raise AssertionError(f"{read_item.dest_index.fqn} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The view that a read fills."""
        index = read_item.dest_index
        assert index.index is not None
        view = self.tensors[index.fqn].block(index.index)
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, offset, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing left to do: the view was filled."""

    def _reads(self, tensor: ShardedTensor, key: str) -> list[ReadItem]:
        saved = self.metadata.state_dict_metadata[key]
        assert isinstance(saved, TensorStorageMetadata)
        reads = create_read_items_for_chunk_list(key, saved, [describe_chunk(block.box) for block in tensor.blocks])
        # torch names the destination after the saved tensor; ours may have another name.
        return [
            ReadItem(
                type=read.type,
                dest_index=MetadataIndex(tensor.key, read.dest_index.offset, read.dest_index.index),
                dest_offsets=read.dest_offsets,
                storage_index=read.storage_index,
                storage_offsets=read.storage_offsets,
                lengths=read.lengths,
            )
            for read in reads
        ]


class UpstreamLoadPlanner(ShardLoadPlanner):
    """The same over a checkpoint of upstream's, where a tensor of ours may be one layer of a stack."""

    def __init__(self, *, may_lack: bool = False, may_have_more: bool = False) -> None:
        # Upstream says nowhere which rows are padding.
        super().__init__({}, may_lack=may_lack, may_have_more=may_have_more)

    def set_up_planner(
        self, state_dict: ShardedStateDict, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """On every process: its tensors, and upstream's table of contents."""
        assert metadata is not None
        self.table = translate_table(metadata)
        super().set_up_planner(state_dict, self.table.metadata, is_coordinator)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The view that a read fills, with a leading dimension of one where it is read from a stack."""
        stacked = len(read_item.lengths) - len(read_item.dest_offsets)
        view = super().resolve_tensor(dataclasses.replace(read_item, lengths=read_item.lengths[stacked:]))
        return view.unsqueeze(0) if stacked else view

    def _reads(self, tensor: ShardedTensor, key: str) -> list[ReadItem]:
        saved, layer, starts = self.table.slices[key]
        reads = super()._reads(tensor, key)
        if layer is None:
            return [
                dataclasses.replace(read, storage_index=MetadataIndex(saved, read.storage_index.offset))
                for read in reads
            ]
        return [_in_stack(read, saved, layer, starts) for read in reads]


def _in_stack(read: ReadItem, saved: str, layer: int, starts: Mapping[tuple[int, ...], int]) -> ReadItem:
    """The same read from a stack of layers, with its leading dimension."""
    offset = tuple(read.storage_index.offset or ())
    return dataclasses.replace(
        read,
        storage_index=MetadataIndex(saved, torch.Size((starts[offset], *offset))),
        storage_offsets=torch.Size((layer - starts[offset], *read.storage_offsets)),
        lengths=torch.Size((1, *read.lengths)),
    )
