# SPDX-License-Identifier: Apache-2.0
"""The time for which DiLoCo keeps training waiting on a slow line (core/many_sites/).

Every site is connected to the first one, which hears all of them before it answers: of P fragments of N values in b
bits each, an exchange between M sites whose lines carry B bit/s each way with a latency of L seconds takes

    2 ((M - 1) h N b / (P B) + L + S)

since the first site's line carries M - 1 messages, one way and then the other. h counts the headers of packets. S is
lost while TCP finds out what the line takes. With CUBIC, Linux's usual one, a connection that was idle sends ten
segments (RFC 6928; RFC 5681, 4.1), and twice as many after each round trip of 2 L, until the line is full. BBR
(Cardwell et al., 2016) begins with its last rate, and sends next to nothing for 0.2 s and a round trip once in 10 s.

An exchange goes on beside tau steps of T seconds, so that max(0, that - tau T) is left to wait for, P times in H steps,
as long as tau <= H / P: then one exchange is over before the next one begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SEGMENT_BYTES = 1448
"""Of a message in a packet of 1500: IPv4's, TCP's headers and the time stamp take 52."""
HEADERS = 1500 / SEGMENT_BYTES
FIRST_SEGMENTS = 10
"""That a connection sends before it has heard anything."""
PROBE_SECONDS, PROBES_EVERY = 0.2, 10.0
"""Of BBR, in which it measures the latency of an empty line."""


@dataclass(frozen=True)
class SiteLines:
    """Sites of equal size that exchange weights over equal lines."""

    sites: int
    parameters: float
    """Values that a site exchanges: all weights of the model."""
    bits_per_second: float
    """Of a site's line, each way."""
    latency_seconds: float
    """One way."""
    step_seconds: float
    inner_steps: int
    """H: steps between two exchanges of the same weights."""
    bits: float = 32.0
    """Of a value, with its part of the scales: formats.py counts them."""
    fragments: int = 1
    overlap_steps: int = 0
    connections: int = 1
    """Of a site: ranks that exchange."""
    control: Literal["cubic", "bbr"] = "cubic"
    """TCP's congestion control (net.ipv4.tcp_congestion_control)."""

    @property
    def message_seconds(self) -> float:
        """Seconds for which one site's fragment occupies a line."""
        return HEADERS * self.parameters * self.bits / self.fragments / self.bits_per_second

    @property
    def exchange_seconds(self) -> float:
        """Seconds from the end of the step after which a fragment is due to the mean's arrival."""
        return 2 * ((self.sites - 1) * self.message_seconds + self.latency_seconds + self.starting_seconds)

    @property
    def starting_seconds(self) -> float:
        """Seconds for which the line is idle, each way, until connections that begin together fill it."""
        if self.control == "bbr":
            between = self.inner_steps * self.step_seconds / self.fragments
            return (PROBE_SECONDS + 2 * self.latency_seconds) * min(1.0, between / PROBES_EVERY)
        left, trip = (self.sites - 1) * self.message_seconds, 2 * self.latency_seconds
        first = (self.sites - 1) * self.connections * FIRST_SEGMENTS * 8 * SEGMENT_BYTES * HEADERS
        window, lost = first / self.bits_per_second, 0.0
        while window < min(trip, left):
            lost, left, window = lost + trip - window, left - window, 2 * window
        return lost

    @property
    def waiting_seconds(self) -> float:
        """Seconds for which training stands still at each exchange."""
        return max(0.0, self.exchange_seconds - self.overlap_steps * self.step_seconds)

    @property
    def mean_step_seconds(self) -> float:
        """Seconds of a step, with its part of the waiting."""
        return self.step_seconds + self.fragments * self.waiting_seconds / self.inner_steps
