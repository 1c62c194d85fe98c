"""Which tokens make sample i: the three indices of a dataset and the order of a blend, in plain numpy.

    document_index   every document of the split, once per epoch, shuffled
    sample_index     row i: (position in document_index, token offset) where sample i starts; row i + 1 is where it ends
    shuffle_index    the order in which samples are served

All documents of an epoch are laid end to end and cut every `sequence_length` tokens, so the start of sample i is the
place of token i * sequence_length: a search in the running sum of lengths, for all samples at once. The results, down
to the draws of numpy's RandomState, are those of Megatron-LM, whose index caches and runs can therefore be continued.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_SEPARATE_LAST_EPOCH_BELOW = 0.80  # share of an epoch
_INT32_MAX = np.iinfo(np.int32).max
_DOCUMENTS_AT_ONCE = 1 << 18  # their running sum stays in the processor's cache


@dataclass(frozen=True)
class EpochPlan:
    """How many passes over the documents a request needs, and whether the last one is shuffled by itself."""

    num_epochs: int
    separate_last_epoch: bool
    """True when the last epoch is used only to a small part: then its samples come after all others."""
    samples_before_last_epoch: int


def plan_epochs(tokens_per_epoch: int, num_samples: int | None, sequence_length: int, extra_token: int) -> EpochPlan:
    """Passes over the documents for `num_samples` samples (None: one pass); extra_token: 1 where labels need it."""
    if num_samples is None or tokens_per_epoch >= num_samples * sequence_length + extra_token:
        return EpochPlan(1, False, 0)
    num_epochs = -((num_samples * sequence_length + extra_token) // -tokens_per_epoch)
    before_last = ((num_epochs - 1) * tokens_per_epoch - extra_token) // sequence_length
    per_epoch = (tokens_per_epoch - extra_token) // sequence_length
    separate = num_samples - before_last < int(_SEPARATE_LAST_EPOCH_BELOW * per_epoch)
    return EpochPlan(num_epochs, separate, before_last)


def build_document_index(documents: Array, plan: EpochPlan, random: np.random.RandomState) -> Array:
    """int32 [epochs * documents]: the given document numbers once per epoch, shuffled over all epochs.

    A separate last epoch is shuffled by itself and stands at the end.
    """
    parts = [plan.num_epochs - 1, 1] if plan.separate_last_epoch else [plan.num_epochs]
    shuffled = []
    for epochs in parts:
        part = np.tile(documents.astype(np.int32), epochs)
        random.shuffle(part)
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
    side: Literal["left", "right"] = "right" if add_extra_token else "left"
    fits = max(len(document_index), int(sizes.max())) <= _INT32_MAX
    pieces = []
    tokens = samples = 0
    for first in range(0, len(document_index), _DOCUMENTS_AT_ONCE):
        lengths = sizes.take(document_index[first : first + _DOCUMENTS_AT_ONCE])
        ends = np.cumsum(lengths, dtype=np.int64)
        ends += tokens
        tokens = int(ends[-1])
        # With the extra token, a start at a document's end is the first token of the next document that has any;
        # without it, the end of a sample is written as the end of the document that holds its last token.
        stop = -(tokens // -sequence_length) if add_extra_token else tokens // sequence_length + 1
        starts = np.arange(samples, stop, dtype=np.int64) * sequence_length
        positions = np.searchsorted(ends, starts, side=side)
        rows = np.empty((len(starts), 2), dtype=np.int32 if fits else np.int64)
        rows[:, 0] = positions + first
        rows[:, 1] = starts - (ends[positions] - lengths[positions])
        pieces.append(rows)
        samples = stop
    if not drop_last_partial and (tokens - extra) % sequence_length > 0:
        last = len(document_index) - 1
        pieces.append(np.array([[last, int(sizes[document_index[last]]) - extra]], dtype=pieces[0].dtype))
    index = np.concatenate(pieces)
    index[0] = 0
    return index


def build_shuffle_index(num_samples: int, total: int, random: np.random.RandomState) -> Array:
    """uint32 or int64 [total]: a permutation of the first `num_samples`, then one of the rest."""
    dtype = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
    order = np.arange(total, dtype=dtype)
    random.shuffle(order[:num_samples])
    if num_samples < total:
        random.shuffle(order[num_samples:])
    return order


# ---- the order of a blend ----

_PLAIN_BELOW = 20_000  # samples up to which the plain loop is as fast
_SEGMENTS = 8192
_FEW_SEGMENTS = 64  # so few are quicker one after the other
_MAX_ROUNDS = 16


def build_blending_indices(weights: Array, size: int) -> tuple[Array, Array]:
    """The order in which datasets are drawn from: (dataset_index int16 [size], dataset_sample_index int64 [size]).

    Step s takes from the dataset that is furthest behind its share: the largest weights[d] * max(s, 1) - drawn[d],
    the first of equal ones. Weights sum to 1.
    """
    return _in_order(_draw(np.asarray(weights, dtype=np.float64), size, None))


def build_exhaustive_blending_indices(sizes: Array) -> tuple[Array, Array]:
    """As build_blending_indices with weights by size, and every dataset used up exactly once."""
    limits = np.asarray(sizes, dtype=np.int64)
    total = int(limits.sum())
    return _in_order(_draw(limits / total, total, limits))


def _in_order(dataset_index: Array) -> tuple[Array, Array]:
    """Number the draws from each dataset 0, 1, 2, ..."""
    by_dataset = np.argsort(dataset_index, kind="stable")
    counts = np.bincount(dataset_index, minlength=1)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    sample_index = np.empty(len(dataset_index), dtype=np.int64)
    sample_index[by_dataset] = np.arange(len(dataset_index)) - firsts
    return dataset_index, sample_index


def _draw(weights: Array, size: int, limits: Array | None) -> Array:
    """int16 [size]: the dataset of every step.

    The rule is sequential: a step depends on all draws before it. But the counts are never far from weights * step, and
    after a while they no longer depend on where they started. So the steps are cut into segments that all advance
    together, each from a guess of its counts; a segment whose guess differs from what the segment before it arrived at
    is run again from there. When every segment starts where its predecessor ended, the whole is the sequential result.
    """
    if size < _PLAIN_BELOW:
        return _draw_plainly(weights, 0, size, np.zeros(len(weights), dtype=np.int64), limits)[0]
    length = -(size // -_SEGMENTS)
    first_steps = np.arange(0, size, length)
    starts = _guess_counts(weights, first_steps)
    ends = np.empty_like(starts)
    draws = np.empty((len(first_steps), length), dtype=np.int16)

    wrong = np.arange(len(first_steps))
    for _ in range(_MAX_ROUNDS):
        draws[wrong], ends[wrong] = _draw_segments(weights, first_steps[wrong], length, starts[wrong], limits)
        wrong = 1 + np.flatnonzero((starts[1:] != ends[:-1]).any(axis=1))
        starts[wrong] = ends[wrong - 1]
        if len(wrong) <= _FEW_SEGMENTS:
            break
    # Datasets of very small weight take long to forget the guess: what is left is repaired in order.
    again = np.zeros(len(first_steps), dtype=bool)
    again[wrong] = True
    for k in range(1, len(first_steps)):
        if again[k]:
            first = int(first_steps[k])
            draws[k], ends[k] = _draw_plainly(weights, first, first + length, ends[k - 1], limits)
            if k + 1 < len(first_steps) and (starts[k + 1] != ends[k]).any():
                again[k + 1] = True
    return draws.reshape(-1)[:size]


def _guess_counts(weights: Array, steps: Array) -> Array:
    """int64 [steps, datasets]: likely draws before each step: shares rounded down, the rest to the largest rests."""
    shares = steps[:, None] * weights[None, :]
    counts = np.floor(shares).astype(np.int64)
    missing = steps - counts.sum(axis=1)
    rank = np.argsort(np.argsort(counts - shares, axis=1, kind="stable"), axis=1)
    guess: Array = counts + (rank < missing[:, None])
    return guess


def _draw_segments(
    weights: Array, first_steps: Array, length: int, counts: Array, limits: Array | None
) -> tuple[Array, Array]:
    """Run the rule from all given (step, counts) side by side: (draws int16 [segments, length], counts after them)."""
    segments = len(first_steps)
    drawn = np.ascontiguousarray(counts.T)  # [datasets, segments]
    draws = np.empty((length, segments), dtype=np.int16)
    everyone = np.arange(segments)
    for k in range(length):
        step = np.maximum(first_steps + k, 1).astype(np.float64)
        best = np.zeros(segments, dtype=np.int16)
        most_behind = np.full(segments, -math.inf)
        for d, weight in enumerate(weights):
            behind = weight * step
            behind -= drawn[d]
            if limits is not None:
                behind[drawn[d] >= limits[d]] = -math.inf
            ahead = behind > most_behind
            np.copyto(most_behind, behind, where=ahead)
            np.copyto(best, d, where=ahead)
        draws[k] = best
        drawn[best, everyone] += 1
    return draws.T, drawn.T


def _draw_plainly(
    weights: Array, first_step: int, end_step: int, counts: Array, limits: Array | None
) -> tuple[Array, Array]:
    """The rule as a loop over the steps [first_step, end_step): (draws int16 [steps], counts after them)."""
    draws = np.zeros(end_step - first_step, dtype=np.int16)
    share, drawn = weights.tolist(), counts.tolist()
    unspent = [d for d in range(len(share)) if limits is None or drawn[d] < limits[d]]
    for s in range(first_step, end_step):
        if not unspent:
            break  # the last segment reaches beyond the end
        step = float(max(s, 1))
        best, most_behind = unspent[0], share[unspent[0]] * step - drawn[unspent[0]]
        for d in unspent:
            behind = share[d] * step - drawn[d]
            if behind > most_behind:
                best, most_behind = d, behind
        draws[s - first_step] = best
        drawn[best] += 1
        if limits is not None and drawn[best] == limits[best]:
            unspent.remove(best)
    return draws, np.asarray(drawn, dtype=np.int64)
