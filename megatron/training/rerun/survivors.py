# SPDX-License-Identifier: Apache-2.0
"""Meeting of the processes that are left when one of them has failed.

A group that has lost a member is of no use, so ranks tell each other through the job's key-value store who is there and
in which state. Those that have come then make a new group.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron.core.process_groups_config import Group, SingleRankGroup

_PATIENCE_SECONDS = 15.0
"""For a process that still computes and has not met the failure. Launchers kill what has not ended after 30 seconds."""
_SEARCH_SECONDS = 0.5
_LOOK_SECONDS = 0.01


@dataclass(frozen=True)
class SurvivorState:
    """State of one process when it met the failure."""

    iteration: int
    """Iterations that it has done."""
    problem: str | None = None
    """Reason why its state does not belong to the end of an iteration, or why it cannot go on."""


@dataclass(frozen=True)
class Patience:
    """Times of a meeting."""

    most_seconds: float = _PATIENCE_SECONDS
    """For those who have not come and have not ended either."""
    least_seconds: float = 0.0
    """For those who have come and end meanwhile."""


def meet(
    store: dist.Store,
    rank: int,
    size: int,
    own: SurvivorState,
    list_ended: Callable[[Sequence[int]], list[int]],
    patience: Patience = Patience(),
) -> dict[int, SurvivorState]:
    """Return the ranks that have come with their conditions, the same on all of them; every one that is left calls it.

    store: of this failure alone. list_ended: which of some ranks have ended. Raises TimeoutError where no list of those
    who have come can be had, or this process came too late for it.
    """
    store.set(f"condition/{rank}", json.dumps(asdict(own)))
    if store.compare_set("leader", "", str(rank)) == str(rank).encode():
        present = _wait_for_others(store, size, list_ended, patience)
        store.set("present", json.dumps(present))
    else:
        deadline = time.monotonic() + 2 * patience.most_seconds
        while not store.check(["present"]):
            if time.monotonic() > deadline:
                raise TimeoutError("the rank that lists those who are left has said nothing")
            time.sleep(_LOOK_SECONDS)
        present = json.loads(store.get("present"))
    if rank not in present:
        raise TimeoutError(f"rank {rank} met the failure later than the others waited for it")
    return {member: SurvivorState(**json.loads(store.get(f"condition/{member}"))) for member in present}


def regroup(store: dist.Store, rank: int, present: Sequence[int]) -> Group:
    """Return a group of these ranks, in their order; each of them calls it. It takes the place of torch's former
    groups, which are destroyed."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if len(present) == 1:
        return SingleRankGroup()
    # gloo also for a job of NCCL's: only small things travel.
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("group", store), rank=present.index(rank), world_size=len(present),
        timeout=timedelta(seconds=4 * _PATIENCE_SECONDS),
    )  # fmt: skip
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _wait_for_others(
    store: dist.Store, size: int, list_ended: Callable[[Sequence[int]], list[int]], patience: Patience
) -> list[int]:
    """Return the ranks that have come, when all others have ended or had their time."""
    began_at = search_at = time.monotonic()
    deadline = began_at + patience.most_seconds
    ended: set[int] = set()
    while True:
        missing = [rank for rank in range(size) if not store.check([f"condition/{rank}"])]
        if time.monotonic() > search_at:
            ended |= set(list_ended([rank for rank in missing if rank not in ended]))
            search_at = time.monotonic() + _SEARCH_SECONDS
        if ended.issuperset(missing) or time.monotonic() > deadline:
            present = [rank for rank in range(size) if rank not in missing]
            if not patience.least_seconds:
                return present
            time.sleep(max(0.0, began_at + patience.least_seconds - time.monotonic()))
            gone = list_ended(present)
            return [rank for rank in present if rank not in gone]
        time.sleep(_LOOK_SECONDS)
