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
from megatron.core.transformer.layer_patterns import window_of_layer
from megatron.core.transformer.transformer_config import TransformerConfig


class AttentionBackend(Protocol):
    """softmax(scale * Q K^T) V with a causal or a given mask."""

    name: str
    """For the log: which implementation, in words."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        training: bool,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """query [s, b, n, d], key and value [t, b, g, d] -> [s, b, n * d].

        attention_mask: bool [b or 1, 1, s, t], True where a position may not be seen; causal when None, the queries
        being the last s of the t positions. In a layer with a sliding window they always are, and a mask only hides
        more. sinks: float32 [n], the score of a further key without value.
        """
        ...


class SequenceAttention(Protocol):
    """Attention over sequences that may be packed documents, or that several ranks share."""

    name: str

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | Documents | None,
        training: bool,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """query [s/cp, b, n, d], key and value [s/cp, b, g, d] -> [s/cp, b, n * d].

        attention_mask: bool [b or 1, 1, s/cp, s], this rank's queries and all keys in the order of the sequence; or the
        documents of the whole sequence, where b = 1; causal when None. sinks: as above, of the n heads at hand.
        """
        ...


@dataclass(frozen=True)
class AttentionOptions:
    """What of the config concerns core attention, in one layer."""

    scale: float
    """Factor on the scores, such as 1 / sqrt(d)."""
    layer_number: int
    dropout: float
    softmax_in_fp32: bool
    query_key_layer_scaling: bool
    masked_softmax_fusion: bool
    window: int | None
    """Tokens before itself that a token sees; None for all."""
    softcap: float | None
    """Bound on the scores, score -> softcap * tanh(score / softcap), before masks and sinks."""

    @classmethod
    def of(cls, config: TransformerConfig, layer_number: int) -> AttentionOptions:
        """The options of one layer, counted from 1."""
        assert config.kv_channels is not None
        return cls(
            scale=config.attention_scale,
            layer_number=layer_number,
            dropout=config.attention_dropout,
            softmax_in_fp32=config.attention_softmax_in_fp32 or config.apply_query_key_layer_scaling,
            query_key_layer_scaling=config.apply_query_key_layer_scaling,
            masked_softmax_fusion=config.masked_softmax_fusion and not config.compile,
            window=window_of_layer(config, layer_number),
            softcap=config.attn_logit_softcapping,
        )


def causal_mask(queries: int, keys: int, device: torch.device, window: int | None = None) -> Tensor:
    """[s, t], True where a query may not look: the queries are the last of the key positions, and with a window see
    only as many keys before their own."""
    every = torch.ones(queries, keys, dtype=torch.bool, device=device)
    future = every.triu(keys - queries + 1)
    return future if window is None else future | every.tril(keys - queries - window - 1)


def whole_mask(attention_mask: Tensor | None, query: Tensor, key: Tensor, window: int | None) -> Tensor | None:
    """What a backend hides from queries [s, ...] of keys [t, ...]; None where nothing need be hidden."""
    queries, keys = query.shape[0], key.shape[0]
    if window is None or (keys <= window + 1 and attention_mask is None):
        return causal_mask(queries, keys, query.device) if attention_mask is None and queries > 1 else attention_mask
    band = causal_mask(queries, keys, query.device, window)
    return band if attention_mask is None else band | attention_mask
