"""Which tokens make sample i: the three indices of a dataset, in plain numpy.

    document_index   every document of the split, once per epoch, shuffled
    sample_index     row i: (position in document_index, token offset) where sample i starts; row i + 1 is where it ends
    shuffle_index    the order in which samples are served

All documents of an epoch are laid end to end and cut every `sequence_length` tokens, so the start of sample i is the
place of token i * sequence_length: found from the running sum of lengths for all samples at once. The results, down
to the draws of numpy's RandomState, are those of Megatron-LM, whose index caches and runs can therefore be continued.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.shuffling import shuffle

Array = npt.NDArray[Any]

_SEPARATE_LAST_EPOCH_BELOW = 0.80  # share of an epoch
_INT32_MAX = np.iinfo(np.int32).max
_DOCUMENTS_AT_ONCE = 1 << 16  # their running sum stays in the processor's cache


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
    fits = max(len(document_index), int(sizes.max())) <= _INT32_MAX
    numbers = np.arange(_DOCUMENTS_AT_ONCE, dtype=np.int32)
    pieces = []
    tokens = samples = 0
    for first in range(0, len(document_index), _DOCUMENTS_AT_ONCE):
        # Document numbers are valid: "wrap" only spares the check of each.
        lengths = sizes.take(document_index[first : first + _DOCUMENTS_AT_ONCE], mode="wrap")
        ends = np.cumsum(lengths, dtype=np.int64)
        ends += tokens
        tokens = int(ends[-1])
        # The last start in each document or before it. With the extra token, a start at a document's end is the first
        # token of the next document that has any; without it, the end of a sample is written as the end of the
        # document that holds its last token.
        last_starts = (ends - extra) // sequence_length
        positions = np.repeat(numbers[: len(ends)], np.diff(last_starts, prepend=samples - 1))
        stop = int(last_starts[-1]) + 1
        starts = np.arange(samples, stop, dtype=np.int64) * sequence_length
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
    shuffle(order[:num_samples], random)
    if num_samples < total:
        shuffle(order[num_samples:], random)
    return order
