# SPDX-License-Identifier: Apache-2.0
"""Outer steps whose exchange the package torchft makes, in place of exchange.py: a separate server (its lighthouse)
counts the sites that are there, gloo sums what they have learnt, and a site that is behind gets the outer state from
another over HTTP.

Nothing of that is authenticated or encrypted, values are float32, and logged losses are one site's.
"""

from __future__ import annotations

import importlib
import time
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from megatron.core.errors import ConfigError
from megatron.core.many_sites.outer_optimizer import OuterOptimizer, OuterSettings
from megatron.core.many_sites.pending import Pending, Position
from megatron.core.optimizer.megatron_optimizer import MegatronOptimizer


class TorchftOuterOptimizer(OuterOptimizer):
    """The outer steps of this process's part of the model, in those quorums that torchft forms.

    site: this one's number. lighthouse: address of torchft's server, `http://HOST:PORT`. store: (host, port) of the
    store that the ranks of this site share, and the other sites reach; without a port, one process opens one there.
    Raises ConfigError where the package is missing.
    """

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        settings: OuterSettings,
        site: int,
        lighthouse: str,
        store: tuple[str, int | None],
    ) -> None:
        super().__init__(optimizer, settings, None, leads=False)
        try:
            package: Any = importlib.import_module("torchft")
        except ImportError as error:
            raise ConfigError(
                f"--diloco-backend torchft needs the package torchft ({error}); install it, or leave the flag out: "
                "the exchange of this project needs no package"
            ) from error
        host, port = store
        if port is None:
            # Kept as long as this: others meet there.
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
            port = self._store.port
        limit = timedelta(seconds=settings.timeout_seconds)
        self._place, self._theirs = Position(0, 0), Position(0, 0)
        self._works: dict[int, list[Any]] = {}
        # Weights are equal at first, and a state that is loaded belongs before what is to be exchanged.
        self._manager = package.Manager(
            pg=package.ProcessGroupGloo(timeout=limit), load_state_dict=self._take_theirs, state_dict=self._give_ours,
            min_replica_size=settings.min_replicas, use_async_quorum=False, init_sync=False, timeout=limit,
            quorum_timeout=limit, rank=self.world.rank(), world_size=self.world.size(), store_addr=host,
            store_port=port, lighthouse_addr=lighthouse, replica_id=f"site_{site}",
        )  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume: the quorum counts outer steps, too."""
        super().load_state_dict(state)
        self._manager.load_state_dict({"step": self.version, "batches_committed": 0})

    def close(self, *, is_done: bool = True) -> None:
        """Leave the quorum."""
        self._manager.shutdown(wait=False)

    def _begin(self, fragment: int, now: Position) -> Pending:
        self._place, began_at = now, time.monotonic()
        works: list[Any] | None = []
        try:
            self._manager.start_quorum()
        except (RuntimeError, TimeoutError):  # fewer sites than must be there, or no server
            works = None
        self.waited_seconds += time.monotonic() - began_at
        pending = super()._begin(fragment, now)
        if works is None:
            pending.is_over = True
            return pending
        for share, delta in zip(self._fragments[fragment], pending.deltas, strict=True):
            works += [self._manager.allreduce(delta)] if share.is_exchanged else []
        self._works[fragment] = works
        return pending

    def _receive(self, pending: Pending) -> Position | None:
        if pending.is_over:
            return None
        began_at = time.monotonic()
        pending.is_over = True
        for work in self._works.pop(pending.fragment):
            work.wait()
        if self._manager.should_commit():
            self.version += 1
            shares = self._fragments[pending.fragment]
            pending.means = [self._share_out(share, mean) for share, mean in zip(shares, pending.deltas, strict=True)]
        self.waited_seconds += time.monotonic() - began_at
        return self._theirs

    def _give_ours(self) -> dict[str, Any]:
        return {"state": self._dump(), "version": self.version, "place": list(self._place)}

    def _take_theirs(self, theirs: dict[str, Any]) -> None:
        self._load(theirs["state"], theirs["version"])
        self._theirs = Position(*theirs["place"])
