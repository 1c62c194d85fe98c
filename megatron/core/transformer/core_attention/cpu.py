"""What --attention-backend auto means on the CPU: blocks of queries where they pay, else torch's operator."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.fusions.causal_attention import blocked_causal_attention, probabilities_bytes
from megatron.core.transformer.core_attention.base import AttentionOptions
from megatron.core.transformer.core_attention.sdpa import SDPAttention

_MOST_BYTES_PER_LAYER = 64 * 2**20
"""Probabilities that a layer may keep for backward; torch's flash kernel keeps none."""


class CPUAttention:
    """Blocks of queries for plain causal float32 attention over short sequences; SDPAttention for everything else."""

    name = "blocks of queries for causal float32 up to 64 MiB of probabilities, else torch scaled_dot_product_attention"

    def __init__(self, options: AttentionOptions) -> None:
        self.options = options
        self.otherwise = SDPAttention(options, "auto")
        if options.window is not None:
            self.name = self.otherwise.name

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        training: bool,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See AttentionBackend."""
        is_whole = self.options.window is None or key.shape[0] <= self.options.window + 1
        if attention_mask is None and is_whole and self._fits(query, key) and not (training and self.options.dropout):
            return blocked_causal_attention(query, key, value, self.options.scale).flatten(2)  # -> [s, b, n * d]
        return self.otherwise(query, key, value, attention_mask, training, sinks)

    @staticmethod
    def _fits(query: Tensor, key: Tensor) -> bool:
        sequence, batch, heads, _ = query.shape
        return (
            query.shape == key.shape  # no cache of earlier tokens, one key-value head per query head
            and query.is_cpu
            and query.dtype == torch.float32
            and probabilities_bytes(sequence, batch * heads) <= _MOST_BYTES_PER_LAYER
        )
