# SPDX-License-Identifier: Apache-2.0
"""Attention through torch's scaled_dot_product_attention: one operator, several kernels.

Its flash kernels want queries, keys and values of one width. Narrower ones are padded with zeros, which change neither
scores nor the rest of the output, and the output is cut back; the kernels that take several widths as they are store
all scores (on the CPU) or are slower.

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

from megatron.core.device import is_cpu
from megatron.core.transformer.core_attention.interface import AttentionBackend, AttentionInputs, AttentionOptions

_SMALLEST_BLOCK = 256
"""Queries in a block of a layer with a window, at least; a quarter of a wide window."""
_KERNELS: dict[str, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "fused": SDPBackend.CUDNN_ATTENTION,
    "unfused": SDPBackend.MATH,
}


class SDPAttention(AttentionBackend):
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

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """See CoreAttention."""
        assert inputs.sinks is None and self.options.softcap is None, "torch's operator has neither sinks nor a bound"
        visible, queries, keys = inputs.visible, inputs.query.shape[0], inputs.key.shape[0]
        # Without a window the causal kernels skip the hidden half by themselves.
        if visible.window_reaches(keys):
            return self._attend_at_once(inputs)
        assert visible.window is not None
        # A block computes up to (window + block) keys per query: a quarter of the window wastes little, and products
        # stay large.
        size = max(_SMALLEST_BLOCK, visible.window // 4)
        blocks = visible.blocks(queries, keys, size)
        return torch.cat([self._attend_at_once(inputs.cut(rows, seen)) for rows, seen in blocks])

    def _attend_at_once(self, inputs: AttentionInputs) -> Tensor:
        """One call of the operator."""
        query, key, value, visible = inputs.query, inputs.key, inputs.value, inputs.visible
        # Told that attention is causal, the kernels leave out the hidden half; they mean s = t by it.
        is_square = query.shape[0] == key.shape[0] and visible.window_reaches(key.shape[0])
        is_causal = visible.causal and visible.mask is None and is_square
        hidden = None if is_causal else inputs.build_mask()
        heads_per_group = query.shape[2] // key.shape[2]
        if hidden is not None and heads_per_group > 1 and not is_cpu(query):
            # Only its math kernel, which stores all scores, takes both a mask and grouped heads there.
            key, value = (x.repeat_interleave(heads_per_group, dim=2) for x in (key, value))
        width = value.shape[-1]
        # The math and cuDNN kernels take values of another width as they are.
        is_padded = width != query.shape[-1] and self.kernel in (None, SDPBackend.FLASH_ATTENTION)
        if is_padded:
            query, key, value = _padded(query, key, value)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [s, b, n, d] -> [b, n, s, d], views
        with self._chosen():
            context = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if hidden is None else ~hidden,  # torch: True takes part
                dropout_p=self.options.dropout if inputs.training else 0.0,
                is_causal=is_causal,
                scale=self.options.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        context = context[..., :width] if is_padded else context
        return context.permute(2, 0, 1, 3).flatten(2)  # [b, n, s, dv] -> [s, b, n * dv]


def _padded(*tensors: Tensor) -> list[Tensor]:
    """Pad all tensors with zeros, in the last dimension, to the width of the widest."""
    widest = max(x.shape[-1] for x in tensors)
    # One that is wide enough stays itself: padding by nothing would copy it.
    return [x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])) for x in tensors]
