# SPDX-License-Identifier: Apache-2.0
"""Random tokens as packed documents: the data of measurements that need no files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

MOST_DOCUMENTS = 16
"""Of a sequence; every sample's bounds are padded to so many, so that samples can be stacked."""


class PackedDocuments(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sample i, a function of i: a sequence of random tokens, divided into documents of random lengths, or whole."""

    def __init__(self, samples: int, sequence: int, vocab: int, *, whole: bool) -> None:
        self.samples, self.sequence, self.vocab, self.whole = samples, sequence, vocab, whole

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        chance = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, self.vocab, (self.sequence + 1,), generator=chance)
        inner = torch.randint(1, self.sequence, (0 if self.whole else MOST_DOCUMENTS - 1,), generator=chance)
        ends = torch.cat((torch.zeros(1, dtype=inner.dtype), inner.sort().values))
        # Bounds that repeat are empty documents: as many bounds in every sample.
        padding = torch.full((MOST_DOCUMENTS + 1 - len(ends),), self.sequence)
        bounds = torch.cat((ends, padding)).int()
        starts = bounds[torch.searchsorted(bounds, torch.arange(self.sequence), right=True) - 1]
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.ones(self.sequence),
            "position_ids": torch.arange(self.sequence) - starts,
            "cu_seqlens": bounds,
        }


def build_packed_datasets(sequence: int, vocab: int, *, whole: bool) -> Callable[[Sequence[int | None]], list]:
    """What stands in for Recipe.build_datasets: samples of each split -> datasets. whole: one document a sequence."""

    def build(counts: Sequence[int | None]) -> list[PackedDocuments | None]:
        return [PackedDocuments(count, sequence, vocab, whole=whole) if count else None for count in counts]

    return build
