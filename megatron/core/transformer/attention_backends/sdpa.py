"""Attention through torch's scaled_dot_product_attention: one operator, several kernels.

The [s, b, n, d] tensors are handed over as [b, n, s, d] views; the CPU flash kernel reads them in place and answers in
the same memory order, so nothing is copied on the way in or out. All its kernels compute scores and softmax in float32.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.core.transformer.attention_backends.base import AttentionOptions, whole_mask

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
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [s, b, n, d] -> [b, n, s, d], views
        queries, keys = q.shape[2], k.shape[2]
        is_causal = attention_mask is None and self.options.window is None and queries == keys
        if not is_causal:
            attention_mask = whole_mask(attention_mask, query, key, self.options.window)
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
