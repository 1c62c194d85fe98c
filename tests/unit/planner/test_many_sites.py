# SPDX-License-Identifier: Apache-2.0
"""The formula of an exchange between sites against messages that are sent, packet by packet, over lines."""

from __future__ import annotations

import itertools

import pytest

from megatron.planner.many_sites import SiteLines

_PACKETS = 400
"""Of a message."""


class Line:
    """One direction of a site's line: a packet leaves when those before it have left."""

    def __init__(self) -> None:
        self.free_at = 0.0

    def carry(self, at: float, seconds: float) -> float:
        self.free_at = max(self.free_at, at) + seconds
        return self.free_at


def send_in_turns(starts: dict[int, float], uses: dict[int, tuple[Line, Line]], lines: SiteLines) -> dict[int, float]:
    """Send a message to or from each site, a packet of each in turn; the moment at which the last packet arrives."""
    seconds = lines.message_seconds / _PACKETS
    arrived = dict(starts)
    # In the order in which packets reach the line that all of them share.
    packets = sorted((starts[site] + number * seconds, site) for site in starts for number in range(_PACKETS))
    for at, site in packets:
        first, last = uses[site]
        left = first.carry(at, seconds)
        # A router hands a packet on when it has it, so that two lines in a row take one time, not two.
        arrived[site] = max(left, last.carry(left - seconds, seconds)) + lines.latency_seconds
    return arrived


def simulate(lines: SiteLines, exchanges: int = 6) -> float:
    """Seconds that the last site waits at an exchange, the mean over several."""
    up = [Line() for _ in range(lines.sites)]
    down = [Line() for _ in range(lines.sites)]
    others = range(1, lines.sites)
    now = dict.fromkeys(range(lines.sites), 0.0)
    waited = []
    steps = lines.inner_steps // lines.fragments
    for _ in range(exchanges):
        due = {site: at + (steps - lines.overlap_steps) * lines.step_seconds for site, at in now.items()}
        heard = send_in_turns({s: due[s] for s in others}, {s: (up[s], down[0]) for s in others}, lines)
        mean_at = max([due[0], *heard.values()])
        known = send_in_turns(dict.fromkeys(others, mean_at), {s: (up[0], down[s]) for s in others}, lines)
        for site in now:
            ready = due[site] + lines.overlap_steps * lines.step_seconds
            now[site] = max(ready, known.get(site, mean_at))
            if site == lines.sites - 1:
                waited.append(now[site] - ready)
    return sum(waited) / len(waited)


@pytest.mark.parametrize("sites", [2, 3, 4, 8, 16])
def test_waiting_is_that_of_the_formula(sites: int) -> None:
    for rate, latency, fragments, overlap in itertools.product((1e8, 1e9, 1e11), (0.0, 0.1), (1, 4), (0, 5)):
        lines = SiteLines(
            sites, 7e9, rate, latency, step_seconds=3.0, inner_steps=100, bits=16, fragments=fragments,
            overlap_steps=overlap,
        )  # fmt: skip
        assert simulate(lines) == pytest.approx(lines.waiting_seconds, rel=0.1, abs=0.01), lines
        assert lines.mean_step_seconds == 3.0 + fragments * lines.waiting_seconds / 100
