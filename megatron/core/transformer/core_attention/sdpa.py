# SPDX-License-Identifier: Apache-2.0
"""Attention through torch's scaled_dot_product_attention: one operator, several kernels.

On a GPU the kernels are tried in an order that is ours, not torch's, which differs between releases and GPUs. cuDNN's
is the fastest, but makes a plan for every new length (tens of milliseconds each, kept for ever): it is for sequences of
one length, as in training, and not for documents, or for generation, which has a new length with every token. Its
gradients are not the same in every run, so that --deterministic-mode leaves it out.

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
_WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_NAMES = {
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
    SDPBackend.MATH: "math",
}


class SDPAttention(AttentionBackend):
    """softmax(scale * Q K^T) V by torch's operator: a given kernel, or on a GPU the first that can, in a fixed
    order."""

    def __init__(self, options: AttentionOptions, kernel: str, device: torch.device | None = None) -> None:
        """kernel: as --attention-backend. device: where it runs; the CPU when None."""
        self.options = options
        self.kernel = _KERNELS.get(kernel)
        self.order: list[SDPBackend] = [] if self.kernel is None else [self.kernel]
        chosen = ("its choice" if kernel == "auto" else kernel) + " kernel"
        self.runs_on_gpu = device is not None and not is_cpu(device)
        if self.kernel is None and self.runs_on_gpu:
            self.order = [*([] if options.deterministic else [SDPBackend.CUDNN_ATTENTION]), *_WITHOUT_PLANS]
            chosen = "the first that can of " + ", ".join(_NAMES[kernel] for kernel in self.order)
        self.name = f"torch scaled_dot_product_attention, {chosen}"
        if options.window is not None:
            self.name += ", by blocks of queries with the keys in their window"

    def _chosen(self, has_one_length: bool) -> AbstractContextManager[None]:
        """has_one_length: whether further calls will have these lengths."""
        if not self.order:
            return contextlib.nullcontext()
        order = self.order if self.kernel is not None or has_one_length else _WITHOUT_PLANS
        return sdpa_kernel(order, set_priority=True)

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
        is_last = visible.causal and visible.mask is None and visible.window_reaches(key.shape[0]) and not is_square
        # A compiler cannot see into torch's class of such biases.
        if is_last and query.shape[0] > 1 and self.runs_on_gpu and not torch.compiler.is_compiling():
            return self._attend_to_earlier_keys(inputs)
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
        with self._chosen(inputs.training and is_square and not inputs.is_part):
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

    def _attend_to_earlier_keys(self, inputs: AttentionInputs) -> Tensor:
        """Causal attention of the last positions on a GPU, without a mask: torch's "lower right" causal bias."""
        from torch.nn.attention.bias import causal_lower_right  # loads torch.compile, which few runs need

        query, key, value = inputs.query, inputs.key, inputs.value
        heads_per_group = query.shape[2] // key.shape[2]
        if heads_per_group > 1:  # no kernel that takes such a bias and groups takes these operands
            key, value = (x.repeat_interleave(heads_per_group, dim=2) for x in (key, value))
        width = value.shape[-1]
        query, key, value = _padded(query, key, value)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        with self._chosen(False):
            context = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=causal_lower_right(q.shape[2], k.shape[2]),
                dropout_p=self.options.dropout if inputs.training else 0.0,
                scale=self.options.scale,
            )
        return context[..., :width].permute(2, 0, 1, 3).flatten(2)


def _padded(*tensors: Tensor) -> list[Tensor]:
    """Pad all tensors with zeros, in the last dimension, to the width of the widest."""
    widest = max(x.shape[-1] for x in tensors)
    # One that is wide enough stays itself: padding by nothing would copy it.
    return [x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])) for x in tensors]
