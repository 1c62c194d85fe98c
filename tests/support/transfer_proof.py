# SPDX-License-Identifier: Apache-2.0
"""The proof that the transfers of a plan end: all ranks' programs carried out as strictly as NCCL may."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from megatron.core.pipeline_parallel.programs import SENDS_UNDER_WAY, Program, Transfer, find_end_of_transfers
from megatron.core.pipeline_parallel.schedules import Action, find_end_beside
from megatron.core.pipeline_parallel.timelines import Deadlock


def play(plan: Sequence[Program], *, blocking: bool, one_queue: bool = False) -> None:
    """Carry the programs out as strictly as NCCL may: a transfer ends when both ends are posted and all earlier ones
    from the one rank to the other are over. blocking: a rank goes on only when the transfers it just posted are over.
    one_queue: the GPU has a single hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1), in which a transfer that cannot
    start, because the one before it on the same connection is under way, stops everything behind it.

    Raises Deadlock when ranks wait for each other, when two partners list their transfers differently, or when a
    transfer is left over.
    """
    players = [_Player(program, blocking, one_queue) for program in plan]
    moved = True
    while moved:
        moved = any(player.step() for player in players)
        # Until no rank moves and no transfer ends: what is left then can never go on.
        moved |= any(_exchange(players, *pair) for pair in itertools.permutations(range(len(plan)), 2))
    stuck = [f"rank {rank} at {player.waits_at()}" for rank, player in enumerate(players) if not player.is_done]
    if stuck:
        raise Deadlock(f"ranks wait for each other: {', '.join(stuck)}")


class _Player:
    """One rank: how far its program is, and which of its transfers are posted and over."""

    def __init__(self, program: Program, blocking: bool, one_queue: bool) -> None:
        self.program, self.blocking, self.one_queue = program, blocking, one_queue
        self.position = 0
        # By ("send" or "receive", partner): what one connection carries in one direction, in order.
        self.posted: dict[tuple[str, int], deque[Transfer]] = {}
        self.over: set[Transfer] = set()
        self.sends: deque[Transfer] = deque()
        self.awaited: list[Transfer] = []

    @property
    def is_done(self) -> bool:
        return self.position == len(self.program) and not any(self.posted.values())

    def waits_at(self) -> str:
        return str(self.program[self.position] if self.position < len(self.program) else dict(self.posted))

    def step(self) -> bool:
        """Run this rank's program as far as possible; returns whether it moved at all."""
        begin = self.position
        while self.position < len(self.program) and self.over.issuperset(self.awaited):
            step = self.program[self.position]
            if isinstance(step, Transfer):
                end = find_end_of_transfers(self.program, self.position)
                if self.one_queue:
                    if self.posted.get((step.kind, step.peer)):
                        break
                    end = self.position + 1
                self.awaited = list(self._post(self.program[self.position : end]))
                self.position = end
            # An action waits for its own input only; receives posted early may still be under way.
            elif self.over.issuperset(self._inputs(self.position)):
                self.position += 1
            else:
                break
        return self.position > begin

    def _post(self, steps: Iterable[Action | Transfer]) -> Iterator[Transfer]:
        """Post the transfers; which of them, or of earlier ones, must be over before the next step."""
        for step in steps:
            assert isinstance(step, Transfer)
            self.posted.setdefault((step.kind, step.peer), deque()).append(step)
            if self.blocking:
                yield step
            elif step.kind == "send":
                self.sends.append(step)
                if len(self.sends) > SENDS_UNDER_WAY:
                    yield self.sends.popleft()

    def _inputs(self, position: int) -> list[Transfer]:
        beside = self.program[position : find_end_beside(self.program, position)]
        keys = {step[:3] for step in beside if isinstance(step, Action)}
        received = [step for step in self.program[:position] if isinstance(step, Transfer) and step.kind == "receive"]
        return [step for step in received if (step.what, step.microbatch, step.chunk) in keys]


def _exchange(players: list[_Player], sender: int, receiver: int) -> bool:
    """Complete the transfers that stand first in the queues of both; returns whether there were any."""
    ours = players[sender].posted.get(("send", receiver))
    theirs = players[receiver].posted.get(("receive", sender))
    moved = False
    while ours and theirs:
        # NCCL would pair these two whatever they are: a wrong tensor.
        if ours[0].tag != theirs[0].tag:
            raise Deadlock(f"rank {sender} lists {ours[0]} where rank {receiver} lists {theirs[0]}")
        players[sender].over.add(ours.popleft())
        players[receiver].over.add(theirs.popleft())
        moved = True
    return moved
