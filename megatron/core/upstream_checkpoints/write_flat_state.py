# SPDX-License-Identifier: Apache-2.0
"""Optimizer state as upstream's distributed optimizer saves it by default (`dp_reshardable`), written: for each
model-parallel rank a flat tensor of each bucket and kind of state.

    bucket of 312896 elements, padded to 312960   | output_layer | final_layernorm | fc2 | ... | linear_qkv | ...
    shares of two data-parallel ranks             | share 0                            | share 1                |

Boxes end where a parameter or a share does, and what lies between two parameters is a box of zeros. Where a parameter
lies is worked out in flat_layout.py; flat_state.py is the reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.placement import Piece
from megatron.core.upstream_checkpoints.flat_layout import BucketPadding, BucketSlot, Parameter, fill_buckets
from megatron.core.upstream_checkpoints.names import FLAT_KEY
from megatron.core.upstream_checkpoints.write_torch_dist import name_object


class FlatBufferShare:
    """One of the equal shares of the buckets of a model chunk, to be filled parameter by parameter.

    parameters: of the whole buffer, as registered. bucket_size: from how many elements on upstream closes a bucket.
    share: number of this process's.
    """

    def __init__(
        self, parameters: Sequence[Parameter], bucket_size: int | None, padding: BucketPadding, share: int
    ) -> None:
        slots, self.sizes = fill_buckets(parameters, bucket_size, padding)
        self.padded = [padding.pad(size) for size in self.sizes]
        self.slots = {
            (parameter.name, parameter.expert): slot for parameter, slot in zip(parameters, slots, strict=True)
        }
        edges: list[set[int]] = [set() for _ in self.sizes]
        for parameter, slot in zip(parameters, slots, strict=True):
            edges[slot.bucket] |= {slot.start, slot.start + parameter.numel}
        lengths = [padded // padding.shares for padded in self.padded]
        self._starts = [share * length for length in lengths]
        self._stops = [
            min(start + length, size) for start, length, size in zip(self._starts, lengths, self.sizes, strict=True)
        ]
        self._edges = edges
        self._values: dict[str, list[Tensor]] = {}

    def put(self, parameter: Parameter, kind: str, values: Tensor) -> None:
        """Copy what lies in this share of a kind of a parameter's state; `values` in the shape of the parameter."""
        if kind not in self._values:
            self._values[kind] = [
                torch.zeros(max(0, stop - start)) for start, stop in zip(self._starts, self._stops, strict=True)
            ]
        slot = self.slots[parameter.name, parameter.expert]
        first, last = self._starts[slot.bucket], self._stops[slot.bucket]
        start, stop = max(slot.start, first), min(slot.start + parameter.numel, last)
        if start < stop:
            flat = values.reshape(-1)[start - slot.start : stop - slot.start]
            self._values[kind][slot.bucket][start - first : stop - first] = flat

    def build_tensors(self, prefix: str) -> ShardedStateDict:
        """The flat tensors of all kinds that were put; `prefix` begins their keys."""
        tensors: ShardedStateDict = {}
        for kind, buckets in self._values.items():
            for number, values in enumerate(buckets):
                key = f"{prefix}.bucket_idx_{number}.{kind}"
                tensors[key] = ShardedTensor(key, values, (self.sizes[number],), self._list_boxes(number))
        return tensors

    def _list_boxes(self, bucket: int) -> tuple[Piece, ...]:
        first, last = self._starts[bucket], self._stops[bucket]
        cuts = sorted({first, last, *(edge for edge in self._edges[bucket] if first < edge < last)})
        return tuple(
            Piece(((start, stop - start),), ((start - first, stop - start),), True)
            for start, stop in zip(cuts, cuts[1:], strict=False)
            if first < last
        )


@dataclass(frozen=True)
class FlatRank:
    """The flat buffers of one optimizer on one model-parallel rank."""

    prefix: str
    """Of its keys: `optimizer.distributed.dp_group_idx_3`."""
    buffers: Sequence[FlatBufferShare]
    """One for each model chunk."""
    dtypes: tuple[torch.dtype, torch.dtype]
    """Dtypes of parameters and of gradients."""

    @classmethod
    def name_prefix(cls, rank: int, optimizer: int | None) -> str:
        """optimizer: its number where there are several."""
        chained = "" if optimizer is None else f"chained_{optimizer}."
        return f"{chained}optimizer.distributed.dp_group_idx_{rank}"

    @staticmethod
    def parse_prefix(prefix: str) -> tuple[int, int]:
        """(number of the optimizer, of the rank)."""
        found = FLAT_KEY.fullmatch(f"{prefix}.optimizer")
        assert found is not None, f"{prefix} is no prefix of flat buffers"
        return int(found["optimizer"] or 0), int(found["rank"])

    def build_tensors(self) -> ShardedStateDict:
        """The flat tensors by key."""
        tensors: ShardedStateDict = {}
        for number, buffer in enumerate(self.buffers):
            tensors |= buffer.build_tensors(f"{self.prefix}.gbuf_idx_{number}.dtype_{self.dtypes}")
        return tensors

    def build_objects(self, beside: Mapping[str, Any]) -> dict[str, Any]:
        """The objects by key: sizes of the buckets, and what else the optimizer has (`beside`)."""
        values = {
            **beside,
            "per_bucket_numel": [{self.dtypes: list(buffer.padded)} for buffer in self.buffers],
            "per_bucket_numel_unpadded": [{self.dtypes: list(buffer.sizes)} for buffer in self.buffers],
        }
        return {name_object(f"{self.prefix}.{key}", []): value for key, value in values.items()}

    def list_slots(self) -> set[tuple[str, int | None, BucketSlot]]:
        """(parameter, its expert on this rank, place) of everything in the buffers."""
        return {(*key, slot) for buffer in self.buffers for key, slot in buffer.slots.items()}
