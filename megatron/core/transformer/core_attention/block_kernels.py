# SPDX-License-Identifier: Apache-2.0
"""Attention of some queries over some of their keys, in a form in which the results can be merged.

    O_i = softmax(scale * Q K_i^T) V_i      L_i = logsumexp(scale * Q K_i^T)         over the keys of block i

    merged:   L = log(sum_i exp L_i)        O = sum_i exp(L_i - L) O_i

    backward: P_i = exp(scale * Q K_i^T - L) needs only L and, for the row sums, O: each block's gradients are its part
    of the full gradients, and depend on no other block.

(Dao et al., "FlashAttention", 2022, section 3.1; Liu et al., "Ring Attention", 2023.)

Legend: b batch, n query heads, g key-value heads, s queries, t keys of a block, d width of queries and keys, dv of
values. Q and dQ are [b, n, s, d], K [b, g, t, d], V [b, g, t, dv], O [b, n, s, dv]; L is [b, n, s] float32, minus
infinity for a query that sees no key of the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.core.device import is_cpu
from megatron.core.tensor_parallel.products import at_least_float32, is_wide

Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of queries, keys and values, shaped as these."""


class Sequences(NamedTuple):
    """Beginnings of sequences that lie one after another, among the queries and among the keys."""

    queries: Tensor
    """int32 [sequences + 1], from 0 to all queries, on the kernel's device."""
    keys: Tensor
    longest_queries: int
    longest_keys: int

    @classmethod
    def build(cls, queries: Sequence[int], keys: Sequence[int], device: torch.device) -> Sequences:
        """Of the lengths of each sequence's queries and keys."""
        bounds = torch.zeros(2, len(queries) + 1, dtype=torch.int32, device="cpu")
        bounds[:, 1:] = torch.tensor([queries, keys], device="cpu").cumsum(1)
        # One copy for both; nothing on the host has to wait for it.
        on_device = bounds.to(device, non_blocking=True)
        return cls(on_device[0], on_device[1], max(queries), max(keys))


class Band(NamedTuple):
    """Part of a block that a query sees, where a mask is not needed to say it."""

    window: int | None
    """So many keys before its position, the last query having the last key's; None for all."""
    sequences: Sequences | None = None
    """Sequences that see nothing of each other, the samples of a batch one after another; None for one in each
    sample."""


class Rule(NamedTuple):
    """Choice of the keys in a block that its queries see, and of those that dropout leaves."""

    causal: bool
    """Query and key of one index have the same position (s = t)."""
    mask: Tensor | None = None
    """bool, True where a key may not be seen, broadcastable to [b, n, s, t]."""
    band: Band | None = None
    """Instead of a mask, for kernels that take one."""
    seed: int | None = None
    """Of this block's dropout; None for none."""


class BlockKernel(Protocol):
    """Computes attention over one block of keys, forward and backward, so that blocks can be merged."""

    name: str
    takes_bands: bool
    """True if rules may have a `Band`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
        """O_i in the dtype of q, and L_i."""
        ...

    def backward(
        self, grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], merged: tuple[Tensor, Tensor], rule: Rule
    ) -> Gradients:
        """Return what this block adds to the gradients; inputs: q, k, v; merged: O, in the dtype of q, and L
        over all blocks."""
        ...


class PlainKernel:
    """In elementary operations: every device, dtype, mask and dropout. Memory grows with s * t."""

    name = "plain blocks"
    takes_bands = False

    def __init__(self, scale: float, dropout: float = 0.0, softcap: float | None = None) -> None:
        """softcap: bound on the scores, score -> softcap * tanh(score / softcap), whose slope is 1 - (s / softcap)^2
        where s is the bounded score."""
        self.scale, self.dropout, self.softcap = scale, dropout, softcap

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
        """See BlockKernel."""
        scores, hidden = self._scores(q, k), self._find_hidden(q, k, rule)
        lowest = torch.finfo(scores.dtype).min / 2
        if hidden is not None:
            # Added, not filled in: on a CPU that takes a tenth of the time.
            scores.add_(hidden.to(scores.dtype).mul_(lowest))
        most = scores.amax(-1)
        p = torch.softmax(scores, -1, out=scores if is_cpu(scores) else None)
        log_sum = most - p.amax(-1).log_()
        self._drop_(p, rule.seed)
        out = _by_head(torch.matmul(_by_group(p.to(v.dtype), k), v), q)
        if hidden is not None:
            sees_none = most < lowest / 2
            log_sum.masked_fill_(sees_none, float("-inf"))
            out *= ~sees_none.unsqueeze(-1)
        return out, log_sum

    def backward(
        self, grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], merged: tuple[Tensor, Tensor], rule: Rule
    ) -> Gradients:
        """See BlockKernel. With dropout M: dP = M * (dO V^T), and rowsum(P * dP) = rowsum(dO * O) all the same."""
        (q, k, v), (out, log_sum) = inputs, merged
        scores = self._scores(q, k)
        # Of the tanh that bounds the scores, from the bounded scores, before probabilities are written over them.
        slope = None if self.softcap is None else 1 - (scores / self.softcap).square()
        p = _compute_probabilities_(scores, log_sum, self._find_hidden(q, k, rule))
        # The softmax runs over all blocks, and so does this row sum; O and its gradient give it without the others.
        row_sum = (at_least_float32(grad) * at_least_float32(out)).sum(-1, keepdim=True)
        # Grouped heads fold into the rows of one product, so that keys and values are never repeated in memory.
        grad_scores = _by_head(multiply_in_float32(_by_group(grad, k), v.transpose(-1, -2)), q)
        # The gradient of the softmax needs P without dropout; dV, with it.
        self._drop_(grad_scores, rule.seed)
        grad_scores.sub_(row_sum).mul_(p).mul_(self.scale)
        self._drop_(p, rule.seed)
        if slope is not None:
            grad_scores.mul_(slope)
        # Narrowed only here: the difference above cancels, and would lose its digits in 16 bits.
        grad_scores = _by_group(grad_scores.to(q.dtype), k)  # [b, g, n/g * s, t]
        grad_q = _by_head(torch.matmul(grad_scores, k), q)
        grad_k = torch.matmul(grad_scores.transpose(-1, -2), _by_group(q, k))
        grad_v = torch.matmul(_by_group(p.to(v.dtype), k).transpose(-1, -2), _by_group(grad, k))
        return grad_q, grad_k, grad_v

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Scores scale * Q K^T, bounded where there is a softcap: [b, n, s, t] float32."""
        if is_wide(q):
            scores = torch.matmul(_by_group(q, k) * self.scale, k.transpose(-1, -2))
        else:  # scaled queries would be rounded to 16 bits once more
            scores = multiply_in_float32(_by_group(q, k), k.transpose(-1, -2)).mul_(self.scale)
        scores = _by_head(scores, q)
        return scores if self.softcap is None else (scores / self.softcap).tanh_().mul_(self.softcap)

    @staticmethod
    def _find_hidden(q: Tensor, k: Tensor, rule: Rule) -> Tensor | None:
        """Find hidden keys, bool, broadcastable to [b, n, s, t]; None for none."""
        if not rule.causal:
            return rule.mask
        future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu_(1)
        return future if rule.mask is None else future | rule.mask

    def _drop_(self, x: Tensor, seed: int | None) -> None:
        """Apply dropout to x in place; the same seed drops the same elements, so that backward repeats forward."""
        if not self.dropout or seed is None:
            return
        # A separate generator: forward and backward draw alike, and the global stream does not advance.
        generator = torch.Generator(x.device).manual_seed(seed)
        kept = torch.rand(x.shape, generator=generator, device=x.device) >= self.dropout
        # A dropout of 1 would divide zero by zero.
        x.mul_(kept).div_(max(1.0 - self.dropout, torch.finfo(x.dtype).tiny))


class CPUFlashKernel:
    """torch's flash kernel for the CPU; no dropout. Masks, and values of another width than keys, go to the plain
    kernel."""

    name = "torch's CPU flash kernel"
    takes_bands = False

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.plain = PlainKernel(scale)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
        """See BlockKernel."""
        if rule.mask is not None or v.shape[-1] != k.shape[-1]:
            return self.plain.forward(q, k, v, rule)
        # The operator, not F.scaled_dot_product_attention: only the operator also returns L, which merging needs.
        result: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, _per_head(k, q), _per_head(v, q), 0.0, rule.causal, scale=self.scale
        )
        return result

    def backward(
        self, grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], merged: tuple[Tensor, Tensor], rule: Rule
    ) -> Gradients:
        """See BlockKernel."""
        (q, k, v), (out, log_sum) = inputs, merged
        if rule.mask is not None or v.shape[-1] != k.shape[-1]:
            return self.plain.backward(grad, inputs, merged, rule)
        # The kernel reads L in the memory order in which it writes it: [b, s, n].
        log_sum = log_sum.transpose(1, 2).contiguous().transpose(1, 2)
        grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, _per_head(k, q), _per_head(v, q), out, log_sum, 0.0, rule.causal, scale=self.scale
        )
        return grad_q, _sum_of_group(grad_k, k), _sum_of_group(grad_v, v)


def find_shared_gradients(
    kernel: PlainKernel, grad: Tensor, inputs: tuple[Tensor, Tensor], merged: tuple[Tensor, Tensor], rule: Rule
) -> tuple[Tensor, Tensor]:
    """Gradients of queries, and of the one key of all heads, which is its value, too; inputs: q, k [b, 1, t, d]. The
    rest as in BlockKernel.backward.

    On a CPU by three products: a key's gradients as a key and as a value are small products, whose results take longer
    to add up.
    """
    q, k = inputs
    if kernel.dropout or not is_wide(q) or not is_cpu(q):
        grad_q, grad_k, grad_v = kernel.backward(grad, (q, k, k), merged, rule)
        return grad_q, grad_k + grad_v
    (out, log_sum), key = merged, k.squeeze(1)
    scaled, grads = (q * kernel.scale).flatten(1, 2), grad.flatten(1, 2)
    products = torch.bmm(torch.cat((grads, scaled), 1), key.mT)  # [b, 2 n s, t]
    of_scores, scores = products.chunk(2, 1)
    p = _compute_probabilities_(scores.unflatten(1, q.shape[1:3]), log_sum, rule.mask)
    of_scores.sub_((grad * out).sum(-1).flatten(1).unsqueeze(2)).mul_(p.flatten(1, 2))
    grad_q = torch.bmm(of_scores, key).mul_(kernel.scale).view_as(q)
    return grad_q, torch.bmm(products.mT, torch.cat((scaled, grads), 1)).unsqueeze(1)


def _compute_probabilities_(scores: Tensor, log_sum: Tensor, hidden: Tensor | None) -> Tensor:
    """exp(scores - L) in place, [b, n, s, t], zero for keys that are hidden."""
    scores.sub_(_finite(log_sum).unsqueeze(-1))
    if hidden is None:
        return scores.exp_()
    # Exponentials of hidden scores must not overflow, and on a CPU those that underflow take 50 times as long.
    return scores.clamp_(-87.0, 0.0).exp_().mul_((~hidden).to(scores.dtype))


class MergedBlocks:
    """The running O and L over the blocks that came by, in float32, for queries [b, n, s, d]."""

    def __init__(self, q: Tensor, value_width: int) -> None:
        # With L = -inf the first block's weight becomes exactly 1, so that the first merge needs no special case.
        self.out = torch.zeros((*q.shape[:-1], value_width), dtype=torch.float32, device=q.device)
        self.log_sum = torch.full(q.shape[:-1], float("-inf"), dtype=torch.float32, device=q.device)

    def add(self, queries: slice, out: Tensor, log_sum: Tensor) -> None:
        """Merge a block's result for some of the queries: out [b, n, s, dv] in any dtype, log_sum [b, n, s] float32."""
        # A block's output is normalised by its sum; weighted by its part of the sum over all blocks so far, it is what
        # a softmax over all of them at once gives. Sums are kept as logarithms: plain exp(score) would overflow.
        before = self.log_sum[:, :, queries]
        total = torch.logaddexp(before, log_sum)
        shift = _finite(total)
        own = self.out[:, :, queries]
        own.mul_((before - shift).exp().unsqueeze(-1)).add_(out.float() * (log_sum - shift).exp().unsqueeze(-1))
        self.log_sum[:, :, queries] = total


def multiply_in_float32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32: [b, n, s, d] x [b, n, d, t] -> [b, n, s, t].

    A product of bfloat16 numbers that is rounded to their format has an error of 0.4 % of itself; as a score it is an
    exponent.
    """
    if is_wide(a) or is_cpu(a) or "dtype" not in torch.ops.aten.bmm.overloads():
        return torch.matmul(at_least_float32(a), at_least_float32(b))
    # The GPU's 16-bit products are summed in float32 anyway: only their result has to stay as it is.
    product = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32)
    return product.unflatten(0, a.shape[:2])


def draw_seed() -> int:
    """A seed for the dropout of one call, from the stream that the caller chose, on the CPU: a number drawn on a device
    would have to be waited for."""
    return int(torch.randint(2**40, ()))


def add_sinks(out: Tensor, log_sum: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add to attention over all keys, O [b, n, s, d] and L [b, n, s], a further key of score sinks [n] and without
    value; O is returned in float32."""
    total = torch.logaddexp(log_sum, sinks.view(-1, 1))
    return at_least_float32(out) * (log_sum - total).exp().unsqueeze(-1), total


def compute_sinks_grad(grad: Tensor, out: Tensor, log_sum: Tensor, sinks: Tensor) -> Tensor:
    """Gradient [n] of the sinks' scores; grad, O [b, n, s, d], L [b, n, s] with the sinks: -sum P_sink rowsum(dO O)."""
    row_sum = (at_least_float32(grad) * at_least_float32(out)).sum(-1)
    return -((sinks.view(-1, 1) - log_sum).exp() * row_sum).sum((0, 2))


def _finite(log_sum: Tensor) -> Tensor:
    """Zero in place of minus infinity: a query that sees nothing gets zeros instead of infinity - infinity."""
    return log_sum.masked_fill(log_sum == float("-inf"), 0.0)


def _by_group(x: Tensor, key: Tensor) -> Tensor:
    """[b, n, s, ...] -> [b, g, n/g * s, ...]: the queries of a group's heads one after another, for one product."""
    groups = key.shape[1]
    return x if x.shape[1] == groups else x.unflatten(1, (groups, -1)).flatten(2, 3)


def _by_head(x: Tensor, query: Tensor) -> Tensor:
    """The inverse of `_by_group`."""
    heads = query.shape[1]
    return x if x.shape[1] == heads else x.unflatten(2, (-1, query.shape[2])).flatten(1, 2)


def _per_head(x: Tensor, query: Tensor) -> Tensor:
    """[b, g, t, d] -> [b, n, t, d]: a key-value head for each query head."""
    heads = query.shape[1]
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _sum_of_group(grad: Tensor, x: Tensor) -> Tensor:
    """The transpose of `_per_head`."""
    return grad if grad.shape[1] == x.shape[1] else grad.unflatten(1, (x.shape[1], -1)).sum(2)
