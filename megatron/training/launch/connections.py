# SPDX-License-Identifier: Apache-2.0
"""Connections of gloo's groups, which a rank that has failed cuts so that peers that wait for it meet the failure at
once. Aborting or destroying a group does not close them as long as a model refers to it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_Connection = tuple[int, str]
"""File descriptor, and the socket that it is of, which tells it from a later one with the same number."""


class Connections:
    """Sockets that were opened while `noting` was in force. Empty where the system does not list them (no /proc)."""

    def __init__(self) -> None:
        self._noted: set[_Connection] = set()

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note what is opened inside of it."""
        before = _list_sockets()
        yield
        self._noted |= _list_sockets() - before

    def cut(self) -> None:
        """Close them: a call that waits on one, here or at its other end, fails."""
        for descriptor, _ in self._noted & _list_sockets():
            # A peer may have ended it already.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                # gloo takes an error of the socket that listens for a reason to abort the process.
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    connection.shutdown(socket.SHUT_RDWR)


def _list_sockets() -> set[_Connection]:
    found = set()
    for entry in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            target = os.readlink(entry)
            if target.startswith("socket:"):
                found.add((int(entry.name), target))
    return found
