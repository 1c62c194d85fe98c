# SPDX-License-Identifier: Apache-2.0
"""Meeting of the equal ranks of all sites: the first site's ranks listen, the others' call them.

    site 1, rank 3 ----.
    site 2, rank 3 -----+--> site 0, rank 3

Ranks of one site never wait here for each other: what has come, and who is there, is asked from outside.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.errors import ConfigError
from megatron.core.many_sites.link import LinkError, Message, SiteLink

_RETRY_SECONDS = 0.5
_HANDSHAKE_SECONDS = 10.0
_QUIET_SECONDS = 2.0
"""Wait that is not worth a word."""


class SiteExchange:
    """Messages between this rank and its equals of the other sites.

    site: this one's number; the first listens. sites: how many there are. most: bytes of the longest message. settings:
    of what both ends must have the same (`digest_of`).
    """

    def __init__(self, site: int, sites: int, key: bytes, *, most: int, settings: str) -> None:
        self.site, self.sites = site, sites
        self.ended: set[int] = set()
        """Sites that have said that their run is over."""
        self.problem: str | None = None
        """Reason for which a site was turned away, or this one by the first, if that was so."""
        self._key, self._most, self.settings = key, most, settings
        self._links: dict[int, SiteLink] = {}
        self._inbox: dict[tuple[int, str, str], Message] = {}
        self._change = threading.Condition()
        self._is_closed = False
        self._sent_before = 0
        self._listener: socket.socket | None = None
        self.meeting_point: Any = None
        """Kept as long as the exchange: others may still look there for this site."""

    def listen(self, host: str, port: int) -> int:
        """Accept the other sites at this address, and no other one, and return the port. Raises ConfigError."""
        try:
            self._listener = socket.create_server((host, port))
        except OSError as error:
            raise ConfigError(
                f"the first site cannot listen at {host}:{port} ({error.strerror or error}); give --diloco-address an "
                "address of its machine, and a port that is free, as many after it as the site has ranks"
            ) from error
        threading.Thread(target=self._accept_all, args=(self._listener,), name="sites", daemon=True).start()
        return int(self._listener.getsockname()[1])

    def meet(self, sites: set[int], seconds: float, say: Callable[[str], None]) -> None:
        """Wait until these sites are connected, for some seconds at most. Raises ConfigError where the first site turns
        this one away."""

        def is_settled() -> bool:
            # A stranger, or a wrong site, must not end the first one, which others may be in step with.
            return sites <= self.connected or (self.site > 0 and self.problem is not None)

        began_at = time.monotonic()
        if not self.wait_until(is_settled, began_at + min(seconds, _QUIET_SECONDS)):
            say(f"waiting for site {self._name(sites - self.connected)}, at most {seconds:g} s")
            self.wait_until(is_settled, began_at + seconds)
        if sites <= self.connected:
            return
        if self.site > 0 and self.problem is not None:
            raise ConfigError(f"site {self.site} was turned away: {self.problem}")
        say(f"warning: site {self._name(sites - self.connected)} has not come within {seconds:g} s; going on without")

    @staticmethod
    def _name(sites: set[int]) -> str:
        return ", ".join(map(str, sorted(sites)))

    def call(self, host: str, port: int) -> None:
        """Connect to the first site, and again whenever the connection is lost."""
        threading.Thread(target=self._call_again_and_again, args=(host, port), name="sites", daemon=True).start()

    @property
    def connected(self) -> set[int]:
        """Sites that are connected now."""
        with self._change:
            return set(self._links)

    @property
    def bytes_sent(self) -> int:
        """Of all connections so far."""
        with self._change:
            return self._sent_before + sum(link.bytes_sent for link in self._links.values())

    def send(
        self, site: int, kind: str, topic: str, payload: bytes = b"", *, urgent: bool = False, **fields: Any
    ) -> None:
        """Queue a message for a site; nothing where it is not connected. topic: what it is about."""
        with self._change:
            link = self._links.get(site)
        if link is not None:
            link.send(Message(kind, {"topic": topic, **fields}, payload), urgent=urgent)

    def peek(self, site: int, kind: str, topic: str) -> Message | None:
        """The newest message of this kind from a site about a topic; it stays."""
        with self._change:
            return self._inbox.get((site, kind, topic))

    def take(self, site: int, kind: str, topic: str) -> Message | None:
        """The same; it is gone then."""
        with self._change:
            return self._inbox.pop((site, kind, topic), None)

    def wait_until(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait until something that messages or connections bring about, at most until a time of time.monotonic();
        returns the condition."""
        with self._change:
            return self._change.wait_for(condition, timeout=max(0.0, deadline - time.monotonic()))

    def close(self, *, is_done: bool) -> None:
        """End all connections. is_done: tell the others that this site's run is over."""
        with self._change:
            self._is_closed = True
            links = list(self._links.values())
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.close()
        for link in links:
            if is_done:
                link.send(Message("bye", {}))
            link.close()

    def _accept_all(self, listener: socket.socket) -> None:
        while not self._is_closed:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            # In a thread: a stranger that says nothing must not keep the sites out.
            threading.Thread(target=self._meet, args=(connection, False), daemon=True).start()

    def _call_again_and_again(self, host: str, port: int) -> None:
        while not self._is_closed:
            with self._change:
                is_connected = 0 in self._links
            if not is_connected:
                with contextlib.suppress(OSError):
                    self._meet(socket.create_connection((host, port), timeout=_HANDSHAKE_SECONDS), True)
            with self._change:
                self._change.wait_for(lambda: self._is_closed, timeout=_RETRY_SECONDS)

    def _meet(self, connection: socket.socket, is_caller: bool) -> None:
        connection.settimeout(_HANDSHAKE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            link = SiteLink(connection, self._key, is_caller=is_caller, most=self._most)
        except OSError as error:
            if isinstance(error, LinkError):
                self._note_problem(str(error))
            connection.close()
            return
        connection.settimeout(None)
        met = [0 if is_caller else -1]

        def receive(message: Message) -> None:
            if message.kind == "hello":
                self._greet(link, met, message.fields)
            elif met[0] >= 0:
                with self._change:
                    if message.kind == "bye":
                        self.ended.add(met[0])
                    self._inbox[met[0], message.kind, str(message.fields.get("topic"))] = message
                    self._change.notify_all()

        def lose() -> None:
            with self._change:
                if self._links.get(met[0]) is link:
                    del self._links[met[0]]
                    self._sent_before += link.bytes_sent
                self._change.notify_all()

        link.start(receive, lose)
        link.send(Message("hello", {"site": self.site, "sites": self.sites, "settings": self.settings}), urgent=True)

    def _greet(self, link: SiteLink, met: list[int], fields: Mapping[str, Any]) -> None:
        site = fields.get("site")
        if (fields.get("sites"), fields.get("settings")) != (self.sites, self.settings) or site == self.site:
            self._note_problem(
                f"site {site} has another model, or other --diloco- flags, than site {self.site}; start all sites with "
                "the same command, but for --datacenter-id and paths"
            )
            link.close()
            return
        with self._change:
            met[0] = int(str(site))
            old, self._links[met[0]] = self._links.get(met[0]), link
            # What a site said before it was lost is of an earlier life.
            for key in [key for key in self._inbox if key[0] == met[0]]:
                del self._inbox[key]
            self._change.notify_all()
        if old is not None:
            old.close()

    def _note_problem(self, text: str) -> None:
        with self._change:
            self.problem = text
            self._change.notify_all()
