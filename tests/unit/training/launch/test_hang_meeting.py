# SPDX-License-Identifier: Apache-2.0
"""Watchers of several hosts meet at a store: who answers late is waited for, who gives no sign of life is not."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from torch.distributed import HashStore

from megatron.core.progress_record import STEP, LastCollective, ProgressSnapshot
from megatron.training.launch import hang_meeting
from megatron.training.launch.hang_meeting import Meeting
from megatron.training.launch.hang_verdict import RankState


class _Wire:
    """The way of one host to the store, which can be cut."""

    def __init__(self, store: HashStore) -> None:
        self._store, self.is_cut = store, threading.Event()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            while self.is_cut.is_set():
                time.sleep(0.01)
            return getattr(self._store, name)(*arguments)

        return call


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Meeting], list[_Wire]]:
    """Three hosts of a rank each, whose clocks run twice as fast."""
    for name, seconds in (("_SIGN_SECONDS", 0.1), ("_POLL_SECONDS", 0.025), ("_GONE_SECONDS", 1.5)):
        monkeypatch.setattr(hang_meeting, name, seconds)
    monkeypatch.setattr(hang_meeting, "_ANSWER_SECONDS", 20.0)
    store = HashStore()
    wires = [_Wire(store) for _ in range(3)]
    meetings = [Meeting(("", 0), "", lambda rank=rank: [rank], 3, lambda: False) for rank in range(3)]  # type: ignore[misc]
    for meeting, wire in zip(meetings, wires, strict=True):
        monkeypatch.setattr(meeting, "_connect", lambda wire=wire: wire)
        meeting.start()
    while store.add("signs", 0) < 9:
        time.sleep(0.01)
    return meetings, wires


def _state(rank: int) -> RankState:
    call = LastCollective("dp", (0, 1, 2), "all_reduce", 4 if rank == 1 else 5, 4096, 9)
    return RankState("node", False, False, 6.0, ProgressSnapshot(rank, 1000 + rank, STEP, 7, 2, 99, 5.0, (call,)))


def test_a_host_that_answers_late_is_waited_for(hosts: tuple[list[Meeting], list[_Wire]]) -> None:
    meetings, _ = hosts
    outcomes: dict[int, Any] = {}

    def answer(rank: int) -> None:
        if rank:
            meetings[rank].is_alarmed.wait(20.0)
        # Far longer than a host may be without a sign of life.
        time.sleep(3.0 if rank == 2 else 0.0)
        outcomes[rank] = meetings[rank].judge_together([_state(rank)], f"stack {rank}")
        meetings[rank].close()

    threads = [threading.Thread(target=answer, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes[0].verdict.culprits == (1,), outcomes
    assert "has not entered all_reduce number 5" in outcomes[0].verdict.sentence
    assert [state.rank for state in outcomes[0].states] == [0, 1, 2]
    assert outcomes[0].stacks == "stack 0\n\nstack 1\n\nstack 2"
    assert outcomes[1].verdict is None and outcomes[2].verdict is None, "the first one judges"


def test_a_host_that_is_cut_off_is_named_and_not_waited_for(hosts: tuple[list[Meeting], list[_Wire]]) -> None:
    meetings, wires = hosts
    wires[2].is_cut.set()
    time.sleep(2.0)
    began_at = time.monotonic()
    alone = meetings[2].judge_together([_state(2)], "stack 2")
    assert alone is None, "the store does not answer"

    def judge_or_wait() -> None:
        meetings[1].judge_together([_state(1)], "stack 1")
        meetings[1].close()  # whoever does not judge waits for it

    threading.Thread(target=judge_or_wait).start()
    outcome = meetings[0].judge_together([_state(0)], "stack 0")
    assert outcome is not None
    verdict = outcome.verdict
    if verdict is None:  # the other one judges
        verdict = meetings[1]._outcome.verdict  # type: ignore[union-attr]
    assert verdict is not None and verdict.culprits == (2,)
    assert "rank 2 is not heard of: its host, or the network to it, is gone" in verdict.sentence
    assert time.monotonic() - began_at < 15.0
    meetings[0].close()
    wires[2].is_cut.clear()
