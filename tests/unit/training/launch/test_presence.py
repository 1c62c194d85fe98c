# SPDX-License-Identifier: Apache-2.0
"""Which rank has ended is found out by knocking at the ports of all."""

from __future__ import annotations

import os
import signal
import time

import pytest
from torch.distributed import HashStore, Store

from megatron.training.launch import presence
from megatron.training.launch.initialize import explain_lost_peer
from megatron.training.launch.launch import Launch
from megatron.training.launch.presence import Presence

LOST = RuntimeError("[../gloo/transport/tcp/pair.cc:538] Connection closed by peer")


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> tuple[Store, list[Presence]]:
    monkeypatch.setattr(presence, "_SEARCH_SECONDS", 0.2)
    monkeypatch.setattr(presence, "_find_own_address", lambda launch: "127.0.0.1")
    store = HashStore()
    launches = [Launch(rank=rank, world_size=4, master_addr="127.0.0.1", master_port=1) for rank in range(4)]
    return store, [Presence(launch, store) for launch in launches]


def end(process: Presence) -> None:
    """What the system does when the process ends."""
    process._port.close()


def test_the_rank_that_ended_is_named(four: tuple[Store, list[Presence]]) -> None:
    _, ranks = four
    assert ranks[0].find_lost_ranks() == []
    assert "another rank was lost or did not answer in time" in (explain_lost_peer(LOST, ranks[0]) or "")
    end(ranks[2])
    assert ranks[1].find_lost_ranks() == [2]
    assert "another rank was lost: rank 2 has ended (" in (explain_lost_peer(LOST, ranks[1]) or "")
    end(ranks[1])
    assert ranks[3].find_lost_ranks() == [2], "rank 1 ended because it had lost rank 2, and said so"
    end(ranks[0])
    assert ranks[3].find_lost_ranks() == [2], "as rank 0 did above"


def test_a_loader_process_does_not_stand_for_the_rank_that_has_forked_it(four: tuple[Store, list[Presence]]) -> None:
    _, ranks = four
    told, tells = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(tells, b".")
        time.sleep(60)
        os._exit(0)
    try:
        os.read(told, 1)
        end(ranks[2])
        assert ranks[1].list_ended([0, 2, 3]) == [2]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_R12_without_the_store_it_was_the_rank_that_served_it(four: tuple[Store, list[Presence]]) -> None:
    class Gone:
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("Broken pipe")

    _, ranks = four
    ranks[1]._store = ranks[0]._store = Gone()  # type: ignore[assignment]
    assert ranks[1].find_lost_ranks() == [0]
    assert ranks[0].find_lost_ranks() == []
