# SPDX-License-Identifier: Apache-2.0
"""A process's place in one beginning of a job that begins again inside its processes, and what it holds meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed import Store

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.launch.launch import Launch


@dataclass
class Seat:
    """One place; `leave` gives back everything that was taken for it, in whatever state that is."""

    launch: Launch
    """Of this beginning: the rank is a place in the layout, which another process may have had before."""
    store: Store
    """Keys of this beginning only."""
    patience_seconds: float
    """Seconds that ranks wait for each other before they begin."""
    cut: Callable[[], None] = lambda: None
    """Function that closes the connections of this process's groups: calls that wait on one fail."""
    _taken: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def give_back_later(self, action: Callable[[], None]) -> None:
        """Call it when the seat is left; the last one first."""
        self._taken.callback(action)

    def leave(self) -> None:
        """Leave the groups, which peers may have left before; nothing that the process keeps knows of them then."""
        # Peers that wait for this process have an error, too.
        self.cut()
        self._taken.close()
        ProcessGroupCollection.clear_current()
        if dist.is_initialized():
            dist.destroy_process_group()
