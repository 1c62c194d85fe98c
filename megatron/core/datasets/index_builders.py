# SPDX-License-Identifier: Apache-2.0
"""Map from sample i to its tokens: the three indices of a dataset, in plain numpy.

    document_index   every document of the split, once per epoch, shuffled
    sample_index     row i: (position in document_index, token offset) where sample i starts; row i + 1 is where it ends
    shuffle_index    the order in which samples are served

All documents of an epoch are laid end to end and cut every `sequence_length` tokens, so the start of sample i is the
place of token i * sequence_length: found from the running sum of lengths for all samples at once. The results, down
to the draws of numpy's RandomState, equal Megatron-LM's, whose index caches and runs can therefore be continued.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_SEPARATE_LAST_EPOCH_BELOW = 0.80  # share of an epoch
_INT32_MAX = np.iinfo(np.int32).max
_DOCUMENTS_AT_ONCE = 1 << 15  # their running sum stays in the processor's cache


@dataclass(frozen=True)
class EpochPlan:
    """Number of passes over the documents that a request needs; the last one may be shuffled by itself."""

    num_epochs: int
    separate_last_epoch: bool
    """True when the last epoch is used only to a small part: then its samples come after all others."""
    samples_before_last_epoch: int


def compile_helpers() -> None:
    """Upstream's call before the first dataset is built. Here the indices are built by numpy, and
    there is nothing to compile."""


def plan_epochs(tokens_per_epoch: int, num_samples: int | None, sequence_length: int, extra_token: int) -> EpochPlan:
    """Passes over the documents for `num_samples` samples (None: one pass); extra_token: 1 where labels need it."""
    if num_samples is None or tokens_per_epoch >= num_samples * sequence_length + extra_token:
        return EpochPlan(1, False, 0)
    num_epochs = -((num_samples * sequence_length + extra_token) // -tokens_per_epoch)
    before_last = ((num_epochs - 1) * tokens_per_epoch - extra_token) // sequence_length
    per_epoch = (tokens_per_epoch - extra_token) // sequence_length
    # Mixed over all epochs, a last epoch of which little is used would make some documents rarer than others
    # throughout; by itself at the end it does not.
    separate = num_samples - before_last < int(_SEPARATE_LAST_EPOCH_BELOW * per_epoch)
    return EpochPlan(num_epochs, separate, before_last)


def build_document_index(documents: Array, plan: EpochPlan, random: np.random.RandomState) -> Array:
    """int32 [epochs * documents]: the given document numbers once per epoch, shuffled over all epochs.

    A separate last epoch is shuffled by itself and comes last.
    """
    parts = [plan.num_epochs - 1, 1] if plan.separate_last_epoch else [plan.num_epochs]
    documents = documents.astype(np.int32, copy=False)
    shuffled = []
    for epochs in parts:
        part = np.tile(documents, epochs) if epochs > 1 else documents.copy()
        shuffle(part, random)
        shuffled.append(part)
    return np.concatenate(shuffled) if len(shuffled) > 1 else shuffled[0]


def build_sample_index(
    sizes: Array,
    document_index: Array,
    sequence_length: int,
    *,
    drop_last_partial: bool = True,
    add_extra_token: bool = True,
) -> Array:
    """int32 or int64 [samples + 1, 2]: rows (position in document_index, offset in tokens) at which samples start.

    sizes              tokens of each document, by document number
    drop_last_partial  no sample for the tokens left over at the end
    add_extra_token    a sample reads one token more than sequence_length, which is also the first of the next sample
    """
    extra = int(add_extra_token)
    sizes = np.require(sizes, requirements=["ALIGNED"])  # in an index file they are not; each take would copy them all
    longest = int(sizes.max())
    # int32 halves the largest of the three arrays.
    row_type: Any = np.int32 if max(len(document_index), longest) <= _INT32_MAX else np.int64
    fits = longest * _DOCUMENTS_AT_ONCE + 2 * sequence_length <= _INT32_MAX
    block_type: Any = np.int32 if fits else np.int64  # of what is counted from the beginning of a block
    pieces = []
    tokens = samples = 0
    for first in range(0, len(document_index), _DOCUMENTS_AT_ONCE):
        # numpy looks up by its native index type. Document numbers are valid: "wrap" only spares the check of each.
        documents = document_index[first : first + _DOCUMENTS_AT_ONCE].astype(np.intp)
        lengths = sizes.take(documents, mode="wrap")
        # Counted from the last start before the block, not from its first token.
        before_block = tokens - extra - (samples - 1) * sequence_length
        ends = np.cumsum(lengths, dtype=block_type)
        ends += before_block
        # The starts up to the end of each document. With the extra token, a start at a document's end is the first
        # token of the next document that has any; without it, the end of a sample is written as the end of the
        # document that holds its last token.
        starts = np.zeros(len(ends) + 1, dtype=block_type)
        np.floor_divide(ends, sequence_length, out=starts[1:])
        tokens += int(ends[-1]) - before_block
        positions = np.flatnonzero(starts[1:] != starts[:-1])
        count = int(starts[-1])
        # Several samples can start in a long document.
        if len(positions) < count:
            positions = positions.repeat(starts[positions + 1] - starts[positions])
        rows = np.empty((count, 2), dtype=row_type)
        np.add(positions, first, out=rows[:, 0], casting="unsafe")
        # How far into its document a sample starts: its token number minus the number of the document's first token.
        ends -= lengths
        numbers = np.arange(1, count + 1) * sequence_length - extra
        np.subtract(numbers, ends[positions], out=rows[:, 1], casting="unsafe")
        pieces.append(rows)
        samples += count
    if not drop_last_partial and (tokens - extra) % sequence_length > 0:
        last = len(document_index) - 1
        pieces.append(np.array([[last, int(sizes[document_index[last]]) - extra]], dtype=pieces[0].dtype))
    index = np.concatenate(pieces)
    # The very first sample starts at the first document even if that one is empty.
    index[0] = 0
    return index


def build_shuffle_index(num_samples: int, total: int, random: np.random.RandomState) -> Array:
    """uint32 or int64 [total]: a permutation of the first `num_samples`, then one of the rest."""
    # The type is upstream's, and part of the cached file.
    dtype = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
    order = np.arange(total, dtype=dtype)
    shuffle(order[:num_samples], random)
    if num_samples < total:
        shuffle(order[num_samples:], random)
    return order


# ---- numpy's shuffle, faster for large arrays
#
# The order of RandomState.shuffle is part of the format: index caches and runs are continued in it. It is a
# Fisher-Yates shuffle: for i = n - 1, ..., 1 draw a place in 0, ..., i and swap values i and place. A place is a 32-bit
# word of the generator, cut to the bits of i, and drawn again while it is above i. Here a block of words becomes a
# block of swaps at once, as few of them have to do with one another:
#
# - i falls by less than the block's length, so only words that close to i may be too large for a later i.
# - Swaps that share no position can be done together; the others are done in order.

_WORDS_AT_ONCE = 1 << 14  # what a block works on stays in the cache of one core
_PLAIN_UP_TO = 1 << 21  # with fewer values left, numpy is as fast
_WIDENED_UP_TO = 1 << 20  # numpy swaps 8 bytes faster than 4, as long as they stay in the processor's caches
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
    if left <= _WIDENED_UP_TO:
        widened = values[:left].astype(np.int64)
        random.shuffle(widened)
        values[:left] = widened
    else:
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
    # A step that finds another one's number at its place shares it; a place among the ends belongs to a later step.
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
