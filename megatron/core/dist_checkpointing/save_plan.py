# SPDX-License-Identifier: Apache-2.0
"""Division of the writing among processes: each box of each tensor once, evenly over the processes that hold it."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megatron.core.dist_checkpointing.mapping import ShardedStateDict, describe_chunk
from megatron.core.dist_checkpointing.validation import check_coverage


def list_boxes(tensors: ShardedStateDict) -> SavePlan:
    """Return all boxes that this process could write."""
    items = []
    for tensor in tensors.values():
        if tensor.is_copy:
            continue
        properties = TensorProperties(dtype=tensor.data.dtype)
        for block in tensor.blocks:
            chunk = describe_chunk(block.box)
            # Ranks that hold a replica of a block (a key-value head shared by several) leave it to its owner; an empty
            # box, as a short slice has, is nothing to write.
            if block.owned and chunk.sizes.numel():
                data = TensorWriteData(chunk, properties, torch.Size(tensor.global_shape))
                index = MetadataIndex(tensor.key, chunk.offsets)
                items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items)


def choose_all_writers(plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """Choose one writer for each box of all processes; return it with the table of contents. Raises CheckpointError."""
    # A placement that is wrong is found here, before a byte is written, and not months later when the checkpoint is
    # loaded.
    plans, metadata = create_default_global_save_plan(choose_writers(plans))
    check_coverage(metadata)
    return plans, metadata


def sort_boxes(share: SavePlan) -> SavePlan:
    """Return the boxes that one process writes in the order of the file."""
    # torch's writer takes them in this order on a GPU, and as they come on a CPU: a file's bytes shall not tell.
    return dataclasses.replace(share, items=sorted(share.items, key=_full_bytes))


def find_block(tensors: ShardedStateDict, box: WriteItem) -> torch.Tensor:
    """Return the part of this process's tensor that a box is: a view."""
    tensor, offsets = tensors[box.index.fqn], box.index.offset
    assert offsets is not None, f"{tensor.key}: a box without offsets was planned"
    return tensor.block(tensor.index_at(offsets))


def _full_bytes(item: WriteItem) -> int:
    """Bytes of the whole tensor that a box is a part of."""
    assert item.tensor_data is not None
    return item.tensor_data.size.numel() * item.tensor_data.properties.dtype.itemsize


def choose_writers(plans: list[SavePlan]) -> list[SavePlan]:
    """Keep each box in one plan: of those that hold it, the one with the fewest bytes so far. Largest boxes first."""
    holders: dict[MetadataIndex, list[int]] = defaultdict(list)
    sizes: dict[MetadataIndex, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            assert item.tensor_data is not None and item.tensor_data.chunk is not None
            holders[item.index].append(rank)
            sizes[item.index] = math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
    load = [0] * len(plans)
    writer: dict[MetadataIndex, int] = {}
    # Largest first keeps the processes' shares close to equal; the rest of the key makes the choice the same on every
    # machine.
    for index in sorted(holders, key=lambda index: (-sizes[index], index.fqn, index.offset or ())):
        writer[index] = min(holders[index], key=lambda rank: (load[rank], rank))
        load[writer[index]] += sizes[index]
    return [
        dataclasses.replace(plan, items=[item for item in plan.items if writer[item.index] == rank])
        for rank, plan in enumerate(plans)
    ]
