# SPDX-License-Identifier: Apache-2.0
"""Hosts on this machine, and a network between them that delays, loses, and can be cut. It needs root on Linux.

    with EmulatedNetwork(2) as network:
        network.link = Link(delay_seconds=0.05, loss=0.01)
        ranks = [start(flags, RANK=str(rank), **network.variables(rank)) for rank in range(2)]
        network.cut = {(0, 1), (1, 0)}

Each host is a network namespace; the packets of its one device come to this process, which hands them on.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

NAMESPACE = "TEST_NETWORK_NAMESPACE"
"""Variable of a program (programs.py) that is to run on a host of the network: the file of its namespace."""
DEVICE = "tun0"
_CLONE_NEWNET = 0x40000000
# From linux/if_tun.h and linux/sockios.h.
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x1, 0x1000
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFTXQLEN = 0x8914, 0x8916, 0x891C, 0x8943
_IFF_UP, _IFF_RUNNING = 0x1, 0x40
_LONGEST_QUEUE_SECONDS = 0.5
"""A packet that would wait longer for a link of limited speed is lost, as in a router."""


@dataclass(frozen=True)
class Link:
    """From each host to each other one."""

    delay_seconds: float = 0.0
    jitter_seconds: float = 0.0
    """Up to so much more, which changes the order of packets."""
    loss: float = 0.0
    """Share of packets."""
    bytes_per_second: float | None = None
    """Of what a host sends; None: no limit."""


class EmulatedNetwork:
    """Hosts 10.88.0.1, 10.88.0.2, ..."""

    def __init__(self, hosts: int, link: Link | None = None) -> None:
        self.link = link or Link()
        self.cut: set[tuple[int, int]] = set()
        """(from, to): nothing comes through."""
        self.sent_bytes = [0] * hosts
        """By host."""
        self._stack = contextlib.ExitStack()
        self._hosts = [self._start_host(host) for host in range(hosts)]
        self._ended = threading.Event()
        self._relay = threading.Thread(target=self._hand_on, name="network", daemon=True)
        self._relay.start()

    def __enter__(self) -> EmulatedNetwork:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._relay.join()
        self._stack.close()

    @staticmethod
    def address(host: int) -> str:
        return f"10.88.0.{host + 1}"

    def variables(self, host: int) -> dict[str, str]:
        """Environment of a rank on the host; the first host has the store."""
        place = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(host), "MASTER_ADDR": self.address(0)}
        return place | {"GLOO_SOCKET_IFNAME": DEVICE, NAMESPACE: f"/proc/{self._hosts[host][0]}/ns/net"}

    def _start_host(self, host: int) -> tuple[int, int]:
        """(process, packets of its device)."""
        ours, theirs = socket.socketpair()
        self._stack.enter_context(ours)
        with theirs:
            program = [sys.executable, "-S", __file__, self.address(host), str(theirs.fileno())]
            holder = subprocess.Popen(["unshare", "--net", *program], pass_fds=[theirs.fileno()])
        # It ends when this end of the connection is closed.
        self._stack.callback(holder.wait)
        self._stack.callback(ours.close)
        content, files, _, _ = socket.recv_fds(ours, 1, 1)
        assert content, "namespaces of the network cannot be had"
        self._stack.callback(os.close, files[0])
        return holder.pid, files[0]

    def _hand_on(self) -> None:
        devices = {device: host for host, (_, device) in enumerate(self._hosts)}
        coming: list[tuple[float, int, int, bytes]] = []
        numbers = itertools.count()
        free_at = [0.0] * len(self._hosts)
        while not self._ended.is_set():
            wait = min(0.05, max(0.0, coming[0][0] - time.monotonic())) if coming else 0.05
            for device in select.select(list(devices), [], [], wait)[0]:
                for packet in _read_packets(device):
                    host, target = devices[device], packet[19] - 1
                    # Of IPv6 nothing is handed on.
                    is_ours = packet[0] >> 4 == 4 and 0 <= target < len(self._hosts)
                    arrives_at = self._send(host, target, len(packet), free_at) if is_ours else None
                    if arrives_at is not None:
                        heapq.heappush(coming, (arrives_at, next(numbers), target, packet))
            while coming and coming[0][0] <= time.monotonic():
                _, _, target, packet = heapq.heappop(coming)
                with contextlib.suppress(BlockingIOError):
                    os.write(self._hosts[target][1], packet)

    def _send(self, host: int, target: int, size: int, free_at: list[float]) -> float | None:
        """The moment at which a packet arrives; None for one that is lost."""
        self.sent_bytes[host] += size
        link, now = self.link, time.monotonic()
        if (host, target) in self.cut or random.random() < link.loss:
            return None
        leaves_at = now
        if link.bytes_per_second is not None:
            leaves_at = max(now, free_at[host]) + size / link.bytes_per_second
            if leaves_at - now > _LONGEST_QUEUE_SECONDS:
                return None
            free_at[host] = leaves_at
        return leaves_at + link.delay_seconds + random.random() * link.jitter_seconds


def _read_packets(device: int) -> Iterator[bytes]:
    with contextlib.suppress(BlockingIOError):
        for _ in range(64):
            yield os.read(device, 65536)


def enter_namespace(path: str) -> None:
    """Make this process, which has one thread, a program of that network namespace."""
    file = os.open(path, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(file, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns", path)
    os.close(file)


def can_emulate() -> bool:
    """Return whether this machine allows it."""
    tries = ["unshare", "--net", "test", "-w", "/dev/net/tun"]
    try:
        return os.geteuid() == 0 and subprocess.run(tries, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def hold_host(address: str, connection: socket.socket) -> None:
    """Be a host: make its device, give it away, and wait until nobody needs the host."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:

        def set_up(request: int, device: str, content: bytes) -> None:
            fcntl.ioctl(control, request, struct.pack("16s24s", device.encode(), content))

        for device, own, mask in (("lo", "127.0.0.1", "255.0.0.0"), (DEVICE, address, "255.255.255.0")):
            for request, value in ((_SIOCSIFADDR, own), (_SIOCSIFNETMASK, mask)):
                set_up(request, device, struct.pack("=H2x4s", socket.AF_INET, socket.inet_aton(value)))
            set_up(_SIOCSIFTXQLEN, device, struct.pack("=i", 5000))
            set_up(_SIOCSIFFLAGS, device, struct.pack("=H", _IFF_UP | _IFF_RUNNING))
    socket.send_fds(connection, [b"."], [tun])
    os.close(tun)
    connection.recv(1)


if __name__ == "__main__":
    hold_host(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
