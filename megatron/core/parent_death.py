# SPDX-License-Identifier: Apache-2.0
"""A child process ends when its parent does, also when the parent is killed and can no longer say so."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from typing import NoReturn

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h; Python has no name for it
_LOOK_SECONDS = 1.0


def end_with_parent(parent: int) -> None:
    """Called in a child process, with its parent's process id: be killed when the parent ends.

    On Linux by the system, in whatever call the child is; the end of the parent's thread that started it counts.
    """
    if sys.platform != "linux":
        end_with_process(parent)
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may have ended before the line above, of which the system says nothing.
    if os.getppid() != parent:
        _leave()


def end_with_process(other: int) -> None:
    """End when any process of this machine does, given by its id: a thread watches it."""
    threading.Thread(target=_watch, args=(other,), name="watch of another process", daemon=True).start()


def _watch(other: int) -> None:
    try:
        # Ready when the process ends, also before anybody has waited for it.
        select.select([os.pidfd_open(other)], [], [])
    except (AttributeError, OSError):  # not of this system; or there is no such process any more
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.kill(other, 0)
                time.sleep(_LOOK_SECONDS)
    _leave()


def _leave() -> NoReturn:
    os._exit(1)
