"""Attention within documents that are packed into one sequence, by any backend: one call for each document."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.packed_seq_params import Documents
from megatron.core.transformer.core_attention.base import AttentionBackend


class ByDocument:
    """A backend that also takes Documents for a mask."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend = backend
        self.name = backend.name

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | Documents | None,
        training: bool,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See AttentionBackend. With Documents, query, key and value are the whole packed sequence [t, 1, heads, d]."""
        if not isinstance(attention_mask, Documents):
            return self.backend(query, key, value, attention_mask, training, sinks)
        return attention_in_documents(self.backend, (query, key, value), attention_mask, 0, training, sinks)


def attention_in_documents(
    backend: AttentionBackend,
    inputs: tuple[Tensor, Tensor, Tensor],
    documents: Documents,
    first: int,
    training: bool,
    sinks: Tensor | None = None,
) -> Tensor:
    """[q, 1, n, d] queries, which stand at `first` and after it in the packed sequence -> [q, 1, n * d].

    inputs: query, and key and value with at least all tokens before the last query. Work is the sum over documents, not
    the square of the sequence.
    """
    query, key, value = inputs
    contexts = []
    for start, begin, end in documents.stretches(first, first + query.shape[0]):
        own = query[begin - first : end - first]
        # Queries are the last of the positions they are given with: causal within the document.
        contexts.append(backend(own, key[start:end], value[start:end], None, training, sinks))
    return torch.cat(contexts)
