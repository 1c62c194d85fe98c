# SPDX-License-Identifier: Apache-2.0
"""Meeting of the watchers of all hosts at the job's store: who is there, who raises the alarm, and who judges.

Each watcher gives a sign of life every second. Signs are numbered over all hosts, so that a host knows by its own clock
since when another has given none: the signs that it gave afterwards have larger numbers. A host that is cut off has
been silent for as long as the step when that counts as hung, and is then not waited for.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from megatron.training.launch.hang_verdict import HangVerdict, RankState, judge

if TYPE_CHECKING:
    from torch.distributed import Store

_POLL_SECONDS = 0.25
_SIGN_SECONDS = 1.0
_GONE_SECONDS = 4.0
"""A host without a sign of life for so long is cut off, or gone: a busy machine lets its watcher give one."""
_ANSWER_SECONDS = 10.0
"""Seconds that the judge waits for the other hosts, which answer within one unless they are very busy."""


class Judgement(NamedTuple):
    """Result of a meeting."""

    verdict: HangVerdict | None
    """None where another host has it."""
    states: list[RankState]
    """Facts that the verdict rests on."""
    stacks: str


class Meeting(threading.Thread):
    """A thread of one host's watcher, because a store that is cut off may never answer. No error of it ends a watch."""

    def __init__(
        self,
        address: tuple[str, int],
        prefix: str,
        list_ranks: Callable[[], Sequence[int]],
        world_size: int,
        hurries: Callable[[], bool],
    ) -> None:
        """list_ranks: returns this host's. hurries: says whether the alarm is to be heard within a quarter of a
        second."""
        super().__init__(name="meeting", daemon=True)
        self.is_alarmed = threading.Event()
        """Another host has raised the alarm."""
        self._address, self._prefix = address, prefix
        self._list_ranks, self._world_size, self._hurries = list_ranks, world_size, hurries
        self._number = 0
        """Of this host, from 1 in the order in which they came."""
        self._signs: list[tuple[float, int]] = []
        """This host's: (by time.monotonic(), number), in order."""
        self._answered_at: float | None = None
        """Moment of the store's last answer."""
        self._own: tuple[list[RankState], str] | None = None
        self._outcome: Judgement | None = None
        self._is_asked, self._is_over, self._is_reported = threading.Event(), threading.Event(), threading.Event()

    def run(self) -> None:
        """Meet, until somebody asks for a verdict."""
        try:
            # Without the store, which the hung host may have had, each host judges by itself.
            with contextlib.suppress(Exception):
                store = self._connect()
                self._number = store.add("hosts", 1)
                self._give_sign(store)
                store.set(f"ranks/{self._number}", json.dumps(self._list_ranks()))
                while not self._is_asked.wait(_POLL_SECONDS if self._hurries() else _SIGN_SECONDS):
                    self._give_sign(store)
                    if store.check(["alarm"]):
                        self.is_alarmed.set()
                self._outcome = self._judge(store)
                if self._outcome.verdict is not None:
                    self._is_over.set()
                    self._is_reported.wait()
                    store.set("judged", "1")
        finally:
            self._is_over.set()

    def judge_together(self, states: list[RankState], stacks: str) -> Judgement | None:
        """Raise the alarm and wait for the verdict; None where the store does not answer. states: of this host's
        ranks."""
        self._own, asked_at = (states, stacks), time.monotonic()
        self._is_asked.set()
        while not self._is_over.wait(0.05):
            # Before its first answer torch is being loaded.
            since, patience = self._answered_at or asked_at, _GONE_SECONDS if self._answered_at else _ANSWER_SECONDS
            if time.monotonic() - since > patience:
                return None
        return self._outcome

    def close(self) -> None:
        """Let the other hosts end their ranks: the report is written."""
        if self._outcome is not None:
            self._is_over.clear()
            self._is_reported.set()
            self._is_over.wait(1.0)

    # ---- on the thread

    def _connect(self) -> Store:
        from datetime import timedelta

        from torch.distributed import PrefixStore, TCPStore

        host, port = self._address
        # A plain socket first: torch prints the frames of its stack where nobody answers.
        socket.create_connection(self._address, timeout=2.0).close()
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=2), wait_for_workers=False)
        return PrefixStore(self._prefix, store)

    def _give_sign(self, store: Store) -> None:
        number = store.add("signs", 1)
        store.set(f"sign/{self._number}", str(number))
        self._answered_at = time.monotonic()
        self._signs.append((self._answered_at, number))

    def _measure_silence(self, store: Store, host: int) -> float:
        """Return the seconds, at least, since a host has given its last sign."""
        last = int(store.get(f"sign/{host}"))
        return time.monotonic() - next((at for at, number in self._signs if number > last), time.monotonic())

    def _judge(self, store: Store) -> Judgement:
        assert self._own is not None, "set before the question"
        states, stacks = self._own
        store.set("alarm", "1")
        content = {"states": [state.to_json() for state in states], "stacks": stacks}
        store.set(f"answer/{self._number}", json.dumps(content))
        if store.add("judges", 1) > 1:
            self._wait_for_verdict(store)
            return Judgement(None, states, stacks)
        found, texts = self._wait_for_hosts(store)
        return Judgement(judge(found, self._world_size), found, "\n\n".join(texts))

    def _wait_for_hosts(self, store: Store) -> tuple[list[RankState], list[str]]:
        answers: dict[int, dict[str, object]] = {}
        deadline = time.monotonic() + _ANSWER_SECONDS
        while True:
            settled = 0
            for host in range(1, store.add("hosts", 0) + 1):
                if host not in answers and store.check([f"answer/{host}"]):
                    answers[host] = json.loads(store.get(f"answer/{host}"))
                if host in answers or self._measure_silence(store, host) > _GONE_SECONDS:
                    settled += len(json.loads(store.get(f"ranks/{host}")))
            if settled >= self._world_size or time.monotonic() > deadline:
                states = [RankState.from_json(s) for answer in answers.values() for s in _list(answer["states"])]
                return states, [str(answer["stacks"]) for answer in answers.values() if answer["stacks"]]
            time.sleep(_POLL_SECONDS)
            self._give_sign(store)

    def _wait_for_verdict(self, store: Store) -> None:
        """Keep this host's ranks until the verdict is out: the store may be in one of them, and the end of another
        would look like the cause."""
        deadline = time.monotonic() + 2 * _ANSWER_SECONDS
        with contextlib.suppress(RuntimeError):  # the rank that had the store has ended: it has its verdict
            while time.monotonic() < deadline and not store.check(["judged"]):
                self._give_sign(store)
                time.sleep(_POLL_SECONDS)


def _list(value: object) -> list[dict[str, object]]:
    assert isinstance(value, list), "written by another watcher of this job"
    return value
