# SPDX-License-Identifier: Apache-2.0
"""Meaning of --attention-backend auto and flash on a GPU: each kind of attention through the kernel that is made for
it.

| what                                             | kernel                                                           |
|--------------------------------------------------|------------------------------------------------------------------|
| a causal or full sequence, also one new token    | torch's operator, in the order of `sdpa.py`                      |
| packed documents, chunks                         | flash, all sequences in one call                                 |
| sliding windows; more keys than queries; sinks   | flash                                                            |
| bounds on scores                                 | flex attention, compiled                                         |
| values of another width than keys                | torch's operator, padded; cuDNN, flash 3 or 4, flex without      |
| a given mask                                     | torch's operator                                                 |

Documents, windows and two widths go to another row of the table `attention` (megatron/core/operation_table.py) where a
trial at start (attention_trial.py) has shown that it is faster.

What the flash kernel does not take (float32, heads of more than 256 channels, a GPU before Ampere) goes where it goes
on the CPU: documents one after another, windows and sinks by blocks of queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.operation_table import find_flash_problem
from megatron.core.transformer.core_attention.block_kernels import Sequences
from megatron.core.transformer.core_attention.flash import FlashCall, flash_attention
from megatron.core.transformer.core_attention.flex import FlexAttention
from megatron.core.transformer.core_attention.interface import (
    AttentionBackend,
    AttentionInputs,
    AttentionOptions,
    KeptByShape,
)
from megatron.core.transformer.core_attention.query_blocks import QueryBlocksAttention
from megatron.core.transformer.core_attention.sdpa import SDPAttention


class CUDAAttention(AttentionBackend):
    """softmax(scale * Q K^T) V on a GPU, by the first of the doors above that fits."""

    def __init__(
        self,
        options: AttentionOptions,
        kernel: str,
        device: torch.device,
        flash_problem: str | None = None,
        flex_problem: str | None = None,
        way: str | None = None,
    ) -> None:
        """kernel: auto or flash, as --attention-backend. flash_problem: why the flash kernel cannot compute these
        layers on this device; None where it can. flex_problem: why flex attention cannot be compiled. way: the row of
        `attention` that a trial has chosen for bands and two widths; None for what needs no trial."""
        self.options, self.flash_problem, self.flex_problem, self.way = options, flash_problem, flex_problem, way
        by_flex = way == "flex attention" or (options.softcap is not None and flex_problem is None)
        self.flex = FlexAttention(options) if by_flex else None
        self.cudnn = SDPAttention(options, "fused", device) if way == "cuDNN with two widths" else None
        self.keeps_widths = keeps_widths(way)
        self.operator = SDPAttention(options, kernel, device)
        self.blocks = QueryBlocksAttention(options)
        self._chunks = KeptByShape[Sequences]()
        self.name = self._describe()

    def _describe(self) -> str:
        options = self.options
        if self.flex is not None and options.softcap is not None:
            return f"{self.flex.name}; in evaluation and with masks or dropout {self.blocks.name}"
        if options.softcap is not None:
            return f"{self.blocks.name} (not by flex attention: {self.flex_problem})"
        if self.way is not None:
            return f"{self.operator.name}; documents, windows and values of another width than keys by {self.way}"
        if self.flash_problem is not None:
            inner = self.blocks if options.has_sinks else self.operator
            return f"{inner.name} (not by the flash kernel: {self.flash_problem})"
        kinds = {
            f"a window of {(options.window or 0) + 1} tokens": options.window is not None,
            f"all chunks of {options.chunk} tokens in one call": options.chunk is not None,
            "sinks": options.has_sinks,
        }
        special = [kind for kind, is_there in kinds.items() if is_there]
        if special:
            return f"torch's flash kernel, {', '.join(special)}"
        return f"{self.operator.name}; packed documents in one call of the flash kernel"

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        """See CoreAttention."""
        visible = inputs.visible
        if self.flex is not None and self.flex.takes(inputs) and self._suits_flex(inputs):
            return self.flex(inputs)
        if visible.documents is None and visible.chunk is None:
            return self.attend(inputs)
        if not self._takes(inputs):
            return super().__call__(inputs)
        return self._attend_to_sequences(inputs)

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """See AttentionBackend."""
        visible, queries, keys = inputs.visible, inputs.query.shape[0], inputs.key.shape[0]
        has_all = _has_all(inputs)
        if inputs.sinks is None and self.options.softcap is None and (has_all or visible.mask is not None):
            if _has_two_widths(inputs) and visible.mask is None and queries == keys:
                if self.cudnn is not None and inputs.training and not inputs.is_part:
                    return self.cudnn(inputs)
                if self.keeps_widths and self._takes(inputs):
                    return self._attend_by_flash(inputs)
            return self.operator(inputs)
        if self._takes(inputs):
            return self._attend_by_flash(inputs)
        if inputs.sinks is not None or self.options.softcap is not None:
            return self.blocks(inputs)
        return self.operator(inputs)

    def _suits_flex(self, inputs: AttentionInputs) -> bool:
        """Return whether it is more than attention of one width to all earlier tokens."""
        is_divided = inputs.visible.documents is not None or inputs.visible.chunk is not None
        return self.options.softcap is not None or is_divided or _has_two_widths(inputs) or not _has_all(inputs)

    def _attend_by_flash(self, inputs: AttentionInputs) -> Tensor:
        # [s, b, heads, width] -> [b, s, heads, width], views
        q, k, v = (x.transpose(0, 1) for x in (inputs.query, inputs.key, inputs.value))
        return flash_attention(q, k, v, inputs.sinks, self._call(inputs)).transpose(0, 1).flatten(2)

    def _takes(self, inputs: AttentionInputs) -> bool:
        """Return whether the flash kernel can compute it."""
        if self.flash_problem is not None or inputs.visible.mask is not None or self.options.softcap is not None:
            return False
        return find_flash_problem(inputs.query.dtype, inputs.query.shape[-1], inputs.value.shape[-1]) is None

    def _call(self, inputs: AttentionInputs, sequences: Sequences | None = None) -> FlashCall:
        visible = inputs.visible
        # A window that hides nothing is left out: without one the kernel has a faster way through a triangle.
        longest = inputs.key.shape[0] if sequences is None else sequences.longest_keys
        window = visible.window if visible.causal and not visible.window_reaches(longest) else None
        dropout = self.options.dropout if inputs.training else 0.0
        return FlashCall(self.options.scale, visible.causal, window, sequences, dropout, self.keeps_widths)

    def _attend_to_sequences(self, inputs: AttentionInputs) -> Tensor:
        """Documents or chunks in one call, the samples' one after another."""
        sequences, first_key = self._find_sequences(inputs)
        # [s, b, heads, width] -> [b * s, heads, width]: a view for one sample, as packed documents are.
        q, k, v = (
            x.transpose(0, 1).flatten(0, 1) for x in (inputs.query, inputs.key[first_key:], inputs.value[first_key:])
        )
        out = flash_attention(q, k, v, inputs.sinks, self._call(inputs, sequences))
        return out.unflatten(0, (inputs.query.shape[1], -1)).transpose(0, 1).flatten(2)

    def _find_sequences(self, inputs: AttentionInputs) -> tuple[Sequences, int]:
        """The bounds of the documents or chunks, and the first key that any query sees."""
        query, keys, visible = inputs.query, inputs.key.shape[0], inputs.visible
        before, device = keys - query.shape[0], query.device
        first_key = next(inputs.segments()).start

        def build() -> Sequences:
            segments = list(inputs.segments()) * query.shape[1]
            # A document of which this rank has the end only has more keys than queries, which are the last of them.
            return Sequences.build(
                [end - first for _, first, end in segments], [end - start for start, _, end in segments], device
            )

        # Every layer has the same bounds, which are copied to the device.
        key = (before, keys, query.shape[1], visible.chunk, device)
        if visible.documents is not None:
            return visible.documents.keep(key, build), first_key
        return self._chunks.find(key, build, training=inputs.training), first_key


def keeps_widths(way: str | None) -> bool:
    """Return whether a row of `attention` is a flash kernel that takes values of another width than keys."""
    return way in ("flash attention 3", "flash attention 4")


def _has_two_widths(inputs: AttentionInputs) -> bool:
    return inputs.query.shape[-1] != inputs.value.shape[-1]


def _has_all(inputs: AttentionInputs) -> bool:
    """Return whether every query sees all keys, or all up to its position."""
    visible, queries, keys = inputs.visible, inputs.query.shape[0], inputs.key.shape[0]
    return not visible.causal or (visible.window_reaches(keys) and queries in (1, keys))
