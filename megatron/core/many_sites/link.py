# SPDX-License-Identifier: Apache-2.0
"""A connection between two sites: messages of a name, a few numbers and bytes, each of them authenticated.

Both ends prove that they have the key, and every frame carries a keyed hash (HMAC-SHA-256) over its direction, its
number and its content, so that nobody between the sites can add, change, repeat or reorder messages. Nothing is
encrypted: that is the task of the tunnel (WireGuard, IPsec) between the sites. A frame is 8 bytes of length, 32 bytes
of hash, and a part of a message; parts of long messages let short ones pass.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_PART_BYTES = 2**18
_HASH_BYTES = 32
_LENGTH = struct.Struct("!Q")
_GREETING = b"megatron sites 1"


class Message(NamedTuple):
    """Message of one site to another."""

    kind: str
    fields: Mapping[str, Any]
    """Plain numbers and texts."""
    payload: bytes = b""


class LinkError(OSError):
    """The other end is not who it should be, or says what it should not."""


class SiteLink:
    """Sends messages in a separate thread, and hands what arrives to `receive`; `lost` is called once, at the end.

    The constructor makes the handshake on a connected socket. is_caller: this end has opened the connection. most:
    bytes of the longest message that is accepted. Raises LinkError when the other end has another key.
    """

    def __init__(self, connection: socket.socket, key: bytes, *, is_caller: bool, most: int) -> None:
        self._socket, self._most = connection, most
        self._key = _agree(connection, key, is_caller)
        self._directions = (b"c", b"a") if is_caller else (b"a", b"c")
        self._sent = self._received = 0
        self._urgent: deque[tuple[bytes, bool]] = deque()
        self._waiting: deque[tuple[bytes, bool]] = deque()
        self._change = threading.Condition()
        self._is_open = True
        self.bytes_sent = 0
        """Of all frames so far."""

    def start(self, receive: Callable[[Message], None], lost: Callable[[], None]) -> None:
        """Begin to send and to receive."""
        self._lost = lost
        for work in (self._send_all, lambda: self._receive_all(receive)):
            threading.Thread(target=self._guard, args=(work,), name="site link", daemon=True).start()

    def send(self, message: Message, *, urgent: bool = False) -> None:
        """Queue a message. urgent: it passes longer ones whose parts are on their way. Never blocks, never raises."""
        head = json.dumps([message.kind, message.fields]).encode()
        whole = struct.pack("!I", len(head)) + head + message.payload
        parts = [whole[first : first + _PART_BYTES] for first in range(0, len(whole), _PART_BYTES)]
        with self._change:
            queue = self._urgent if urgent else self._waiting
            queue.extend((part, number + 1 == len(parts)) for number, part in enumerate(parts))
            self._change.notify_all()

    def close(self) -> None:
        """End the connection, after what is queued has been sent where that takes less than a second."""
        with self._change:
            self._change.wait_for(lambda: not (self._urgent or self._waiting) or not self._is_open, timeout=1.0)
        self._end()

    def _end(self) -> None:
        with self._change:
            was_open, self._is_open = self._is_open, False
            self._change.notify_all()
        if was_open:
            for act in (lambda: self._socket.shutdown(socket.SHUT_RDWR), self._socket.close):
                with contextlib.suppress(OSError):
                    act()
            self._lost()

    def _guard(self, work: Callable[[], None]) -> None:
        with contextlib.suppress(OSError, ValueError, struct.error):
            work()
        self._end()

    def _send_all(self) -> None:
        while True:
            # The lock is only for the queues: a slow line must not keep anybody from adding to them.
            with self._change:
                self._change.wait_for(lambda: self._urgent or self._waiting or not self._is_open)
                if not self._is_open:
                    return
                lane = b"u" if self._urgent else b"w"
                part, is_last = (self._urgent or self._waiting)[0]
            body = lane + (b"1" if is_last else b"0") + part
            frame = _LENGTH.pack(len(body)) + self._sign(self._directions[0], self._sent, body) + body
            self._socket.sendall(frame)
            self._sent += 1
            with self._change:
                (self._urgent if lane == b"u" else self._waiting).popleft()
                self.bytes_sent += len(frame)
                self._change.notify_all()

    def _receive_all(self, receive: Callable[[Message], None]) -> None:
        halves: dict[bytes, bytearray] = {b"u": bytearray(), b"w": bytearray()}
        while True:
            (length,) = _LENGTH.unpack(_read(self._socket, _LENGTH.size))
            # Before anything is read of it: a stranger's length must not become memory.
            if not 2 <= length <= _PART_BYTES + 2:
                raise LinkError(f"a frame of {length} bytes")
            sign, body = _read(self._socket, _HASH_BYTES), _read(self._socket, length)
            if not hmac.compare_digest(sign, self._sign(self._directions[1], self._received, body)):
                raise LinkError("a frame with another hash")
            self._received += 1
            half = halves[body[:1]]
            half += body[2:]
            if len(half) > self._most:
                raise LinkError(f"a message of more than {self._most} bytes")
            if body[1:2] == b"1":
                (size,) = struct.unpack_from("!I", half)
                kind, fields = json.loads(bytes(half[4 : 4 + size]))
                receive(Message(kind, fields, bytes(half[4 + size :])))
                halves[body[:1]] = bytearray()

    def _sign(self, direction: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, direction + _LENGTH.pack(number) + body, "sha256")


def _agree(connection: socket.socket, key: bytes, is_caller: bool) -> bytes:
    """Exchange random numbers and proofs of the key, and return the key of this connection."""
    own = secrets.token_bytes(_HASH_BYTES)
    connection.sendall(_GREETING + own)
    theirs = _read(connection, len(_GREETING) + _HASH_BYTES)
    if theirs[: len(_GREETING)] != _GREETING:
        raise LinkError("what answers is no site of a training")
    theirs = theirs[len(_GREETING) :]
    session = hmac.digest(key, own + theirs if is_caller else theirs + own, "sha256")
    # Each end signs its role, so that an answer cannot be sent back as a proof.
    roles = (b"caller", b"answerer") if is_caller else (b"answerer", b"caller")
    connection.sendall(hmac.digest(session, roles[0], "sha256"))
    if not hmac.compare_digest(_read(connection, _HASH_BYTES), hmac.digest(session, roles[1], "sha256")):
        raise LinkError("the other site has another key")
    return session


def _read(connection: socket.socket, count: int) -> bytes:
    content = bytearray()
    while len(content) < count:
        more = connection.recv(min(count - len(content), 2**20))
        if not more:
            raise ConnectionError("the other end has closed the connection")
        content += more
    return bytes(content)


def digest_of(parts: Mapping[str, Any]) -> str:
    """A short text that is equal where settings are."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
