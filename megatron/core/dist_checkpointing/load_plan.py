"""Which saved boxes cover what this process holds: the same layout or another one."""

from __future__ import annotations

import io
from collections.abc import Mapping

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, describe_chunk
from megatron.core.dist_checkpointing.validation import check_all_used, check_fit, saved_key


class ShardLoadPlanner(LoadPlanner):
    """torch's load planner over ShardedTensors. Values are copied into them, converted to their number format.

    valid_rows: see validation.check_fit. strict: refuse a checkpoint with parameters that the model does not have.
    """

    def __init__(self, valid_rows: Mapping[str, int], *, strict: bool = True) -> None:
        self.valid_rows = valid_rows
        self.strict = strict

    def set_up_planner(
        self, state_dict: ShardedStateDict, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """On every process: its tensors, and the checkpoint's table of contents."""
        assert metadata is not None
        self.tensors = state_dict
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """On every process: what to read. Raises CheckpointError when the checkpoint does not fit."""
        check_fit(self.tensors.values(), self.metadata, self.valid_rows)
        items: list[ReadItem] = []
        for tensor in self.tensors.values():
            key = saved_key(tensor, self.metadata)
            assert key is not None
            items.extend(self._reads(tensor, key))
        return LoadPlan(items, planner_data=list(self.tensors))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """On the first process: has all of the checkpoint's model a place?"""
        if self.strict:
            check_all_used((key for plan in global_plan for key in plan.planner_data), self.metadata)
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """On every process: the plan as the first process leaves it."""
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
