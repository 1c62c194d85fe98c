"""The order of numpy's RandomState.shuffle, to the bit, in less time for large arrays.

That order is part of the format: index caches and runs are continued in it. It is a Fisher-Yates shuffle: for
i = n - 1, ..., 1 draw a place in 0, ..., i and swap values i and place. A place is a 32-bit word of the generator,
cut to the bits of i, and drawn again while it is above i. Here a block of words becomes a block of swaps at once, as
few of them have to do with one another:

- i falls by less than the block's length, so only words that close to i may be too large for a later i.
- Swaps that share no position can be done together; the others are done in order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_WORDS_AT_ONCE = 1 << 14  # what a block works on stays in the cache of one core
_PLAIN_UP_TO = 1 << 21  # with fewer values left, numpy is as fast
_MOST_VALUES = 1 << 32  # above it numpy takes two words for a place


def shuffle(values: Array, random: np.random.RandomState) -> None:
    """random.shuffle(values) with the same result and the same state of `random` afterwards.

    values: integers of 32 or 64 bits, changed in place.
    """
    left = len(values)
    while _PLAIN_UP_TO < left <= _MOST_VALUES:
        places = _draw_places(left - 1, random)
        _swap(values[:left], places)
        left -= len(places)
    random.shuffle(values[:left])


def _draw_places(limit: int, random: np.random.RandomState) -> Array:
    """int64 [k]: a place up to `limit`, one up to limit - 1, and so on, from all words of a block."""
    mask = (1 << limit.bit_length()) - 1
    count = min(_WORDS_AT_ONCE, limit - (mask >> 1))  # the mask is the same for all of them
    words = random.randint(0, 1 << 32, size=count, dtype=np.uint32)
    words &= np.uint32(mask)
    places = words.compress(words <= limit).astype(np.int64)
    too_large: list[int] = []
    for k in np.flatnonzero(places > limit - len(places)).tolist():
        if places[k] > limit - (k - len(too_large)):
            too_large.append(k)
    return np.delete(places, too_large) if too_large else places


def _swap(values: Array, places: Array) -> None:
    """Swap the last value with that at places[0], the one before it with that at places[1], and so on."""
    last, count = len(values) - 1, len(places)
    steps = np.arange(count, dtype=values.dtype)
    ends = values[: last - count : -1]  # what each step swaps with its place
    # Places are valid: "wrap" only spares the check of each.
    kept, found = ends.copy(), values.take(places, mode="wrap")
    values[places] = steps
    steps_at_places = values.take(places, mode="wrap")
    values[places] = kept
    ends[:] = found
    # A step that finds another one's number at its place shares it; a place among the ends is that of a later step.
    sharing = np.flatnonzero(steps_at_places != steps)
    among_ends = np.flatnonzero(places > last - count)
    if not len(sharing) and not len(among_ends):
        return
    again = np.unique(np.concatenate([sharing, steps_at_places[sharing], among_ends, last - places[among_ends]]))
    moved: dict[int, int] = {}
    for end, place, its_value, other in zip(
        (last - again).tolist(), places[again].tolist(), kept[again].tolist(), found[again].tolist(), strict=True
    ):
        moved[end], moved[place] = moved.get(place, other), moved.get(end, its_value)
    values[list(moved)] = list(moved.values())
