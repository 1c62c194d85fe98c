# SPDX-License-Identifier: Apache-2.0
"""A process's place in one beginning of a job that begins again inside its processes, and what it holds meanwhile."""

from __future__ import annotations

import contextlib
import functools
import os
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
    """Of this beginning: the rank is that of the layout, which another process may have had before."""
    store: Store
    """Keys of this beginning alone."""
    patience_seconds: float
    """Seconds that ranks wait for each other before they begin."""
    cut: Callable[[], None] = lambda: None
    """Function that ends the connections of this process's groups: whoever waits at one has an error."""
    _taken: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def give_back_later(self, action: Callable[[], None]) -> None:
        """Call it when the seat is left; the last one first."""
        self._taken.callback(action)

    def tell_environment(self) -> None:
        """Set RANK and WORLD_SIZE, until the seat is left, for whoever reads them there: the process may have another
        place than its launcher gave it."""
        for name, number in (("RANK", self.launch.rank), ("WORLD_SIZE", self.launch.world_size)):
            before = os.environ.get(name)
            self.give_back_later(functools.partial(_set_variable, name, before))
            _set_variable(name, str(number))

    def leave(self) -> None:
        """Leave the groups, which peers may have left before; nothing that the process keeps knows of them then."""
        # Peers that wait for this process have an error, too.
        self.cut()
        self._taken.close()
        ProcessGroupCollection.clear_current()
        if dist.is_initialized():
            dist.destroy_process_group()


def _set_variable(name: str, value: str | None) -> None:
    """Of the environment; none where the value is None."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
