"""all_gather: every rank keeps its queries and gathers all keys and values (Dubey et al., "The Llama 3 Herd of Models",
2024, section 3.3.2).

Causal attention then is two ordinary calls, because a rank's tokens are two contiguous pieces:

    queries of piece j  x  keys of pieces 0 .. j        the queries being the last of those positions

In backward the gradients of keys and values are summed while they are scattered. Memory for them is that of the whole
sequence, in one layer at a time; with grouped queries they are few.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.context_parallel.sharding import pieces_of_rank, to_sequence_order
from megatron.core.packed_seq_params import Documents
from megatron.core.process_groups_config import Group
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.core_attention.base import AttentionBackend
from megatron.core.transformer.core_attention.documents import attention_in_documents


class GatheredKeysAttention:
    """Attention over sequences whose zigzag shards the group's ranks hold."""

    def __init__(self, backend: AttentionBackend, group: Group, *, has_window: bool = False) -> None:
        self.backend, self.group, self.has_window = backend, group, has_window
        self.name = f"keys and values gathered from {group.size()} ranks, {backend.name}"

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | Documents | None,
        training: bool,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See SequenceAttention."""
        key, value = self._gathered(key, value)  # [s, b, g, d]
        if isinstance(attention_mask, Tensor) and not self.has_window:
            return self.backend(query, key, value, attention_mask, training, sinks)
        pieces = pieces_of_rank(self.group.rank(), self.group.size())
        length = query.shape[0] // 2
        contexts = []
        for index, (queries, piece) in enumerate(zip(query.split(length), pieces, strict=True)):
            end = (piece + 1) * length
            if isinstance(attention_mask, Documents):
                inputs, first = (queries, key, value), end - length
                contexts.append(attention_in_documents(self.backend, inputs, attention_mask, first, training, sinks))
            else:
                mask = None
                if attention_mask is not None:
                    mask = attention_mask[..., index * length : (index + 1) * length, :end]
                contexts.append(self.backend(queries, key[:end], value[:end], mask, training, sinks))
        return torch.cat(contexts)

    def _gathered(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.stack((key, value), dim=1)  # [s/cp, 2, b, g, d]: one collective
        whole = to_sequence_order(gather_from_sequence_parallel_region(both, self.group), self.group.size())
        return whole[:, 0], whole[:, 1]
