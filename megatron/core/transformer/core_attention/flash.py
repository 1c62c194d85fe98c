# SPDX-License-Identifier: Apache-2.0
"""torch's flash kernel for GPUs, with what its scaled_dot_product_attention does not hand on to it.

The operator underneath takes four things more, all without a mask in memory and without repeating grouped keys:

    sequences   many of any lengths in one call, which lie one after another ("varlen")
    window      a band of keys before each query
    s < t       causal, the queries being the last of the positions
    L           the logarithm of each query's sum is returned, and backward takes L and O of a softmax over more than
                these keys: blocks can be merged (block_kernels.py), and sinks added

It wants 16-bit operands of one width, a multiple of 8 up to 256; others are padded with zeros, which change nothing.
Versions 3 and 4 of packages take values of another width as they are (`keeps_widths`).
(Dao, "FlashAttention-2", 2023.) `torch.nn.attention.varlen` is the same operator, without L in backward.

Not yet run on a GPU: tests replace `run_forward` and `run_backward` by their definition, and check the operator's
signature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.transformer.core_attention.block_kernels import (
    Gradients,
    PlainKernel,
    Rule,
    Sequences,
    add_sinks,
    compute_sinks_grad,
)

_MULTIPLE = 8


@dataclass(frozen=True)
class FlashCall:
    """Description of one call: softmax(scale * Q K^T) V, over which keys."""

    scale: float
    causal: bool
    """The queries are the last of the positions of the keys."""
    window: int | None = None
    """A query sees so many keys before its position, the queries being the last; None for all."""
    sequences: Sequences | None = None
    """Of operands [tokens, heads, width]; None for a batch [b, s, heads, width]."""
    dropout: float = 0.0
    keeps_widths: bool = False
    """The kernel takes values of another width than keys, as they are."""

    def band(self) -> tuple[int, int]:
        """Keys before and after its position that a query sees; -1 for all."""
        return (-1 if self.window is None else self.window), (0 if self.causal else -1)

    def takes(self, q: Tensor, v: Tensor) -> bool:
        """Return whether the kernel takes queries and values of these widths without padding."""
        return self.keeps_widths and q.shape[-1] % _MULTIPLE == 0 == v.shape[-1] % _MULTIPLE

    def lengths(self, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None, int, int]:
        """The operator's arguments on sequences."""
        if self.sequences is None:
            return None, None, q.shape[1], k.shape[1]
        queries, keys, longest_queries, longest_keys = self.sequences
        return queries, keys, longest_queries, longest_keys


class FlashResult(NamedTuple):
    """Outputs of the kernel."""

    out: Tensor
    """Shaped as the queries, in their dtype."""
    log_sum: Tensor
    """float32 [b, n, s], or [n, tokens] of sequences."""
    random_state: tuple[Tensor | None, Tensor | None] = (None, None)
    """Of its dropout, for backward."""


def run_forward(q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> FlashResult:
    """The operator: q [b, s, n, d], k and v [b, t, g, d]; of sequences q [tokens, n, d], k and v [tokens, g, d]."""
    before, after = call.band()
    out, log_sum, seed, offset, _ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        *call.lengths(q, k),
        call.dropout,
        # A band says by itself that it ends at the query's position.
        call.causal and call.window is None,
        False,
        scale=call.scale,
        window_size_left=before,
        window_size_right=after,
    )
    return FlashResult(out, log_sum, (seed, offset))


def run_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, result: FlashResult, call: FlashCall
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator's gradients of q, k and v. result: O and L over all keys of the softmax, L contiguous."""
    before, after = call.band()
    seed, offset = result.random_state
    if seed is None:
        # Not read without dropout, and yet the operator takes their addresses.
        seed, offset = q.new_empty(2, dtype=torch.uint64), q.new_empty(0)
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad,
        q,
        k,
        v,
        result.out,
        result.log_sum,
        *call.lengths(q, k),
        call.dropout,
        call.causal and call.window is None,
        seed,
        offset,
        scale=call.scale,
        window_size_left=before,
        window_size_right=after,
    )
    return grads


def compute_forward(q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> FlashResult:
    """As `run_forward`, with any widths of keys and values."""
    width = v.shape[-1]
    if not call.takes(q, v):
        q, k, v = _pad(q, k, v)
    else:
        q, k, v = (_in_a_row(x) for x in (q, k, v))
    out, log_sum, random_state = run_forward(q, k, v, call)
    # The padding is let go of: what is kept for backward is as wide as the values.
    out = out if out.shape[-1] == width else out[..., :width].contiguous()
    return FlashResult(out, log_sum, random_state)


def compute_backward(
    grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], result: FlashResult, call: FlashCall
) -> Gradients:
    """As `run_backward`, with any widths of keys and values; inputs: q, k, v."""
    given = (*inputs, grad, result.out)
    is_taken = call.takes(inputs[0], inputs[2])
    q, k, v, grad, out = [_in_a_row(x) for x in given] if is_taken else _pad(*given)
    # The kernel reads L only by its address: a slice would be read as if it were the whole.
    whole = FlashResult(out, result.log_sum.contiguous(), result.random_state)
    grads = run_backward(grad, q, k, v, whole, call)
    grad_q, grad_k, grad_v = (
        grad if grad.shape[-1] == x.shape[-1] else grad[..., : x.shape[-1]]
        for grad, x in zip(grads, inputs, strict=True)
    )
    return grad_q, grad_k, grad_v


def flash_attention(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, call: FlashCall) -> Tensor:
    """Attention by the flash kernel, shaped as for `run_forward`, values of any width; sinks: float32 [n] or None."""
    result: Tensor = _FlashAttention.apply(query, key, value, sinks, call)
    return result


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, call: FlashCall) -> Tensor:
        out, log_sum, random_state = compute_forward(query, key, value, call)
        if sinks is not None:
            narrow = out.dtype
            wide, sums = add_sinks(*_heads_first(out, log_sum), sinks)
            out, log_sum = wide.to(narrow).transpose(-2, -3).reshape(out.shape), sums.view(log_sum.shape)
        ctx.call = call
        ctx.save_for_backward(query, key, value, sinks, out, log_sum, *random_state)
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        query, key, value, sinks, out, log_sum, *random_state = ctx.saved_tensors
        result = FlashResult(out, log_sum, (random_state[0], random_state[1]))
        # O and L have the sinks in them, so that the kernel's P and row sums are the full softmax's.
        grads = compute_backward(grad_output, (query, key, value), result, ctx.call)
        grad_sinks = None
        if sinks is not None:
            heads_first, sums = _heads_first(out, log_sum)
            grad_sinks = compute_sinks_grad(_heads_first(grad_output, log_sum)[0], heads_first, sums, sinks)
        return *grads, grad_sinks, None


class FlashKernel:
    """The flash kernel on one block of keys, for a ring. Masks go to the plain kernel."""

    name = "the GPU's flash kernel"
    takes_bands = True

    def __init__(self, scale: float, *, keeps_widths: bool = False) -> None:
        self.scale, self.keeps_widths = scale, keeps_widths
        self.plain = PlainKernel(scale)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
        """See BlockKernel."""
        if rule.mask is not None:
            return self.plain.forward(q, k, v, rule)
        call, samples = self._build_call(rule), q.shape[0]
        q, k, v = (_tokens_first(x, call) for x in (q, k, v))
        out, log_sum, _ = compute_forward(q, k, v, call)
        if call.sequences is None:
            return out.transpose(1, 2), log_sum
        return out.unflatten(0, (samples, -1)).transpose(1, 2), log_sum.unflatten(1, (samples, -1)).transpose(0, 1)

    def backward(
        self, grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], merged: tuple[Tensor, Tensor], rule: Rule
    ) -> Gradients:
        """See BlockKernel."""
        if rule.mask is not None:
            return self.plain.backward(grad, inputs, merged, rule)
        call = self._build_call(rule)
        q, k, v, out, grad = (_tokens_first(x, call) for x in (*inputs, merged[0], grad))
        log_sum = merged[1] if call.sequences is None else merged[1].transpose(0, 1).flatten(1)
        grads = compute_backward(grad, (q, k, v), FlashResult(out, log_sum), call)
        if call.sequences is not None:
            grads = tuple(x.unflatten(0, (inputs[0].shape[0], -1)) for x in grads)
        grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in grads)
        return grad_q, grad_k, grad_v

    def _build_call(self, rule: Rule) -> FlashCall:
        window, sequences = (None, None) if rule.band is None else rule.band
        return FlashCall(self.scale, rule.causal, window, sequences, keeps_widths=self.keeps_widths)


def _tokens_first(x: Tensor, call: FlashCall) -> Tensor:
    """[b, heads, s, width] -> [b, s, heads, width], or of sequences [b * s, heads, width]."""
    x = x.transpose(1, 2)
    return x if call.sequences is None else x.flatten(0, 1)


def _heads_first(out: Tensor, log_sum: Tensor) -> tuple[Tensor, Tensor]:
    """O [b, n, s, dv] and L [b, n, s], views; sequences are a batch of one."""
    out = out.transpose(-2, -3)
    return (out, log_sum) if log_sum.dim() == 3 else (out.unsqueeze(0), log_sum.unsqueeze(0))


def _pad(*tensors: Tensor) -> list[Tensor]:
    """All of one width, the widest one's, rounded up to what the kernel takes; channels lie one after another."""
    width = -(-max(x.shape[-1] for x in tensors) // _MULTIPLE) * _MULTIPLE
    padded = [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors]
    return [_in_a_row(x) for x in padded]


def _in_a_row(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
