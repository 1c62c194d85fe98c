"""Point-to-point: carries out the transfers that communication.py planned, on gloo and on NCCL."""

from __future__ import annotations

from collections import deque
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.collectives import receive, send
from megatron.core.pipeline_parallel.communication import SENDS_UNDER_WAY, Transfer
from megatron.core.process_groups_config import Group, SingleRankGroup, torch_group
from megatron.core.virtual_stages import VirtualStages

Key = tuple[str, int, int]
"""(F or B, microbatch, chunk of this rank)."""


class Mail:
    """One step's sends and receives of this rank.

    tensor_shape, dtype, device: of every tensor that is exchanged. blocking: wait for transfers as soon as they are
    posted; else for a receive when its tensor is taken, and for a send when enough others have been posted after it.
    """

    def __init__(
        self, group: Group, tensor_shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, blocking: bool
    ) -> None:
        self.group, self.blocking = group, blocking
        self.tensor_shape, self.dtype, self.device = tuple(tensor_shape), dtype, device
        self._arriving: dict[Key, tuple[Any, Tensor]] = {}
        self._leaving: deque[tuple[Any, Tensor]] = deque()

    def post(self, transfers: Sequence[Transfer], outgoing: MutableMapping[Key, Tensor]) -> None:
        """Begin transfers that stand next to each other in the program; what is sent leaves `outgoing`."""
        works = [self._begin(transfer, outgoing) for transfer in transfers]
        if self.blocking:
            for work in works:
                work.wait()
            self._leaving.clear()
        while len(self._leaving) > SENDS_UNDER_WAY:
            self._leaving.popleft()[0].wait()

    def take(self, key: Key) -> Tensor:
        """The received tensor."""
        work, tensor = self._arriving.pop(key)
        if not self.blocking:
            work.wait()
        return tensor

    def finish(self) -> None:
        """Wait until every send has left: its tensor's memory may then be used again."""
        while self._leaving:
            self._leaving.popleft()[0].wait()
        assert not self._arriving, f"received and never used: {sorted(self._arriving)}"

    def _begin(self, transfer: Transfer, outgoing: MutableMapping[Key, Tensor]) -> Any:
        key = (transfer.what, transfer.microbatch, transfer.chunk)
        if transfer.kind == "send":
            tensor = outgoing.pop(key)
            assert tensor.shape == self.tensor_shape and tensor.dtype == self.dtype, (
                f"a stage gives {tuple(tensor.shape)} {tensor.dtype}; "
                f"the next one expects {self.tensor_shape} {self.dtype}"
            )
            tensor = tensor.contiguous()
            work = send(tensor, self.group, transfer.peer, transfer.tag)
            self._leaving.append((work, tensor))
            return work
        tensor = torch.empty(self.tensor_shape, dtype=self.dtype, device=self.device)
        work = receive(tensor, self.group, transfer.peer, transfer.tag)
        self._arriving[key] = (work, tensor)
        return work


def connect_neighbours(group: Group, shape: VirtualStages, device: torch.device) -> None:
    """Make the connections between stages, one after the other in the same order everywhere.

    NCCL makes one when it is first used, and waits there for the partner, who may be waiting elsewhere.
    """
    if isinstance(group, SingleRankGroup) or dist.get_backend(torch_group(group)) != "nccl":
        return
    holders = [shape.holder(stage)[0] for stage in range(shape.count)]
    pairs = {(min(pair), max(pair)) for pair in zip(holders, holders[1:], strict=False) if pair[0] != pair[1]}
    token = torch.zeros(1, device=device)
    for low, high in sorted(pairs):
        if group.rank() == low:
            send(token, group, high).wait()
        elif group.rank() == high:
            receive(token, group, low).wait()
