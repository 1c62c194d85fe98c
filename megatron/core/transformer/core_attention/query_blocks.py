# SPDX-License-Identifier: Apache-2.0
"""Attention by blocks of queries, each with the keys that it sees, in two forms.

| form                 | for                                        | kept for backward                             |
|----------------------|--------------------------------------------|-----------------------------------------------|
| CPUAttention         | causal float32 on the CPU, short sequences | the probabilities of what is seen             |
| QueryBlocksAttention | bounded scores and sinks, which torch's    | output and the logarithm of each query's sum; |
|                      | operator does not have; every device       | scores are computed again                     |

CPUAttention: large batched products that leave out most of the masked half.

    block i of queries sees keys 0 .. end of block i          |#. . .|
                                                              |###. .|       (B + 1) / 2B of the square for B blocks
    P_i = softmax(scale * Q_i K^T + mask of the last block)   |#####.|
    O_i = P_i V

    backward, from the kept P:  dV += P_i^T dO_i,  dS = P_i * (dO_i V^T - rowsum),  dQ_i = scale * dS K,
                                dK += scale * dS^T Q_i

torch's CPU flash kernel skips the masked half too, but in small products; for sequences whose probabilities fit in
memory this is a quarter faster (256 tokens, 24 heads of 64, one thread of an Intel Xeon: 11.3 ms against 14.7 ms
forward and backward).
Memory grows with the square of the sequence, so that it is limited, and longer sequences go to torch's operator.

QueryBlocksAttention: forward keeps only what the kernels of `block_kernels.py` need to compute a block's gradients by
itself (Dao et al., "FlashAttention", 2022), with windows, masks and dropout. Scores and softmax are in float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.device import is_cpu
from megatron.core.tensor_parallel.products import is_wide, wide_dtype
from megatron.core.transformer.core_attention.block_kernels import (
    BlockKernel,
    PlainKernel,
    Rule,
    add_sinks,
    compute_sinks_grad,
    draw_seed,
)
from megatron.core.transformer.core_attention.interface import (
    AttentionBackend,
    AttentionInputs,
    AttentionOptions,
    Visible,
)
from megatron.core.transformer.core_attention.sdpa import SDPAttention

Index = tuple[slice, slice, slice]

_CPU_BLOCK = 64
"""Queries in a block of CPUAttention: short enough to leave out most of the masked half, long enough for efficient
products."""
_MOST_BYTES_PER_LAYER = 64 * 2**20
"""Probabilities that a layer may keep for backward; torch's flash kernel keeps none."""
_BLOCK = 128
"""Queries in a block of QueryBlocksAttention."""
_CPU_SCORES = 2**20
"""Scores in such a block on a CPU, whose cache they stay in; more are divided by heads."""


class CPUAttention(AttentionBackend):
    """Attention of --attention-backend auto on the CPU: blocks of queries for plain causal float32 attention over short
    sequences, SDPAttention for everything else."""

    name = "blocks of queries for causal float32 up to 64 MiB of probabilities, else torch scaled_dot_product_attention"

    def __init__(self, options: AttentionOptions) -> None:
        self.options = options
        # Masks, windows, dropout, caches and narrow formats: torch's operator, which chooses its kernel.
        self.otherwise = SDPAttention(options, "auto")
        if options.window is not None:
            self.name = self.otherwise.name

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """See CoreAttention."""
        query, key, visible = inputs.query, inputs.key, inputs.visible
        is_plain = visible.causal and visible.mask is None and visible.window_reaches(key.shape[0])
        if is_plain and _fits(query, key) and not (inputs.training and self.options.dropout):
            return blocked_causal_attention(query, key, inputs.value, self.options.scale).flatten(2)
        return self.otherwise(inputs)

    def attend_last_tokens(self, query: Tensor, held: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """The last token of each sequence, from which only a window or a chunk hides keys: query [b, n, d], and for
        some sequences after the other key [t, sequences, g, d] and value [t, sequences, g, dv] -> [b, n * dv]."""
        scale, window, chunk = self.options.scale, self.options.window, self.options.chunk
        # The heads of a group as so many queries: its keys are read once.
        queries = query.unflatten(1, (held[0][0].shape[2], -1))  # [b, g, n / g, d]
        runs = queries.split([key.shape[1] for key, _ in held]) if len(held) > 1 else (queries,)
        found = []
        for q, (key, value) in zip(runs, held, strict=True):
            if window is not None or chunk is not None:
                last = key.shape[0] - 1
                first = 0 if window is None else max(0, last - window)
                first = first if chunk is None else max(first, last // chunk * chunk)
                key, value = key[first:], value[first:]
            k, v = key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)
            found.append(F.scaled_dot_product_attention(q, k, v, scale=scale))  # [sequences, g, n / g, dv]
        return (torch.cat(found) if len(found) > 1 else found[0]).flatten(1)


def _fits(query: Tensor, key: Tensor) -> bool:
    sequence, batch, heads, _ = query.shape
    return (
        query.shape == key.shape  # no cache of earlier tokens, one key-value head per query head
        and is_cpu(query)
        and is_wide(query)
        and _probabilities_bytes(sequence, batch * heads) <= _MOST_BYTES_PER_LAYER
    )


def _probabilities_bytes(sequence: int, batch_times_heads: int) -> int:
    """Return what one layer keeps for backward: half the square, and half a block's width of its diagonal."""
    return 4 * batch_times_heads * sequence * (sequence + _CPU_BLOCK) // 2


def blocked_causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """softmax(scale * Q K^T, causal) V, float32 on the CPU: query and key [s, b, n, d], value [s, b, n, dv] ->
    [s, b, n, dv]."""
    result: Tensor = _BlockedCausalAttention.apply(query, key, value, scale)
    return result


class _BlockedCausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        q, k, v = (_folded_heads_first(x) for x in (query, key, value))
        output = value.new_empty(value.shape)  # [s, b, n, dv]
        out = _folded_heads_first(output)
        # Added, not filled in: an addition takes a quarter of the time.
        future = torch.full((_CPU_BLOCK, _CPU_BLOCK), float("-inf")).triu_(1)
        nothing = q.new_empty((1, 1, 1))
        probabilities = []
        for first, end in _cpu_blocks(q.shape[1]):
            scores = torch.baddbmm(nothing, q[:, first:end], k[:, :end].transpose(1, 2), beta=0, alpha=scale)
            # Only the block's last columns, where keys are in line with queries, have anything to hide.
            scores[:, :, first:].add_(future[: end - first, : end - first])
            # In place: these probabilities are what backward keeps, and a second copy would double the peak.
            torch.softmax(scores, -1, out=scores)
            torch.bmm(scores, v[:, :end], out=out[:, first:end])
            probabilities.append(scores)
        ctx.scale = scale
        ctx.save_for_backward(query, key, value, *probabilities)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        query, key, value, *probabilities = ctx.saved_tensors
        q, k, v, grad = (_folded_heads_first(x) for x in (query, key, value, grad_output))
        # Head by head in memory, where products write best; the split of the projection copies its gradients anyway.
        grad_q, grad_k, grad_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        spans = list(zip(_cpu_blocks(q.shape[1]), probabilities, strict=True))
        # From the last block, which reaches every key: its products fill dK and dV, the others add to them.
        for (first, end), p in reversed(spans):
            beta = 0 if end == q.shape[1] else 1
            # The softmax's gradient needs only the kept probabilities: its row sum is the row sum of P * dP.
            grad_scores = torch.bmm(grad[:, first:end], v[:, :end].transpose(1, 2))
            torch.ops.aten._softmax_backward_data.out(grad_scores, p, -1, p.dtype, grad_input=grad_scores)
            grad_q[:, first:end].baddbmm_(grad_scores, k[:, :end], beta=0, alpha=ctx.scale)
            grad_v[:, :end].baddbmm_(p.transpose(1, 2), grad[:, first:end], beta=beta)
            grad_k[:, :end].baddbmm_(grad_scores.transpose(1, 2), q[:, first:end], beta=beta, alpha=ctx.scale)
        shape = (query.shape[1], query.shape[2])
        return *(x.transpose(0, 1).unflatten(1, shape) for x in (grad_q, grad_k, grad_v)), None


def _cpu_blocks(sequence: int) -> Iterator[tuple[int, int]]:
    """(first query, end) of each block."""
    for first in range(0, sequence, _CPU_BLOCK):
        yield first, min(first + _CPU_BLOCK, sequence)


def _folded_heads_first(x: Tensor) -> Tensor:
    """[s, b, n, d] -> [b * n, s, d]: a view where a token's heads lie evenly spaced, as in the packed projection."""
    return x.flatten(1, 2).transpose(0, 1)


class QueryBlocksAttention(AttentionBackend):
    """softmax(bounded scale * Q K^T) V with windows and sinks, on every device; scores are computed again in
    backward."""

    name = "blocks of queries with the keys they see, scores computed anew in backward"

    def __init__(self, options: AttentionOptions) -> None:
        self.options = options
        self.kernel = PlainKernel(options.scale, options.dropout, options.softcap)

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """See CoreAttention."""
        seed = draw_seed() if inputs.training and self.options.dropout else None
        # One seed for the whole call; each block derives its seed from it.
        call = _BlockCall(self.kernel, inputs.visible, seed)
        result: Tensor = _QueryBlocks.apply(inputs.query, inputs.key, inputs.value, inputs.sinks, call)
        return result.flatten(2)  # [s, b, n, dv] -> [s, b, n * dv]


@dataclass(frozen=True)
class _BlockCall:
    """Settings of one call besides its tensors; the same in forward and backward."""

    kernel: BlockKernel
    visible: Visible
    seed: int | None

    def blocks(self, q: Tensor, k: Tensor) -> Iterator[tuple[Index, Index, Rule]]:
        """Places of a block's queries in [b, n, s, d], of the keys they see in [b, g, t, d], and what of these."""
        # A seed for each block, so that backward draws its dropout again without the blocks before it.
        batch, groups = k.shape[:2]
        each, seeds = q.shape[1] // groups, itertools.count(self.seed or 0)
        for rows, seen in self.visible.blocks(q.shape[2], k.shape[2], _BLOCK):
            queries, keys = rows.stop - rows.start, seen.stop - seen.start
            hidden = self.visible.cut(rows, seen).build_mask(queries, keys, q.device)
            size = max(1, _CPU_SCORES // (batch * each * queries * keys)) if is_cpu(q) else groups
            for first in range(0, groups, size):
                of_queries, of_keys = slice(first * each, (first + size) * each), slice(first, first + size)
                seed = None if self.seed is None else next(seeds)
                rule = Rule(causal=False, mask=hidden, seed=seed)
                yield (slice(None), of_queries, rows), (slice(None), of_keys, seen), rule


class _QueryBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, call: _BlockCall) -> Tensor:
        q, k, v = (_heads_first(x) for x in (query, key, value))
        # Written block by block where the output projection reads it; the kernels see it as [b, n, s, dv].
        output = query.new_empty((*query.shape[:3], value.shape[3]))  # [s, b, n, dv]
        out, log_sum = _heads_first(output), query.new_empty(q.shape[:-1], dtype=wide_dtype(q))
        for rows, seen, rule in call.blocks(q, k):
            part, logs = call.kernel.forward(q[rows], k[seen], v[seen], rule)
            if sinks is not None:
                part, logs = add_sinks(part, logs, sinks[rows[1]])
            out[rows], log_sum[rows] = part, logs
        ctx.call = call
        ctx.save_for_backward(query, key, value, sinks, output, log_sum)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        query, key, value, sinks, output, log_sum = ctx.saved_tensors
        call: _BlockCall = ctx.call
        q, k, v, out, grad = (_heads_first(x) for x in (query, key, value, output, grad_output))
        grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
        # Several blocks add to one key: in float32, whatever the format of the keys.
        grad_key, grad_value = (torch.zeros(x.shape, dtype=wide_dtype(x), device=x.device) for x in (key, value))
        grad_q, grad_k, grad_v = (_heads_first(x) for x in (grad_query, grad_key, grad_value))
        for rows, seen, rule in call.blocks(q, k):
            inputs, merged = (q[rows], k[seen], v[seen]), (out[rows], log_sum[rows])
            # A block's queries belong only to it, so dQ is assigned; its keys are shared with later blocks, so dK and
            # dV add up.
            add_q, add_k, add_v = call.kernel.backward(grad[rows], inputs, merged, rule)
            grad_q[rows] = add_q
            grad_k[seen] += add_k
            grad_v[seen] += add_v
        # O and L are saved with the sinks in them, which is what this formula wants.
        grad_sinks = None if sinks is None else compute_sinks_grad(grad, out, log_sum, sinks)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), grad_sinks, None


def _heads_first(x: Tensor) -> Tensor:
    """[s, b, n, d] -> [b, n, s, d], a view."""
    return x.permute(1, 2, 0, 3)
