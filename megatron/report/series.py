# SPDX-License-Identifier: Apache-2.0
"""Curves made small enough to be drawn: thinned without losing peaks, smoothed, averaged over segments."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

Points = list[tuple[float, float | None]]
"""(iteration, value) in order; None where the value is not known."""


def thin(x: np.ndarray, y: np.ndarray, most: int) -> Points:
    """Return at most `most` points of a curve: of each segment of equal length the first, the smallest and the largest
    value.

    x, y: [n] float64, NaN where a value is not known; a segment with such values keeps one as a gap.
    """
    if len(x) <= most:
        kept: Iterable[int] = range(len(x))
    else:
        edges = np.linspace(0, len(x), max(1, most // 4) + 1).astype(int)
        chosen: set[int] = {len(x) - 1}
        for begin, end in zip(edges, edges[1:], strict=False):
            part = y[begin:end]
            known = np.isfinite(part)
            chosen.add(int(begin))
            if not known.all():
                chosen.add(int(begin + np.argmin(known)))
            if known.any():
                chosen |= {int(begin + np.nanargmin(part)), int(begin + np.nanargmax(part))}
        kept = sorted(chosen)
    return [(float(x[i]), float(y[i]) if math.isfinite(y[i]) else None) for i in kept]


def smooth(y: np.ndarray, window: int) -> np.ndarray:
    """Running means [n] over `window` values around each one, fewer near the ends; values that are not known do not
    count."""
    known = np.isfinite(y)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, y, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    at = np.arange(len(y))
    # As many before as after, so that a curve that falls steeply begins where the run did.
    reach = np.minimum(window // 2, np.minimum(at, len(y) - 1 - at))
    number = counts[at + reach + 1] - counts[at - reach]
    total = sums[at + reach + 1] - sums[at - reach]
    return np.where(number > 0, total / np.maximum(number, 1), np.nan)


def average(values: Sequence[float], columns: int) -> list[float]:
    """Means of as many stretches of equal length; what is no number does not count, and nothing else makes NaN."""
    edges = [len(values) * column // columns for column in range(columns + 1)]
    stretches = ([v for v in values[a:b] if math.isfinite(v)] for a, b in zip(edges, edges[1:], strict=False))
    return [sum(stretch) / len(stretch) if stretch else math.nan for stretch in stretches]
