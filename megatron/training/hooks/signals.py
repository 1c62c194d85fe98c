# SPDX-License-Identifier: Apache-2.0
"""Signals that are noted the moment they arrive, also while the main thread is in a long call outside of Python."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Collection
from typing import Any

_MOST_SECONDS = 0.2


class SignalWatch:
    """Between `open` and `close`, signals are passed to a function on a separate thread and do nothing else.

    Python runs handlers between two instructions of the main thread, which a collective that waits for a lost peer
    never reaches. What the system calls writes the number of the signal into a pipe at once (signal.set_wakeup_fd).
    """

    def __init__(self, receive: Callable[[signal.Signals], None]) -> None:
        self._receive = receive
        self._handlers: dict[signal.Signals, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._previous_fd = -1
        self._received = threading.Event()

    def open(self, signals: Collection[signal.Signals]) -> None:
        """Begin to watch. Only the main thread may; elsewhere signals keep their meaning."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._pipe = reading, writing = os.pipe()
        os.set_blocking(writing, False)
        self._previous_fd = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        watched = frozenset(signals)
        threading.Thread(target=self._read, args=(reading, watched), name="signals", daemon=True).start()
        # A handler, or the signal would still end the process.
        self._handlers = {number: signal.signal(number, self._await) for number in watched}

    def close(self) -> None:
        """Give signals their former meaning back; harmless when nothing is open."""
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._handlers = {}
        if self._pipe is not None:
            signal.set_wakeup_fd(self._previous_fd)
            os.close(self._pipe[1])  # which ends the thread
            self._pipe = None

    @staticmethod
    def pass_on(number: signal.Signals) -> None:
        """Let the signal do to this process what it does without a handler; from any thread."""
        # Python's function works on the main thread only, which may never listen.
        ctypes.pythonapi.PyOS_setsig(ctypes.c_int(number), ctypes.c_void_p(0))
        os.kill(os.getpid(), number)

    def _await(self, *_: object) -> None:
        # Where the main thread does listen, what it does next comes after the signal. Not for ever: the other thread
        # may be waiting for a lock of the main thread's, to print.
        self._received.wait(_MOST_SECONDS)
        self._received.clear()

    def _read(self, reading: int, watched: frozenset[signal.Signals]) -> None:
        try:
            while content := os.read(reading, 64):
                # An event loop (a notebook's) that listened before still hears of everything.
                if self._previous_fd != -1:
                    with contextlib.suppress(OSError):
                        os.write(self._previous_fd, content)
                for number in content:
                    if number in watched:
                        self._receive(signal.Signals(number))
                        self._received.set()
        finally:
            os.close(reading)
