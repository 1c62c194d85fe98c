# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes that a process sends, by the axis of the mesh and the kind of communication.

Counted is what a process must send at least, per member of a group of n, for a tensor of B bytes:

    all_reduce                      2 (n-1)/n B    (ring or tree; Patarasuk and Yuan, 2009)
    reduce_scatter, all_gather      (n-1)/n B      B: the whole tensor, all members' parts together
    all_to_all                      what leaves the process
    broadcast                       (n-1)/n B      n-1 copies arrive, and any member may pass them on
    send                            B

A library may send more. Small Python objects and barriers are not counted.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, Protocol

Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send"]


class Meter(Protocol):
    """Observer that a group tells of each of its collectives."""

    def add(self, axis: str, kind: Kind, tensor_bytes: int, members: int) -> None:
        """Take note of one call; see Traffic.add."""


class Traffic:
    """Bytes sent so far. One for each process, in the groups that it counts for."""

    def __init__(self) -> None:
        self.sent_bytes: Counter[tuple[str, str]] = Counter()
        """(axis, kind) -> bytes."""

    def add(self, axis: str, kind: Kind, tensor_bytes: int, members: int) -> None:
        """Count one call. tensor_bytes: B above; for all_to_all what leaves the process."""
        whole = kind in ("send", "all_to_all")
        # For the others a member's local part of the tensor never leaves it.
        share = 1.0 if whole else (members - 1) / members
        # An all-reduce is a reduce-scatter and an all-gather.
        self.sent_bytes[axis, kind] += round(tensor_bytes * share * (2 if kind == "all_reduce" else 1))

    def take(self) -> dict[tuple[str, str], int]:
        """Bytes sent since the last call, by (axis, kind); from now on counted from zero."""
        counted = dict(self.sent_bytes)
        self.sent_bytes.clear()
        return counted
