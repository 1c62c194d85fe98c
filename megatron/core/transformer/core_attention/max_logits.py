# SPDX-License-Identifier: Apache-2.0
"""The largest attention score of each head, measured next to any backend."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.transformer.core_attention.block_kernels import multiply_in_float32
from megatron.core.transformer.core_attention.interface import AttentionBackend, AttentionInputs, AttentionOptions

_BLOCK = 128
"""Queries whose scores are in memory at a time."""


class MaxLogits:
    """A backend that notes scale * max(q k) of each head over everything it sees in training, before any bound on
    scores. Costs one more product of queries and keys, a block at a time."""

    def __init__(self, backend: AttentionBackend, options: AttentionOptions) -> None:
        self.backend, self.options = backend, options
        self.name = f"{backend.name}, largest scores measured"
        self.largest: Tensor | None = None
        """float32 [n]; None before the first call."""

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        """See CoreAttention."""
        # Scores are measured document by document, and attention is the backend's: it may have one call for all.
        is_whole = inputs.visible.documents is None and inputs.visible.chunk is None
        for part in (inputs,) if is_whole else inputs.by_segment():
            self._note(part)
        return self.backend(inputs)

    def _note(self, inputs: AttentionInputs) -> None:
        # Only training steps count: evaluation would mix other data into what optimizers clip by.
        if inputs.training:
            found = self._measure(inputs)
            self.largest = found if self.largest is None else torch.maximum(self.largest, found)

    @torch.no_grad()
    def _measure(self, inputs: AttentionInputs) -> Tensor:
        """Largest scaled score of each head over everything it sees, float32 [n]."""
        query, key, mask = inputs.query.detach(), inputs.key.detach(), inputs.build_mask()
        key = key.repeat_interleave(query.shape[2] // key.shape[2], dim=2).permute(1, 2, 3, 0)  # [b, n, d, t]
        largest = query.new_full((query.shape[2],), -torch.inf, dtype=torch.float32)
        # By blocks: all scores of a long sequence at once are exactly what backends avoid keeping.
        for first in range(0, query.shape[0], _BLOCK):
            rows = slice(first, first + _BLOCK)
            scores = multiply_in_float32(query[rows].permute(1, 2, 0, 3), key) * self.options.scale  # [b, n, block, t]
            if mask is not None:
                scores = scores.masked_fill(mask[..., rows if mask.shape[-2] > 1 else slice(None), :], -torch.inf)
            largest = torch.maximum(largest, scores.amax(dim=(0, 2, 3)))
        return largest
