# SPDX-License-Identifier: Apache-2.0
"""The time for which DiLoCo keeps training waiting on a slow line (core/many_sites/).

Every site is connected to the first one, which hears all of them before it answers: of P fragments of N values in b
bits each, an exchange between M sites whose lines carry B bit/s each way with a latency of L seconds takes

    2 ((M - 1) N b / (P B) + L)

since the first site's line carries M - 1 messages, one way and then the other. An exchange goes on beside tau steps of
T seconds, so that max(0, that - tau T) is left to wait for, P times in H steps, as long as tau <= H / P: then one
exchange is over before the next one begins.
"""

from __future__ import annotations

from dataclasses import dataclass


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

    @property
    def message_seconds(self) -> float:
        """Seconds for which one site's fragment occupies a line."""
        return self.parameters * self.bits / self.fragments / self.bits_per_second

    @property
    def exchange_seconds(self) -> float:
        """Seconds from the end of the step after which a fragment is due to the mean's arrival."""
        return 2 * ((self.sites - 1) * self.message_seconds + self.latency_seconds)

    @property
    def waiting_seconds(self) -> float:
        """Seconds for which training stands still at each exchange."""
        return max(0.0, self.exchange_seconds - self.overlap_steps * self.step_seconds)

    @property
    def mean_step_seconds(self) -> float:
        """Seconds of a step, with its part of the waiting."""
        return self.step_seconds + self.fragments * self.waiting_seconds / self.inner_steps
