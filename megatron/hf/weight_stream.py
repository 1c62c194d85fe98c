# SPDX-License-Identifier: Apache-2.0
"""Whole tensors out of a running model, one at a time, however its parameters are divided over processes.

    every rank:  what it holds -> all know who holds which box -> for each tensor, each holder in turn broadcasts its
                 boxes -> the ranks that want the tensor assemble it

A box that several ranks hold (replicas) is sent by one of them, so that all send about equally much. No more than one
tensor of Hugging Face's, or one group of them that is one parameter of ours, is in memory at a time; of experts, one.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megatron.core.collectives import all_gather_object, broadcast
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.errors import ConfigError
from megatron.core.placement import Box
from megatron.core.process_groups_config import Group
from megatron.hf.entries import Entry
from megatron.hf.rows import join_numbers


@dataclasses.dataclass(frozen=True)
class _Sent:
    """Senders of the parts of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the whole tensor, with the padding rows of this layout."""
    senders: Mapping[int, Sequence[Box]]
    """Rank -> its boxes, in the order in which they are sent."""


class WeightStream:
    """The parameters of a model that the members of a group hold together."""

    def __init__(self, tensors: ShardedStateDict, group: Group, *, on_all_ranks: bool = True) -> None:
        """tensors: what this process holds. on_all_ranks: every member gets the tensors, not only the first.

        Every member calls this, and everything below, in the same order.
        """
        self._tensors = tensors
        self.group = group
        self.receives = on_all_ranks or group.rank() == 0
        """True if this process gets the tensors."""
        self._device = next((tensor.data.device for tensor in tensors.values()), torch.device("cpu"))
        self._sent = _choose_senders(tensors, group)

    def get_dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a parameter in the network."""
        return self._sent[key].dtype

    def check(self, entries: Sequence[Entry]) -> None:
        """Raise ConfigError, on every member, where the group holds another model than the entries describe."""
        for entry in entries:
            sent, shape = self._sent.get(entry.key), entry.placement.logical_shape
            if sent is None:
                found = "missing"
            elif sent.shape[:1] < shape[:1] or sent.shape[1:] != shape[1:]:
                found = f"of shape {sent.shape}"
            else:
                held = sum(_count(_meet(box, _whole(shape))) for box in _list_boxes(sent))
                assert held == math.prod(shape), f"{entry.key}: {held} elements of {shape} are held"
                continue
            raise ConfigError(
                f"{entry.key} is {found} in the model, and {shape} by its settings; give a whole model of the same "
                "settings"
            )

    def stream(self, entries: Sequence[Entry]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the Hugging Face model, by their names there, on the device of the model.

        Where this process gets none it yields none, and has taken part nevertheless. Tensors may share the memory of
        the parameters: copy what is to outlive the next update.
        """
        yield from join_numbers(self._list_parts(entries))

    def _list_parts(self, entries: Sequence[Entry]) -> Iterator[tuple[str, Tensor]]:
        for entry in entries:
            for region, names in entry.list_regions():
                ours = self._gather(entry.key, region)
                if ours is not None:
                    yield from entry.split_region(ours, names)

    def _gather(self, key: str, region: Box) -> Tensor | None:
        """A part of the tensor; None where this process gets none."""
        sent, shape = self._sent[key], [length for _, length in region]
        # The usual case of one process: nothing to put together.
        if list(sent.senders) == [self.group.rank()] and self.group.size() == 1:
            (box, *others) = _list_boxes(sent)
            if not others:
                return self._cut(key, box, _meet(box, region))
        whole = torch.empty(shape, dtype=sent.dtype, device=self._device) if self.receives else None
        for sender, boxes in sent.senders.items():
            parts = [(box, met) for box in boxes if _count(met := _meet(box, region))]
            if not parts:
                continue
            if sender == self.group.rank():
                flat = torch.cat([self._cut(key, box, met).reshape(-1) for box, met in parts])
            else:
                flat = torch.empty(sum(_count(met) for _, met in parts), dtype=sent.dtype, device=self._device)
            # As bytes: no backend has an opinion about those.
            broadcast(flat.view(torch.uint8), self.group, sender)
            if whole is None:
                continue
            for (_, met), values in zip(parts, flat.split([_count(met) for _, met in parts]), strict=True):
                place = tuple(slice(s - r, s - r + n) for (s, n), (r, _) in zip(met, region, strict=True))
                whole[place] = values.view([length for _, length in met])
        return whole

    def _cut(self, key: str, box: Box, met: Box) -> Tensor:
        """The part `met` of a box that this process holds: a view."""
        tensor = self._tensors[key]
        block = tensor.block(tensor.index_at(start for start, _ in box))
        return block[tuple(slice(s - b, s - b + n) for (s, n), (b, _) in zip(met, box, strict=True))].detach()


def _choose_senders(tensors: ShardedStateDict, group: Group) -> dict[str, _Sent]:
    held = {
        key: (
            tensor.dtype,
            tensor.global_shape,
            tuple(block.box for block in tensor.blocks if block.owned and _count(block.box)),
        )
        for key, tensor in tensors.items()
        if not tensor.is_copy
    }
    everyones: list[dict[str, tuple[torch.dtype, tuple[int, ...], tuple[Box, ...]]]] = all_gather_object(held, group)
    holders: dict[str, dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
    described: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for rank, theirs in enumerate(everyones):
        for key, (dtype, shape, boxes) in theirs.items():
            described[key] = dtype, shape
            for box in boxes:
                holders[key][box].append(rank)
    # The same on all ranks: dictionaries keep the order in which ranks reported.
    load = [0] * group.size()
    sent = {}
    for key, boxes_of in holders.items():
        senders: dict[int, list[Box]] = defaultdict(list)
        for box, ranks in boxes_of.items():
            sender = min(ranks, key=lambda rank: (load[rank], rank))
            load[sender] += _count(box)
            senders[sender].append(box)
        sent[key] = _Sent(*described[key], dict(senders))
    return sent


def _list_boxes(sent: _Sent) -> list[Box]:
    return [box for boxes in sent.senders.values() for box in boxes]


def _whole(shape: Sequence[int]) -> Box:
    return tuple((0, length) for length in shape)


def _count(box: Box) -> int:
    return math.prod(length for _, length in box)


def _meet(box: Box, region: Box) -> Box:
    """Return what the two have in common; lengths of 0 where that is nothing."""
    met = []
    for (first, length), (start, extent) in zip(box, region, strict=False):
        begin, end = max(first, start), min(first + length, start + extent)
        met.append((begin, max(0, end - begin)))
    return tuple(met)
