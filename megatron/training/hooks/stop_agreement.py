# SPDX-License-Identifier: Apache-2.0
"""Agreement of all ranks to end a run after the same iteration when one of them is asked to: by a signal, or by its
clock.

While nobody is asked, a rank only looks into the job's key-value store from time to time; the host never waits for the
device, and no rank for another. Once a request is there, every rank stops for a moment after each step to see whether
all others are there as well. If they are, the run ends here; if not, they go on and meet after one of the next steps:
some have looked too early, or hosts have run ahead of their devices.
"""

from __future__ import annotations

import time

from torch.distributed import PrefixStore, Store

from megatron.core import device
from megatron.core.process_groups_config import Group, rendezvous_store

# A look takes a message to the store and back, some 0.1 ms.
_LOOKS_SHARE = 50
"""A rank looks at most once in so many times the duration of a look: 2 % of its time."""
_MEETING_SECONDS = 1.0
"""Seconds that ranks wait for each other after a step. Those with the same signal come together within milliseconds."""
_PAUSE_SECONDS = 0.005


class StopAgreement:
    """Of one run. One process agrees with itself at once."""

    def __init__(self, world: Group) -> None:
        self.rank, self.size = world.rank(), world.size()
        self._asked: str | None = None
        self._is_known = False
        """Someone has been asked, and this rank knows it."""
        self._step = 0
        self._next_look_at = 0.0
        self._own_store: Store | None = None

    def ask(self, reason: str) -> None:
        """Note that this rank wants the run to end; the first reason counts. Harmless from another thread."""
        self._asked = self._asked or reason

    def look(self) -> str | None:
        """The reason to end the run here; None: go on. Every rank calls this after every step and every save, and all
        get the same answer at the same call."""
        self._step += 1
        if self.size == 1:
            return self._asked
        try:
            store = self._open_store()
            if not self._is_known and not self._learns(store):
                return None
            return self._meet(store)
        # The store has gone with the rank that served it; what they compute together tells the others.
        except RuntimeError:
            return None

    def _open_store(self) -> Store:
        if self._own_store is None:
            store = rendezvous_store()
            # Every rank makes its agreements in the same order, and the store may outlive a run.
            number = store.add(f"megatron/stops/{self.rank}", 1)
            self._own_store = PrefixStore(f"megatron/stop{number}", store)
        return self._own_store

    def _learns(self, store: Store) -> bool:
        """Return whether there is a request by now, of this rank or of another one."""
        began_at = time.monotonic()
        if self._asked is not None:
            store.compare_set("reason", "", self._asked)
            self._is_known = True
        elif began_at >= self._next_look_at:
            self._is_known = store.check(["reason"])
            now = time.monotonic()
            self._next_look_at = now + _LOOKS_SHARE * (now - began_at)
        return self._is_known

    def _meet(self, store: Store) -> str | None:
        """Wait a moment for all ranks at this step; the reason if all have come, None if they will meet later."""
        # A host may be many steps ahead of its device, which is in step with the others: they need not wait before
        # they are as far.
        farthest = int(store.compare_set("farthest", "", str(self._step)))
        if self._step < farthest:
            return None
        if self._step > farthest:
            store.set("farthest", str(self._step))
        device.synchronize()
        present, verdict = f"present/{self._step}", f"verdict/{self._step}"
        deadline = time.monotonic() + _MEETING_SECONDS
        store.add(present, 1)
        while (is_complete := store.add(present, 0) >= self.size) is False and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)
        # The first rank to see that all are there, or that its time is over, decides for all that have come.
        if store.compare_set(verdict, "", "stop" if is_complete else "go on") == b"stop":
            return str(store.get("reason").decode())
        return None
