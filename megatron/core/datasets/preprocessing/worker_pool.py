# SPDX-License-Identifier: Apache-2.0
"""A pool of worker processes that is watched: a worker that dies ends the job with a sentence, never with a hang.

Each worker has one pipe and at most two items, one in work and one that waits, so memory stays bounded and the
parent always knows who has what. A worker ends when its parent does.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from megatron.core.errors import StorageError
from megatron.core.parent_death import end_with_parent

Item = TypeVar("Item")
Result = TypeVar("Result")

_ENDING = (signal.SIGINT, signal.SIGTERM)
_ITEMS_PER_WORKER = 2
_WINDOW_PER_WORKER = 4
"""Items per worker that may be finished ahead of the one that the caller waits for."""


class WorkerPool(Generic[Item, Result]):
    """Runs `work` on items in up to `count` processes, started when there is something for them to do.

    `work` is inherited by fork where that is safe (Linux), else pickled. Use the pool as a context manager.
    """

    def __init__(self, work: Callable[[Item], Result], count: int) -> None:
        self._work = work
        self._count = count
        self._context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        self._workers: list[_Worker] = []

    def __enter__(self) -> WorkerPool[Item, Result]:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.join()

    def map_ordered(self, items: Iterable[Item]) -> Iterator[Result]:
        """The results in the order of the items. What `work` or `items` raises is raised here, when its turn comes.

        Raises StorageError when a worker dies.
        """
        source = iter(items)
        ready: deque[tuple[int, Item]] = deque()  # read ahead while the workers are busy
        outcomes: dict[int, _Outcome] = {}
        taken = returned = 0
        exhausted = False
        failure: Exception | None = None  # of reading the items; earlier items come first
        while True:
            while not exhausted and len(ready) < self._count and taken < returned + _WINDOW_PER_WORKER * self._count:
                try:
                    ready.append((taken, next(source)))
                    taken += 1
                except StopIteration:
                    exhausted = True
                except Exception as error:
                    exhausted, failure = True, error
                self._hand_out(ready)
                self._collect(outcomes, timeout=0)
            while returned in outcomes:
                yield outcomes.pop(returned).result()
                returned += 1
            if exhausted and returned == taken:
                if failure is not None:
                    raise failure
                return
            if not self._hand_out(ready) and returned not in outcomes:
                self._collect(outcomes, timeout=None)

    def _hand_out(self, ready: deque[tuple[int, Any]]) -> bool:
        """Give one item to a new worker or the least busy one; False when there is no item or nobody to take it."""
        if not ready:
            return False
        worker = min(self._workers, key=lambda worker: len(worker.items), default=None)
        if worker is None or (worker.items and len(self._workers) < self._count):
            worker = self._start()
        if len(worker.items) == _ITEMS_PER_WORKER:
            return False
        worker.give(*ready.popleft())
        return True

    def _collect(self, outcomes: dict[int, _Outcome], timeout: float | None) -> None:
        """Receive what workers have finished; wait for one if `timeout` is None."""
        busy = {worker.connection: worker for worker in self._workers if worker.items}
        if not busy:
            return
        for connection in wait(list(busy), timeout):
            number, outcome = busy[connection].receive()
            outcomes[number] = outcome

    def _start(self) -> _Worker:
        number = len(self._workers)
        inherited = [worker.connection for worker in self._workers]
        try:
            with _signals_wait():
                worker = _Worker(self._context, self._work, number, inherited)
                self._workers.append(worker)
        except OSError as error:
            raise StorageError(
                f"cannot start preprocessing worker {number}: {error.strerror}; use fewer --workers"
            ) from error
        return worker


class _Outcome:
    """Result of a worker for an item: a value, or the exception to raise."""

    def __init__(self, value: Any, error: BaseException | None) -> None:
        self._value = value
        self._error = error

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


class _Worker:
    """One process, seen from the parent."""

    def __init__(self, context: Any, work: Callable[[Any], Any], number: int, inherited: list[Connection]) -> None:
        self.number = number
        self.items: deque[int] = deque()
        """Numbers of the items it has, in the order in which it works on them."""
        self.connection, child = context.Pipe()
        # A forked child holds copies of the parent's ends; unless it closes them, nobody sees the end of a pipe.
        close = [*inherited, self.connection] if context.get_start_method() == "fork" else []
        self.process = context.Process(
            target=_serve, args=(child, work, close, os.getpid()), daemon=True, name=f"preprocess-{number}"
        )
        try:
            self.process.start()
        except OSError:
            self.connection.close()
            raise
        finally:
            child.close()

    def give(self, number: int, item: Any) -> None:
        self.items.append(number)
        try:
            self.connection.send(item)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._died() from error

    def receive(self) -> tuple[int, _Outcome]:
        assert self.items, f"worker {self.number} has nothing to do"
        try:
            value, error = self.connection.recv()
        except (EOFError, OSError) as broken:  # OSError: the end came in the middle of a message
            raise self._died() from broken
        return self.items.popleft(), _Outcome(value, error)

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.close()
        if self.items:
            self.process.terminate()

    def join(self) -> None:
        self.process.join(2)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def _died(self) -> StorageError:
        self.process.join(2)
        code = self.process.exitcode
        if code is not None and code < 0:
            how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
            hint = "; the machine may be out of memory: use fewer --workers" if -code == signal.SIGKILL else ""
        else:
            how, hint = f"ended with exit code {code}", ""
        return StorageError(
            f"preprocessing worker {self.number} (process {self.process.pid}) {how}; no output was written{hint}"
        )


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Ctrl-C and SIGTERM come after the block. What a handler raises during a fork, Python may report and forget (in a
    function that runs after each fork, such as logging's), or it leaves a process behind that nobody knows of.

    Handlers only take note, since a signal that this thread holds back may reach another one. The new process, which
    has one thread, inherits that signals are held back until it is ready for them.
    """
    if threading.current_thread() is not threading.main_thread():  # handlers run in the main thread only
        yield
        return
    arrived: list[int] = []
    handlers = {number: signal.getsignal(number) for number in _ENDING}
    for number in _ENDING:
        signal.signal(number, lambda number, frame: arrived.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for missed in dict.fromkeys(arrived):
            signal.raise_signal(missed)


def _serve(connection: Connection, work: Callable[[Any], Any], close: list[Connection], parent: int) -> None:
    """Serve as a worker: take an item, work, send the outcome, until its pipe ends."""
    end_with_parent(parent)  # also in the middle of an item
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    for other in close:
        other.close()
    waiting: queue.Queue[Any] = queue.Queue(maxsize=1)
    threading.Thread(target=_receive, args=(connection, waiting), daemon=True).start()
    while (item := waiting.get()) is not _END:
        try:
            outcome: tuple[Any, BaseException | None] = work(item), None
        except Exception as error:
            error.add_note("in a preprocessing worker:\n" + traceback.format_exc())
            outcome = None, error
        del item
        try:
            connection.send(outcome)
        except (BrokenPipeError, ConnectionResetError):
            return


def _receive(connection: Connection, waiting: queue.Queue[Any]) -> None:
    """Take the next item while the worker is busy with one, so that it need not wait for it afterwards."""
    with contextlib.suppress(EOFError, OSError):  # OSError: the parent died in the middle of an item
        while True:
            waiting.put(connection.recv())
    waiting.put(_END)


_END = object()
