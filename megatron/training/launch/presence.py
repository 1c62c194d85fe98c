# SPDX-License-Identifier: Apache-2.0
"""Detection of ranks that have ended: every process keeps a port open without serving it, and the system closes it when
the process ends.

A collective that fails says that some peer is gone, not which one. A rank that sees this knocks at the others' ports.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable, Sequence

from torch.distributed import PrefixStore, Store

from megatron.training.launch.launch import Launch

_MOST_RANKS = 1024
"""In larger jobs no rank knocks: all ranks would, at all others."""
_KNOCK_SECONDS = 0.5
# The system takes a moment to close what a killed process had open.
_SEARCH_SECONDS = 2.0
_PAUSE_SECONDS = 0.1


class Presence:
    """Of this process, and what it knows of the others'."""

    def __init__(self, launch: Launch, store: Store) -> None:
        self._launch = launch
        self._store = PrefixStore("presence", store)
        self._port = socket.create_server(("", 0))
        # Forked processes, such as a data loader's, would keep it open when this one is gone.
        os.register_at_fork(after_in_child=self._port.close)
        port = self._port.getsockname()[1]
        self._store.set(f"address/{launch.rank}", f"{_find_own_address(launch)} {port}")

    def close(self) -> None:
        """Count as ended from here on."""
        self._port.close()

    def find_lost_ranks(self) -> list[int]:
        """The ranks that have ended, except ranks that said before that they had lost one themselves; empty where all
        are there, or where it cannot be known."""
        if self._launch.world_size > _MOST_RANKS:
            return []
        others = [rank for rank in range(self._launch.world_size) if rank != self._launch.rank]
        deadline = time.monotonic() + _SEARCH_SECONDS
        try:
            self._store.set(f"leaving/{self._launch.rank}", "")
            addresses = {rank: self._store.get(f"address/{rank}").decode().split() for rank in others}
            while True:
                lost = [rank for rank in self._knock(others, addresses) if not self._store.check([f"leaving/{rank}"])]
                if lost or time.monotonic() > deadline:
                    return lost
                time.sleep(_PAUSE_SECONDS)
        except RuntimeError:
            # The store has gone with the process that served it.
            return [] if self._launch.agent_store or self._launch.rank == 0 else [0]

    def list_ended(self, ranks: Sequence[int]) -> list[int]:
        """Return which of these ranks have ended, in order or not; none where it cannot be known. Takes up to half a
        second for each that does not answer."""
        try:
            return self._knock(ranks, {rank: self._store.get(f"address/{rank}").decode().split() for rank in ranks})
        except RuntimeError:
            return []

    def _knock(self, ranks: Iterable[int], addresses: dict[int, list[str]]) -> list[int]:
        """Return the ranks whose port is closed."""
        lost = []
        for rank in ranks:
            host, port = addresses[rank]
            try:
                with contextlib.suppress(TimeoutError):  # a host that does not answer may only be busy
                    socket.create_connection((host, int(port)), timeout=_KNOCK_SECONDS).close()
            except ConnectionError:
                lost.append(rank)
            except OSError:
                continue
        return lost


def _find_own_address(launch: Launch) -> str:
    """Return where the other processes of the job reach this one."""
    assert launch.master_addr is not None and launch.master_port is not None, "one process has nobody to meet"
    if launch.rank == 0 and not launch.agent_store:
        return launch.master_addr
    with socket.create_connection((launch.master_addr, launch.master_port), timeout=10.0) as connection:
        return str(connection.getsockname()[0])
