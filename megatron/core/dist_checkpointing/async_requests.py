# SPDX-License-Identifier: Apache-2.0
"""Saving in the background with upstream's names, for users' training loops.

queue = AsyncCallsQueue()
request = dist_checkpointing.save(state, "checkpoint", async_sharded_save=True)
queue.schedule_async_request(request)            # takes the snapshot; training goes on
queue.maybe_finalize_async_calls()               # in each step, on all processes
queue.close()                                    # at the end: waits
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.dist_checkpointing.agreement import on_every_rank
from megatron.core.dist_checkpointing.async_save import AsyncSaver, SaveResult
from megatron.core.dist_checkpointing.writer_process import WriterProcess
from megatron.core.errors import ConfigError
from megatron.core.process_groups_config import Group


class AsyncRequest:
    """A save that is yet to be made: nothing of the tensors is copied before it is scheduled."""

    def __init__(self, start: Callable[[AsyncSaver], None], group: Group) -> None:
        """start: begins the save on a saver; every process of `group` calls it."""
        self.start, self.group = start, group
        self.finalize_fns: list[Callable[[], Any]] = []
        """Called on every process once the checkpoint is visible."""
        self.is_scheduled = False

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Call this, too, once the checkpoint is visible. Raises ConfigError when the save has begun."""
        if self.is_scheduled:
            raise ConfigError("add_finalize_fn() comes before schedule_async_request(): the save has begun")
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Save and wait for it; then call the finalize functions. Raises StorageError."""
        queue = AsyncCallsQueue()
        queue.schedule_async_request(self)
        queue.close()


class AsyncCallsQueue:
    """Saves under way, one at a time; all processes call its methods at the same places of their program."""

    def __init__(self, persistent: bool = False) -> None:
        """persistent: a separate process writes; otherwise a thread does."""
        self._saver = AsyncSaver(WriterProcess() if persistent else None)
        self._request: AsyncRequest | None = None
        self._finished: SaveResult | None = None
        self._calls = 0

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Take the snapshot and begin to write; returns the number of the save. The tensors may then change.

        A save that is under way is waited for. Raises StorageError, of that one or where this one cannot begin.
        """
        self.maybe_finalize_async_calls(blocking=True)
        if async_request.is_scheduled:
            raise ConfigError("this request has been scheduled before; ask dist_checkpointing.save() for another one")
        async_request.is_scheduled = True
        async_request.start(self._saver)
        self._request = async_request
        self._calls += 1
        return self._calls - 1

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """The number of the save that all processes now know to be complete, whose finalize functions were called;
        nothing while there is none.

        blocking: wait for it. no_dist: do not ask the others; for processes that ask at different moments; finalize
        functions must then not communicate. Raises StorageError, on every process, when the save has failed.
        """
        request = self._request
        if request is None:
            return []
        if self._finished is None:
            self._finished = self._saver.wait() if blocking else self._saver.poll()
        is_done = self._finished is not None
        # Only together: a finalize function may be collective.
        if not (is_done if no_dist else all(on_every_rank(request.group, lambda: is_done))):
            return []
        outcome, self._finished, self._request = self._finished, None, None
        assert outcome is not None
        outcome.check()
        for finalize in request.finalize_fns:
            finalize()
        return [self._calls - 1]

    def get_num_unfinalized_calls(self) -> int:
        """0, or 1 while a save is under way."""
        return int(self._request is not None)

    def close(self, abort: bool = False) -> None:
        """Wait for the save under way, and give memory and process back; the queue can be used again.

        abort: of upstream's signature; what was begun is always finished.
        """
        try:
            self.maybe_finalize_async_calls(blocking=True)
        finally:
            self._saver.close()
