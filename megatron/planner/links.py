# SPDX-License-Identifier: Apache-2.0
"""Seconds of collectives, by the alpha-beta model: a fixed time per step, plus a time per byte.

S: bytes of the whole tensor, n: ranks, B: bytes a second of a link, a: seconds of a step (Thakur et al., 2005).

    all-gather, reduce-scatter   ring: (n - 1) a + S (n - 1) / n / B; all-reduce: twice. Libraries that take other ways
                                 have their measured ratios to an all-gather in the device's row
    all-to-all                   (n - 1) a + S' (n - 1) / n / B of the S' bytes of one rank
    point to point               a + S / B

A group over several nodes works on both levels at once: within a node on S, between nodes each rank on its share of S.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from megatron.planner.devices import Device

_MOST_STEPS = 32
"""Of a ring: groups that are larger take trees, whose depth grows with the logarithm."""


class Link(NamedTuple):
    """A group of `size` ranks that are `stride` apart in the order of ranks."""

    device: Device
    size: int
    stride: int = 1

    @property
    def ranks_per_node(self) -> int:
        """Members on one node."""
        return max(1, min(self.size, int(self.device.devices_per_node) // self.stride))

    def gather(self, whole: float) -> float:
        """Seconds of an all-gather of a tensor of so many bytes in all."""
        if self.size == 1:
            return 0.0
        device, near = self.device, self.ranks_per_node
        nodes = math.ceil(self.size / near)
        inside = whole * (near - 1) / near / device.link_bandwidth
        between = whole / near * (nodes - 1) / nodes / device.network_bandwidth
        return max(inside, between) + self._count_steps(near, nodes)

    def scatter(self, whole: float) -> float:
        """Seconds of a reduce-scatter."""
        return self.device.reduce_scatter_ratio * self.gather(whole)

    def reduce(self, whole: float) -> float:
        """Seconds of an all-reduce."""
        return self.device.all_reduce_ratio * self.gather(whole)

    def exchange(self, own: float) -> float:
        """Seconds of an all-to-all in which each rank sends so many bytes in all."""
        if self.size == 1:
            return 0.0
        device, near = self.device, self.ranks_per_node
        nodes = math.ceil(self.size / near)
        inside = own * (near - 1) / self.size / device.link_bandwidth
        between = own * (self.size - near) / self.size / device.network_bandwidth
        return max(inside, between) + self._count_steps(near, nodes)

    def send(self, size: float) -> float:
        """Seconds from a rank to its neighbour in the group."""
        if self.size == 1:
            return 0.0
        device = self.device
        if self.ranks_per_node == self.size:
            return device.link_seconds + size / device.link_bandwidth
        return device.network_seconds + size / device.network_bandwidth

    def _count_steps(self, near: int, nodes: int) -> float:
        steps = min(near - 1, _MOST_STEPS) * self.device.link_seconds
        return steps + min(nodes - 1, _MOST_STEPS) * self.device.network_seconds
