"""What belongs to the tokens of one sample: which of them count, where they stand, what they may see. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def position_ids(length: int, document_starts: Sequence[int] | Array = ()) -> Array:
    """int64 [length]: 0, 1, 2, ..., and again from 0 at every start of a document."""
    positions = np.arange(length, dtype=np.int64)
    if len(document_starts) == 0:
        return positions
    starts = np.zeros(length, dtype=np.int64)
    starts[document_starts] = document_starts
    return positions - np.maximum.accumulate(starts)


def attention_mask(length: int, document_starts: Sequence[int] | Array = ()) -> Array:
    """bool [1, length, length], True where query (row) must not see key (column): later tokens, earlier documents."""
    masked = np.triu(np.ones((length, length), dtype=bool), k=1)
    for start in document_starts:
        masked[start:, :start] = True
    return masked[None]


def starts_after_eod(tokens: Array, eod: int) -> Array:
    """Positions at which a document starts because the token before them ends one."""
    starts = np.flatnonzero(tokens == eod) + 1
    return starts[starts < len(tokens)]


def cumulative_lengths(length: int, document_starts: Sequence[int] | Array) -> tuple[Array, int]:
    """Document bounds for variable-length attention: (int32 [length + 1] padded with `length`, longest document)."""
    bounds = np.full(length + 1, length, dtype=np.int32)
    bounds[0] = 0
    bounds[1 : len(document_starts) + 1] = document_starts
    return bounds, int(np.diff(bounds).max())
