# SPDX-License-Identifier: Apache-2.0
"""A start of 1,024 ranks, as single ranks of it meet a simulated store: each request is counted."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.mesh import RankGrid
from megatron.core.process_groups_config import GROUP_AXES, ProcessGroupCollection, group_ranks
from megatron.training.launch import initialize
from megatron.training.launch.initialize import connect_groups
from megatron.training.launch.rendezvous import StartupCheck
from tests.unit.training.launch.test_initialize import run_config

MILLISECOND = 1e-3
WORLD, SIZES = 1024, {"tp": 8, "pp": 4}


class Store(dist.Store):
    """Of a job whose other ranks are there already, with the same settings."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.world_size = world_size
        self.values: dict[str, str] = {}
        self.requests: Counter[str] = Counter()

    def add(self, key: str, amount: int) -> int:
        self.requests["add"] += 1
        if key.endswith((":last_worker", "present", "alike")) or "barrier" in key:
            return self.world_size
        self.values[key] = str(int(self.values.get(key, "0")) + amount)
        return int(self.values[key])

    def set(self, key: str, value: Any) -> None:
        self.requests["set"] += 1
        self.values[key] = value if isinstance(value, str) else value.decode()

    def get(self, key: str) -> bytes:
        # A client asks first whether the key is there, and then for its value.
        self.requests["get"] += 2
        name, _, rank = key.rpartition("/")
        assert rank == "0", f"{key}: only the first rank's is wanted"
        return next(value for other, value in self.values.items() if other.startswith(f"{name}/")).encode()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.requests["compare_set"] += 1
        return self.values.setdefault(key, desired).encode()

    def check(self, keys: list[str]) -> bool:
        self.requests["check"] += 1
        return False

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.requests["wait"] += 1


@pytest.fixture
def groups(request: pytest.FixtureRequest) -> Iterator[tuple[Store, ProcessGroupCollection, float]]:
    """The store after this rank has met the others and made its groups by torch's own code, and how long that took."""
    world_size, rank = request.param
    store = Store(world_size)
    StartupCheck(store, rank, world_size, 60.0).check({"--lr": 1.0}, f"GPU-{rank}", {"kernels": None})
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    before = time.perf_counter()
    yield store, ProcessGroupCollection.build(RankGrid(world_size, **SIZES), rank), time.perf_counter() - before
    dist.destroy_process_group()


RANKS = [(64, 0), (64, 33), (WORLD, 0), (WORLD, 513), (WORLD, WORLD - 1)]


@pytest.mark.parametrize("groups", RANKS, indirect=True)
def test_groups_of_others_cost_no_request(
    groups: tuple[Store, ProcessGroupCollection, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,024 ranks have some 1,200 groups, a rank nine: requests follow from those nine, at every size of the job."""
    store, own, seconds = groups
    # Making a group asks nothing: what is left is the meeting, the same at every size.
    assert sum(store.requests.values()) <= 12, store.requests
    assert seconds < 5
    met: list[tuple[int, ...]] = []
    monkeypatch.setattr(initialize, "all_reduce", lambda token, group: met.append(tuple(group_ranks(group))))
    monkeypatch.setattr(initialize.device_module, "read_used_memory_bytes", lambda: 0)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    layout = "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --num-layers 4 --num-attention-heads 8"
    connect_groups(own, run_config(layout, world_size=64), torch.device("cpu"))
    assert len(met) <= 6 and set(met) <= set(list_communicators(own.grid))


def list_communicators(grid: RankGrid) -> list[tuple[int, ...]]:
    """Members of each that is made at the start."""
    fields = ("world", "tp", "pp", "dp_cp", "mp", "embd")
    return list(dict.fromkeys(tuple(ranks) for field in fields for ranks in grid.groups(GROUP_AXES[field])))


def test_all_communicators_of_1024_ranks_take_15_seconds() -> None:
    """Of a store that serves one request after the other at 1 ms each. A communicator's first member leaves its address
    there; each other asks whether it is there, and for it."""
    grid = RankGrid(WORLD, **SIZES)
    neighbours = grid.pp - 1
    pairs = [(0, 1)] * (2 * neighbours * (WORLD // grid.pp))  # both directions between stages
    requests = sum(2 * len(ranks) - 1 for ranks in [*list_communicators(grid), *pairs])
    assert 15 < requests * MILLISECOND < 15.5


def test_a_barrier_after_each_group_is_what_takes_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has one where TORCH_DIST_INIT_BARRIER is set: the test above would see it."""
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")
    store = Store(64)
    dist.init_process_group("fake", store=store, rank=5, world_size=64)
    before = sum(store.requests.values())
    ProcessGroupCollection.build(RankGrid(64, **SIZES), 5)
    asked = sum(store.requests.values()) - before
    dist.destroy_process_group()
    assert asked >= 3 * 60, "three requests for each group, also for those of others"


def test_the_meeting_compares_with_the_first_rank_only() -> None:
    store = Store(WORLD)
    StartupCheck(store, 7, WORLD, 60.0).check({"--lr": 1.0}, None, {})
    assert store.requests["get"] == 2 and store.requests["set"] == 1
    assert json.loads(store.values["start/7"]) == {"flags": {"--lr": 1.0}, "obstacles": {}}
