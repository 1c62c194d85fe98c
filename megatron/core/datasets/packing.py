"""Pack pieces of different lengths into sequences of one length, with little room left over."""

from __future__ import annotations

import bisect
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@runtime_checkable
class PackedDocuments(Protocol):
    """A dataset whose samples are packed documents, which can also be had one by one."""

    def document_lengths(self, index: int) -> list[int]:
        """Tokens of each document in sample `index`, which are not read for it; padding is none of them."""
        ...

    def document(self, index: int, number: int) -> dict[str, Any]:
        """One of these documents alone: tokens, labels, position_ids int64 [t], loss_mask float32 [t]."""
        ...

    def locate(self, index: int) -> str:
        """Where sample `index` comes from, for messages."""
        ...


def pack(lengths: Array, capacity: int, random: np.random.RandomState) -> tuple[Array, Array]:
    """Each sequence takes the longest piece that is left, then again and again the longest that still fits.

    lengths: 1 to capacity each. Returns (order int64 [pieces], bounds int64 [sequences + 1]): sequence k holds the
    pieces order[bounds[k] : bounds[k + 1]]. Pieces of the same length are taken in a random order.
    """
    shuffled = random.permutation(len(lengths))
    by_length = shuffled[np.argsort(lengths[shuffled], kind="stable")]
    distinct, firsts = np.unique(lengths[by_length], return_index=True)
    left = np.diff([*firsts, len(by_length)]).tolist()  # pieces left of each distinct length
    sizes, heads = distinct.tolist(), firsts.tolist()
    order: list[int] = []
    bounds = [0]
    while sizes:
        room = capacity
        while (k := bisect.bisect_right(sizes, room) - 1) >= 0:
            order.append(heads[k])
            room -= sizes[k]
            heads[k] += 1
            left[k] -= 1
            if not left[k]:
                del sizes[k], heads[k], left[k]
        bounds.append(len(order))
    return by_length[np.asarray(order, dtype=np.int64)], np.asarray(bounds, dtype=np.int64)
