"""Attention through torch's scaled_dot_product_attention: one operator, several kernels.

The [s, b, n, d] tensors are handed over as [b, n, s, d] views; the CPU flash kernel reads them in place and answers in
the same memory order, so nothing is copied on the way in or out. All its kernels compute scores and softmax in float32.

A sliding window is a mask, and torch's kernels compute what a mask hides. So queries are taken in blocks, each with the
keys from a window before its first query on:

    window of 3:      keys
    queries 0-3    |#...    |         work and memory grow with sequence x (window + block), not with its square
    queries 4-7    |.####...|
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.core.transformer.core_attention.base import AttentionOptions, whole_mask

_SMALLEST_BLOCK = 256
"""Queries in a block of a layer with a window, at least; a quarter of a wide window."""
_KERNELS: dict[str, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "fused": SDPBackend.CUDNN_ATTENTION,
    "unfused": SDPBackend.MATH,
}


class SDPAttention:
    """softmax(scale * Q K^T) V by torch's operator, its own choice of kernel or a given one."""

    def __init__(self, options: AttentionOptions, kernel: str) -> None:
        self.options = options
        self.kernel = _KERNELS.get(kernel)
        self.name = "torch scaled_dot_product_attention, " + ("its choice" if kernel == "auto" else kernel) + " kernel"
        if options.window is not None:
            self.name += ", by blocks of queries with the keys in their window"

    def _chosen(self) -> AbstractContextManager[None]:
        if self.kernel is None:
            return contextlib.nullcontext()
        return sdpa_kernel(self.kernel)

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
        assert sinks is None and self.options.softcap is None, "torch's operator has neither sinks nor a bound"
        window, queries, keys = self.options.window, query.shape[0], key.shape[0]
        if window is None or keys <= window + 1:
            return self._attend((query, key, value), attention_mask, window, training)
        contexts, block = [], max(_SMALLEST_BLOCK, window // 4)
        for first in range(0, queries, block):
            end = min(first + block, queries)
            seen = slice(max(0, keys - queries + first - window), keys - queries + end)
            rows = slice(first, end) if attention_mask is not None and attention_mask.shape[-2] > 1 else slice(None)
            mask = None if attention_mask is None else attention_mask[..., rows, seen]
            contexts.append(self._attend((query[first:end], key[seen], value[seen]), mask, window, training))
        return torch.cat(contexts)

    def _attend(
        self, inputs: tuple[Tensor, Tensor, Tensor], attention_mask: Tensor | None, window: int | None, training: bool
    ) -> Tensor:
        """The queries being the last of the positions of the keys."""
        query, key, value = inputs
        sees_all = window is None or key.shape[0] <= window + 1
        is_causal = attention_mask is None and sees_all and query.shape[0] == key.shape[0]
        if not is_causal:
            attention_mask = whole_mask(attention_mask, query, key, window)
        heads_per_group = query.shape[2] // key.shape[2]
        if attention_mask is not None and heads_per_group > 1 and not query.is_cpu:
            # Only its math kernel, which stores all scores, takes both a mask and grouped heads there.
            key, value = (x.repeat_interleave(heads_per_group, dim=2) for x in (key, value))
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [s, b, n, d] -> [b, n, s, d], views
        with self._chosen():
            context = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if attention_mask is None else ~attention_mask,  # torch: True takes part
                dropout_p=self.options.dropout if training else 0.0,
                is_causal=is_causal,
                scale=self.options.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        return context.permute(2, 0, 1, 3).flatten(2)  # [b, n, s, d] -> [s, b, n * d]
