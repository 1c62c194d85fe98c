# SPDX-License-Identifier: Apache-2.0
"""Reads of the saved boxes that cover what this process holds: of the same layout or another one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron.core.dist_checkpointing.load_exchange import Read
from megatron.core.dist_checkpointing.mapping import ShardedTensor, describe_chunk
from megatron.core.dist_checkpointing.upstream_dist import SavedSlice


def list_reads(tensor: ShardedTensor, key: str, metadata: Metadata) -> Iterator[Read]:
    """Yield the parts of the boxes saved under `key` that fill this process's part of the tensor."""
    saved = metadata.state_dict_metadata[key]
    assert isinstance(saved, TensorStorageMetadata)
    for item in create_read_items_for_chunk_list(key, saved, [describe_chunk(block.box) for block in tensor.blocks]):
        assert item.dest_index.index is not None
        target = tensor.block(item.dest_index.index).detach()
        for dim, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        yield Read(item.storage_index, tuple(item.storage_offsets), target)


def read_slice(read: Read, place: SavedSlice) -> Read:
    """The same read from where upstream keeps the tensor, which may be one layer of a stack."""
    offset = tuple(read.box_index.offset or ())
    if place.layer is None:
        return read._replace(box_index=MetadataIndex(place.key, torch.Size(offset)))
    start = place.starts[offset]
    index = MetadataIndex(place.key, torch.Size((start, *offset)))
    return Read(index, (place.layer - start, *read.offsets), read.target.unsqueeze(0))
