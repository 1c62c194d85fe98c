# SPDX-License-Identifier: Apache-2.0
"""The formula of an exchange between sites against messages that are sent, packet by packet, over lines."""

from __future__ import annotations

import heapq
import itertools

import pytest

from megatron.planner.many_sites import SEGMENT_BYTES, SiteLines

_PACKET_BYTES = 1500
_SEGMENTS = 300
"""Of a fragment."""


class Line:
    """One direction of a site's line: a packet leaves when those before it have left."""

    def __init__(self) -> None:
        self.free_at = 0.0

    def carry(self, at: float, seconds: float) -> float:
        self.free_at = max(self.free_at, at) + seconds
        return self.free_at


def send(starts: dict[int, float], uses: dict[int, tuple[Line, Line]], lines: SiteLines) -> dict[int, float]:
    """Send a fragment to or from each site; the moment at which its last packet arrives.

    CUBIC: ten packets, and two for each of which the sender hears that it has arrived. BBR: as fast as the line.
    """
    seconds = 8 * _PACKET_BYTES / lines.bits_per_second
    first = 10 * lines.connections if lines.control == "cubic" else _SEGMENTS
    # In turns, a packet of each.
    ready = [(at + number * seconds, site) for site, at in starts.items() for number in range(first)]
    heapq.heapify(ready)
    arrived, left = dict(starts), dict.fromkeys(starts, _SEGMENTS - first)
    while ready:
        at, site = heapq.heappop(ready)
        near, far = uses[site]
        sent = near.carry(at, seconds)
        # A router hands a packet on when it has it, so that two lines in a row take one time, not two.
        arrives = max(sent, far.carry(sent - seconds, seconds)) + lines.latency_seconds
        arrived[site] = max(arrived[site], arrives)
        for _ in range(min(2, left[site])):
            left[site] -= 1
            heapq.heappush(ready, (arrives + lines.latency_seconds, site))
    return arrived


def simulate(lines: SiteLines, exchanges: int) -> float:
    """Seconds that the last site waits at an exchange, the mean over several."""
    up = [Line() for _ in range(lines.sites)]
    down = [Line() for _ in range(lines.sites)]
    others = range(1, lines.sites)
    now = dict.fromkeys(range(lines.sites), 0.0)
    probed_at = dict.fromkeys(now, 0.0)
    waited = []
    steps = lines.inner_steps // lines.fragments

    def probe(site: int, at: float) -> float:
        """BBR's pause, where the last one was long ago."""
        if lines.control == "cubic" or at - probed_at[site] < 10:
            return at
        probed_at[site] = at
        return at + 0.2 + 2 * lines.latency_seconds

    for _ in range(exchanges):
        due = {site: at + (steps - lines.overlap_steps) * lines.step_seconds for site, at in now.items()}
        began_at = {s: probe(s, due[s]) for s in others}
        heard = send(began_at, {s: (up[s], down[0]) for s in others}, lines)
        mean_at = max([due[0], *heard.values()])
        known = send(dict.fromkeys(others, probe(0, mean_at)), {s: (up[0], down[s]) for s in others}, lines)
        for site in now:
            ready = due[site] + lines.overlap_steps * lines.step_seconds
            now[site] = max(ready, known.get(site, mean_at))
            if site == lines.sites - 1:
                waited.append(now[site] - ready)
    return sum(waited) / len(waited)


@pytest.mark.parametrize("sites", [2, 3, 4, 8, 16])
def test_waiting_is_that_of_the_formula(sites: int) -> None:
    lines_of_sites = ((2e7, 0.05), (1e9, 0.005), (1e8, 0.0))
    # Of BBR's pauses a part is hidden, of which the mean over exchanges is another.
    ways = ((1, "cubic", 1, 0), (1, "cubic", 4, 2), (8, "cubic", 4, 2), (1, "bbr", 1, 0), (1, "bbr", 4, 0))
    for (rate, latency), (connections, control, fragments, overlap) in itertools.product(lines_of_sites, ways):
        parameters = fragments * _SEGMENTS * SEGMENT_BYTES / 2
        lines = SiteLines(
            sites, parameters, rate, latency, step_seconds=0.13, inner_steps=40, bits=16, fragments=fragments,
            overlap_steps=overlap, connections=connections, control=control,
        )  # fmt: skip
        expected = lines.waiting_seconds
        # What is left to wait for may be a small difference: within a tenth of the exchange that it is of.
        assert simulate(lines, 8 if control == "bbr" else 2) == pytest.approx(
            expected, abs=0.1 * max(expected, lines.exchange_seconds)
        ), lines
        assert lines.mean_step_seconds == 0.13 + fragments * expected / 40
