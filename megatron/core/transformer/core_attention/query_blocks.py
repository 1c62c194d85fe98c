"""Attention by blocks of queries, each with the keys that it sees: bounded scores and sinks, which torch's operator
does not have, with windows, masks and dropout.

Forward keeps, besides the inputs, the output and the logarithm of each query's sum; backward computes the scores of one
block after the other anew (Dao et al., "FlashAttention", 2022). Scores and softmax are in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.transformer.core_attention.base import AttentionOptions
from megatron.core.transformer.core_attention.block_attention import PlainKernel, grad_of_sinks, with_sinks

_BLOCK = 128
"""Queries in a block."""


@dataclass(frozen=True)
class _Call:
    """What one call is about, besides its tensors that need gradients."""

    kernel: PlainKernel
    window: int | None
    mask: Tensor | None
    seed: int | None

    def blocks(self, queries: int, keys: int, device: torch.device) -> Iterator[tuple[slice, slice, dict[str, Any]]]:
        """(rows, their keys, the kernel's options) of each block."""
        before = keys - queries  # keys of an earlier call, from a cache
        for number, first in enumerate(range(0, queries, _BLOCK)):
            end = min(first + _BLOCK, queries)
            is_masked_only = self.mask is not None and self.window is None  # such a mask says all
            start = 0 if self.window is None else max(0, before + first - self.window)
            rows, seen = slice(first, end), slice(start, keys if is_masked_only else before + end)
            hidden = None
            if not is_masked_only:
                own = torch.arange(before + first, before + end, device=device).unsqueeze(1)
                theirs = torch.arange(seen.start, seen.stop, device=device)
                hidden = theirs > own if self.window is None else (theirs > own) | (theirs < own - self.window)
            if self.mask is not None:
                given = self.mask[..., rows if self.mask.shape[-2] > 1 else slice(None), seen]
                hidden = given if hidden is None else hidden | given
            seed = None if self.seed is None else self.seed + number
            yield rows, seen, {"causal": False, "mask": hidden, "seed": seed}


class _QueryBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, call: _Call) -> Tensor:
        q, k, v = (_heads_first(x) for x in (query, key, value))
        output = torch.empty_like(query, memory_format=torch.contiguous_format)  # [s, b, n, d]
        out, log_sum = _heads_first(output), query.new_empty(q.shape[:-1], dtype=torch.float32)
        for rows, seen, options in call.blocks(q.shape[2], k.shape[2], q.device):
            part, logs = call.kernel.forward(q[:, :, rows], k[:, :, seen], v[:, :, seen], **options)
            if sinks is not None:
                part, logs = with_sinks(part, logs, sinks)
            out[:, :, rows], log_sum[:, :, rows] = part, logs
        ctx.call = call
        ctx.save_for_backward(query, key, value, sinks, output, log_sum)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        query, key, value, sinks, output, log_sum = ctx.saved_tensors
        call: _Call = ctx.call
        q, k, v, out, grad = (_heads_first(x) for x in (query, key, value, output, grad_output))
        grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
        grad_key, grad_value = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (key, value))
        grad_q, grad_k, grad_v = (_heads_first(x) for x in (grad_query, grad_key, grad_value))
        for rows, seen, options in call.blocks(q.shape[2], k.shape[2], q.device):
            inputs, merged = (q[:, :, rows], k[:, :, seen], v[:, :, seen]), (out[:, :, rows], log_sum[:, :, rows])
            add_q, add_k, add_v = call.kernel.backward(grad[:, :, rows], inputs, merged, **options)
            grad_q[:, :, rows] = add_q
            grad_k[:, :, seen] += add_k
            grad_v[:, :, seen] += add_v
        grad_sinks = None if sinks is None else grad_of_sinks(grad, out, log_sum, sinks)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), grad_sinks, None


class QueryBlocksAttention:
    """softmax(bounded scale * Q K^T) V with windows and sinks."""

    name = "blocks of queries with the keys they see, scores computed anew in backward"

    def __init__(self, options: AttentionOptions) -> None:
        self.options = options
        self.kernel = PlainKernel(options.scale, options.dropout, options.softcap)

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
        # From the stream that the caller chose, on the CPU: nothing has to wait for the device.
        seed = int(torch.randint(2**40, ())) if training and self.options.dropout else None
        call = _Call(self.kernel, self.options.window, attention_mask, seed)
        result: Tensor = _QueryBlocks.apply(query, key, value, sinks, call)
        return result.flatten(2)  # [s, b, n, d] -> [s, b, n * d]


def _heads_first(x: Tensor) -> Tensor:
    """[s, b, n, d] -> [b, n, s, d], a view."""
    return x.permute(1, 2, 0, 3)
