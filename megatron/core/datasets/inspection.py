# SPDX-License-Identifier: Apache-2.0
"""Contents of a token dataset: its sizes, its token ids, and whether they belong to a vocabulary. One pass over
.bin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.indexed_format import Array
from megatron.core.errors import DataError

_TOKENS_AT_ONCE = 1 << 22
_COUNTED_IDS = 1 << 24  # ids up to here are counted one by one; real vocabularies are smaller


@dataclass(frozen=True)
class Lengths:
    """The distribution of lengths in tokens."""

    smallest: int
    median: int
    mean: float
    largest: int

    @classmethod
    def of(cls, lengths: Array) -> Lengths:
        """Of at least one length."""
        return cls(int(lengths.min()), int(np.median(lengths)), float(lengths.mean()), int(lengths.max()))


@dataclass(frozen=True)
class DatasetFacts:
    """Facts that verify_dataset.py reports."""

    dtype: str
    documents: int
    empty_documents: int
    sequences: int
    tokens: int
    document_lengths: Lengths
    sequence_lengths: Lengths
    smallest_id: int | None
    largest_id: int | None
    """None where there is not a single token."""
    distinct_ids: int | None
    """None where ids are too large to be counted."""
    documents_ending: int
    """Documents that end with the end-of-document token; 0 where none is known."""


def inspect(dataset: IndexedDataset, eod: int | None = None) -> DatasetFacts:
    """Read all of a dataset once. eod: the id that should end documents."""
    documents = _document_lengths(dataset)
    last_tokens = np.cumsum(documents)[documents > 0] - 1
    counts = np.zeros(0, dtype=np.int64)
    lowest: list[int] = []
    highest: list[int] = []
    is_countable, ending = True, 0
    for start, tokens in dataset.pieces(_TOKENS_AT_ONCE):
        low, high = int(tokens.min()), int(tokens.max())
        lowest.append(low)
        highest.append(high)
        is_countable = is_countable and low >= 0 and high < _COUNTED_IDS
        if is_countable:
            found = np.bincount(tokens, minlength=len(counts))
            found[: len(counts)] += counts
            counts = found
        first, end = np.searchsorted(last_tokens, (start, start + len(tokens)))
        if eod is not None:
            ending += int(np.count_nonzero(tokens[last_tokens[first:end] - start] == eod))
    return DatasetFacts(
        dtype=dataset.dtype.name,
        documents=len(documents),
        empty_documents=int((documents == 0).sum()),
        sequences=len(dataset),
        tokens=int(dataset.sequence_lengths.sum(dtype=np.int64)),
        document_lengths=Lengths.of(documents),
        sequence_lengths=Lengths.of(dataset.sequence_lengths),
        smallest_id=min(lowest, default=None),
        largest_id=max(highest, default=None),
        distinct_ids=int(np.count_nonzero(counts)) if is_countable else None,
        documents_ending=ending,
    )


def check_vocabulary(dataset: IndexedDataset, vocab_size: int) -> None:
    """Raise DataError with document and offset of the first token id outside [0, vocab_size)."""
    outside = dataset.first_token_outside(vocab_size)
    if outside is None:
        return
    sequence, offset, token = outside
    document = int(np.searchsorted(dataset.document_indices, sequence, side="right")) - 1
    raise DataError(
        f"{dataset.path_prefix}.bin: token {offset} of sequence {sequence} (document {document}) is {token}, outside "
        f"the vocabulary of {vocab_size}; the data was made with another tokenizer, or is damaged"
    )


def document_tokens(dataset: IndexedDataset, document: int) -> Array:
    """All tokens of a document. Raises DataError for a number that is none."""
    count = len(dataset.document_indices) - 1
    if not 0 <= document < count:
        raise DataError(f"{dataset.path_prefix}: document {document} does not exist; give 0 to {count - 1}")
    first, end = dataset.document_indices[document : document + 2].tolist()
    parts = [dataset.get(sequence) for sequence in range(first, end)]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dataset.dtype)


def _document_lengths(dataset: IndexedDataset) -> Array:
    """int64 [documents], tokens."""
    ends = np.concatenate([[0], np.cumsum(dataset.sequence_lengths, dtype=np.int64)])
    return np.diff(ends[dataset.document_indices])
