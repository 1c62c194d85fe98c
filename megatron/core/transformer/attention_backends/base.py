"""What every implementation of core attention takes and returns.

s: queries, t: keys (more than s when a cache holds earlier tokens), b: batch, n: query heads, g: key-value heads,
d: width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.packed_seq_params import Documents
from megatron.core.transformer.transformer_config import TransformerConfig


class AttentionBackend(Protocol):
    """softmax(scale * Q K^T) V with a causal or a given mask."""

    name: str
    """For the log: which implementation, in words."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, training: bool
    ) -> Tensor:
        """query [s, b, n, d], key and value [t, b, g, d] -> [s, b, n * d].

        attention_mask: bool [b or 1, 1, s, t], True where a position may not be seen; causal when None, the queries
        being the last s of the t positions.
        """
        ...


class SequenceAttention(Protocol):
    """Attention over sequences that may be packed documents, or that several ranks share."""

    name: str

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | Documents | None, training: bool
    ) -> Tensor:
        """query [s/cp, b, n, d], key and value [s/cp, b, g, d] -> [s/cp, b, n * d].

        attention_mask: bool [b or 1, 1, s/cp, s], this rank's queries and all keys in the order of the sequence; or the
        documents of the whole sequence, where b = 1; causal when None.
        """
        ...


@dataclass(frozen=True)
class AttentionOptions:
    """What of the config concerns core attention, in one layer."""

    scale: float
    """Factor on the scores: 1 / sqrt(d)."""
    layer_number: int
    dropout: float
    softmax_in_fp32: bool
    query_key_layer_scaling: bool
    masked_softmax_fusion: bool

    @classmethod
    def of(cls, config: TransformerConfig, layer_number: int) -> AttentionOptions:
        """The options of one layer, counted from 1."""
        assert config.kv_channels is not None
        return cls(
            scale=config.kv_channels**-0.5,
            layer_number=layer_number,
            dropout=config.attention_dropout,
            softmax_in_fp32=config.attention_softmax_in_fp32 or config.apply_query_key_layer_scaling,
            query_key_layer_scaling=config.apply_query_key_layer_scaling,
            masked_softmax_fusion=config.masked_softmax_fusion and not config.compile,
        )


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """[s, t], True where a query may not look: the queries are the last of the key positions."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu_(keys - queries + 1)
