# SPDX-License-Identifier: Apache-2.0
"""Point-to-point communication: carries out the transfers that programs.py planned, on gloo and on NCCL.

Both match the sends and receives of two processes by their order (gloo also by tag), and a program lists a pair's
transfers alike on both sides. So nothing is negotiated here: transfers are posted in the program's order, and waited
for late.

What goes to higher ranks and what goes to lower ones has a process group each (ProcessGroupCollection.pp_directions):
on one communicator NCCL would carry out all transfers of a pair one after the other, on two they pass each other. They
are used for nothing else, so that no transfer waits for a collective.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.collectives import receive, send
from megatron.core.mesh import VirtualStages
from megatron.core.pipeline_parallel.programs import SENDS_UNDER_WAY, Transfer
from megatron.core.process_groups_config import Group, SingleRankGroup, torch_group

# Put here by a table of upstream's names; declared for type checkers.
_batched_p2p_ops: Any

TensorKey = tuple[str, int, int]
"""Names a tensor between stages: (F or B, microbatch, chunk of this rank)."""


class P2PTransfers:
    """One step's sends and receives of this rank.

    directions: the groups for transfers to higher ranks, and to lower ones. shape_of: of the tensor of a transfer; None
    where the sender tells it, three numbers before each tensor, which needs `blocking`.
    dtype, device: of every tensor. blocking: wait for transfers as soon as they are posted; else for a receive when its
    tensor is taken, and for a send when enough others have been posted after it.
    """

    def __init__(
        self,
        directions: Sequence[Group],
        shape_of: Callable[[Transfer], tuple[int, ...]] | None,
        dtype: torch.dtype,
        device: torch.device,
        *,
        blocking: bool,
    ) -> None:
        self.up, self.down = directions
        self.blocking = blocking
        self.shape_of, self.dtype, self.device = shape_of, dtype, device
        self._receives: dict[TensorKey, tuple[Any, Tensor]] = {}
        self._sends: deque[tuple[Any, Tensor]] = deque()

    def post(self, transfers: Sequence[Transfer], outgoing: MutableMapping[TensorKey, Tensor]) -> None:
        """Begin transfers that are adjacent in the program; what is sent leaves `outgoing`."""
        # All are begun before one is waited for: two neighbours that each wait for their send would never receive.
        # Where a receive waits for a shape, sends go first, for the same reason.
        if self.shape_of is None:
            transfers = sorted(transfers, key=lambda transfer: transfer.kind != "send")
        works = [self._begin(transfer, outgoing) for transfer in transfers]
        if self.blocking:
            for work in works:
                work.wait()
            self._sends.clear()
        # A tensor must stay unchanged until it has left. Waiting for the oldest bounds the memory that sends hold.
        while len(self._sends) > SENDS_UNDER_WAY:
            self._sends.popleft()[0].wait()

    def take(self, key: TensorKey) -> Tensor:
        """Wait for a tensor to be received, and return it: [s, b, h]."""
        work, tensor = self._receives.pop(key)
        if not self.blocking:
            work.wait()
        return tensor

    def finish(self) -> None:
        """Wait until every send has left: its tensor's memory may then be used again."""
        while self._sends:
            self._sends.popleft()[0].wait()
        assert not self._receives, f"received and never used: {sorted(self._receives)}"

    def _begin(self, transfer: Transfer, outgoing: MutableMapping[TensorKey, Tensor]) -> Any:
        key = (transfer.what, transfer.microbatch, transfer.chunk)
        shape = None if self.shape_of is None else self.shape_of(transfer)
        group = self.up if transfer.goes_up(self.up.rank()) else self.down
        if transfer.kind == "send":
            tensor = outgoing.pop(key)
            # The receiver has allocated this shape unasked; another one would be garbage there, or a hang.
            assert (shape is None or tensor.shape == shape) and tensor.dtype == self.dtype, (
                f"a stage gives {tuple(tensor.shape)} {tensor.dtype}; the next one expects {shape} {self.dtype}; where "
                "microbatches differ in length, set variable_seq_lengths in the model's config"
            )
            if shape is None:
                header = torch.tensor(tensor.shape, dtype=torch.int64, device=self.device)
                self._sends.append((send(header, group, transfer.peer, transfer.tag), header))
            # A view, such as a gradient that autograd left transposed, would be sent in the order of its memory.
            tensor = tensor.contiguous()
            work = send(tensor, group, transfer.peer, transfer.tag)
            self._sends.append((work, tensor))
            return work
        if shape is None:
            header = torch.empty(3, dtype=torch.int64, device=self.device)
            receive(header, group, transfer.peer, transfer.tag).wait()
            shape = tuple(header.tolist())
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        work = receive(tensor, group, transfer.peer, transfer.tag)
        self._receives[key] = (work, tensor)
        return work


def connect_neighbours(directions: Sequence[Group], shape: VirtualStages, device: torch.device) -> None:
    """Make the connections between stages, one after the other in the same order everywhere.

    NCCL makes a connection when it is first used, and the host waits there for the partner. In the middle of a step
    the partner may itself be waiting for a third rank, so it is done before, with a tensor of one element.
    """
    up, down = directions
    if isinstance(up, SingleRankGroup) or dist.get_backend(torch_group(up)) != "nccl":
        return
    token = torch.zeros(1, device=device)
    # One at a time, in one order on all ranks: no cycle of ranks that wait for each other can form.
    for sender, receiver in list_connections(shape):
        group = up if sender < receiver else down
        if group.rank() == sender:
            send(token, group, receiver).wait()
        elif group.rank() == receiver:
            receive(token, group, sender).wait()


def list_connections(shape: VirtualStages) -> list[tuple[int, int]]:
    """Ranks in the pipeline between which something goes, as (sender, receiver): hidden states and their gradients."""
    holders = [shape.holder(stage)[0] for stage in range(shape.count)]
    forward = {pair for pair in zip(holders, holders[1:], strict=False) if pair[0] != pair[1]}
    return sorted(forward | {(receiver, sender) for sender, receiver in forward})
