# SPDX-License-Identifier: Apache-2.0
"""Cross entropy over a vocabulary that is split over the tensor-parallel (TP) group, without gathering the logits.

    loss = log(sum_v exp(x_v)) - x_target        gradient = softmax(x) - onehot(target)

Every rank takes the maximum, the sum and the target's logit over its slice; small all-reduces join them. Two ways:

vocab_parallel_cross_entropy: of float32 logits. The gradient is formed in the logits' memory during forward and only
scaled in backward: nothing else of their size exists.

fused_vocab_parallel_cross_entropy: straight from logits in a 16-bit format, without a float32 copy of them. All
arithmetic is in float32, on blocks of tokens that are small against the logits. Forward keeps the logits as they are
and one number per token; backward computes the softmax again and writes the gradient over the logits. With bfloat16
logits of n bytes the first way, after a conversion, holds n + 2n + 2n bytes at its peak, this one n.

Where kernels run (megatron/core/kernels/cross_entropy.py) both are one: a kernel that reads the logits once, in any
dtype, and in backward one that writes their gradient over them.

Source: Shoeybi et al., 2019, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.core.collectives import all_reduce
from megatron.core.device import is_cpu
from megatron.core.kernels.launching import by_kernel
from megatron.core.process_groups_config import Group, ProcessGroupCollection
from megatron.core.tensor_parallel.products import at_least_float32

BLOCK_ELEMENTS, GPU_BLOCK_ELEMENTS = 2**22, 2**28
"""Logits that the fused way converts to float32 at a time: 16 MiB, which caches hold, and 1 GiB on a GPU, where to
start a kernel costs as much as to convert millions of them."""

_BY_KERNEL = f"{__name__}:kernel_vocab_parallel_cross_entropy"


@by_kernel(_BY_KERNEL, "vocab_parallel_logits")
def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: Group | None = None
) -> Tensor:
    """Loss of every token.

    vocab_parallel_logits: [s, b, v / tp]; overwritten where they are float32. target: [s, b] token numbers in the whole
    vocabulary. label_smoothing: probability mass that is spread evenly over the other entries. Returns [s, b] float32.
    """
    group = tp_group if tp_group is not None else ProcessGroupCollection.current().tp
    logits = at_least_float32(vocab_parallel_logits)
    loss: Tensor = _VocabParallelCrossEntropy.apply(logits, target, label_smoothing, group)
    return loss


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, label_smoothing: float, group: Group) -> Tensor:
        logits = logits.detach()
        local_vocab = logits.shape[-1]
        local_target = (target - group.rank() * local_vocab).unsqueeze(-1)  # [s, b, 1]
        is_local = (local_target >= 0) & (local_target < local_vocab)
        # Tokens of other ranks look up some entry here, which is then counted as zero.
        local_target = local_target.clamp(0, local_vocab - 1)

        # Everything that needs the logits themselves comes before they are overwritten.
        target_logit = logits.gather(-1, local_target).masked_fill(~is_local, 0.0)  # [s, b, 1]
        all_reduce(target_logit, group)
        vocab = local_vocab * group.size()
        mean_logit = logits.sum(-1, keepdim=True).div_(vocab) if label_smoothing else None
        if mean_logit is not None:
            all_reduce(mean_logit, group)
        log_sum = _softmax_(logits, group)  # logits now hold probabilities
        loss = (log_sum - target_logit).squeeze(-1)

        smoothing = label_smoothing * vocab / (vocab - 1) if label_smoothing else 0.0
        if mean_logit is not None:
            # (1 - smoothing) * loss of the target + smoothing * mean loss of all entries.
            loss = (1.0 - smoothing) * loss + smoothing * (log_sum - mean_logit).squeeze(-1)
            logits.sub_(smoothing / vocab)
        # The gradient with respect to a loss of one, in the logits' memory; where the target is not local it adds 0.
        logits.scatter_add_(-1, local_target, is_local.to(logits.dtype).mul_(smoothing - 1.0))
        ctx.save_for_backward(logits)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(grad_loss.unsqueeze(-1)), None, None, None


def _softmax_(logits: Tensor, group: Group) -> Tensor:
    """Overwrite logits [s, b, v / tp] with their softmax over the whole vocabulary; return log sum exp, [s, b, 1]."""
    largest = logits.amax(-1, keepdim=True)
    if group.size() == 1:
        torch.softmax(logits, -1, out=logits)
        # The largest probability is 1 / sum(exp(x - max)), at least 1 / v: its logarithm is safe.
        return largest.sub_(logits.amax(-1, keepdim=True).log_())
    # All ranks subtract the same maximum, or their sums could not be added.
    all_reduce(largest, group, op="max")
    logits.sub_(largest).exp_()
    total = logits.sum(-1, keepdim=True)
    all_reduce(total, group)
    logits.div_(total)
    return largest.add_(total.log_())


# ---- from logits in a 16-bit format


@by_kernel(_BY_KERNEL, "vocab_parallel_logits")
def fused_vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, *, tp_group: Group) -> Tensor:
    """Loss of every token.

    vocab_parallel_logits: [s, b, v / tp] in any dtype; overwritten in backward. target: [s, b] token numbers in the
    whole vocabulary. Returns [s, b] float32.
    """
    loss: Tensor = _FusedCrossEntropy.apply(vocab_parallel_logits, target, tp_group)
    return loss


class _FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: Group) -> Tensor:
        rows = logits.detach().view(-1, logits.shape[-1])  # [s, b, v / tp] -> [tokens, v / tp]
        local_target = (target.reshape(-1, 1) - group.rank() * rows.shape[-1]).contiguous()  # [tokens, 1]
        is_local = (local_target >= 0) & (local_target < rows.shape[-1])
        local_target = local_target.clamp(0, rows.shape[-1] - 1)

        target_logit = at_least_float32(rows.gather(-1, local_target)).masked_fill_(~is_local, 0.0)  # [tokens, 1]
        log_sum = torch.empty_like(target_logit)
        for block in _blocks(rows):
            torch.logsumexp(at_least_float32(rows[block]), -1, keepdim=True, out=log_sum[block])
        if group.size() > 1:
            # log(sum of exp over all ranks) = max + log(sum over ranks of exp(local - max)).
            largest = log_sum.clone()
            all_reduce(largest, group, op="max")
            total = log_sum.sub_(largest).exp_()
            all_reduce(total, group)
            log_sum = largest.add_(total.log_())
            all_reduce(target_logit, group)
        # The logits wait as they are; their softmax is computed again from the one number per token.
        ctx.save_for_backward(logits, local_target, is_local, log_sum)
        return (log_sum - target_logit).view(target.shape)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> Any:
        logits, local_target, is_local, log_sum = ctx.saved_tensors
        rows = logits.detach().view(-1, logits.shape[-1])
        grad = grad_loss.reshape(-1, 1)  # [s, b] -> [tokens, 1]
        for block in _blocks(rows):
            gradient = at_least_float32(rows[block]).sub_(log_sum[block]).exp_()  # softmax
            gradient.scatter_add_(-1, local_target[block], -is_local[block].to(gradient.dtype))
            rows[block].copy_(gradient.mul_(grad[block]))
        return rows.view(logits.shape), None, None


def _blocks(rows: Tensor) -> Iterator[slice]:
    """Slices of tokens; rows [tokens, v / tp]."""
    step = max(1, (BLOCK_ELEMENTS if is_cpu(rows) else GPU_BLOCK_ELEMENTS) // rows.shape[-1])
    return (slice(start, start + step) for start in range(0, rows.shape[0], step))


# ---- by kernels


def kernel_vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: Group | None = None
) -> Tensor:
    """Loss of every token, [s, b] float32, by kernels; the arguments are as for `vocab_parallel_cross_entropy`, with
    logits in any dtype, overwritten in backward."""
    group = tp_group if tp_group is not None else ProcessGroupCollection.current().tp
    loss: Tensor = _KernelCrossEntropy.apply(vocab_parallel_logits, target, label_smoothing, group)
    return loss


class _KernelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, label_smoothing: float, group: Group) -> Tensor:
        from megatron.core.kernels.cross_entropy import summarise_logits

        local_vocab = logits.shape[-1]
        vocab = local_vocab * group.size()
        local_target = (target.reshape(-1) - group.rank() * local_vocab).contiguous()  # [tokens]
        rows = logits.detach().view(-1, local_vocab)  # [s, b, v / tp] -> [tokens, v / tp]
        log_sum, target_logit, logit_sum = summarise_logits(rows, local_target, bool(label_smoothing))
        if group.size() > 1:
            # log(sum of exp over all ranks) = max + log(sum over ranks of exp(local - max)).
            largest = log_sum.clone()
            all_reduce(largest, group, op="max")
            sums = [(log_sum - largest).exp_(), target_logit, *([] if logit_sum is None else [logit_sum])]
            joined = torch.stack(sums)
            all_reduce(joined, group)
            log_sum, target_logit = largest.add_(joined[0].log()), joined[1]
            logit_sum = None if logit_sum is None else joined[2]
        ctx.save_for_backward(logits, local_target, log_sum)
        loss = log_sum - target_logit
        smoothing = label_smoothing * vocab / (vocab - 1) if label_smoothing else 0.0
        ctx.hit, ctx.rest = 1.0 - smoothing, smoothing / vocab
        if logit_sum is not None:
            # (1 - smoothing) * loss of the target + smoothing * mean loss of all entries.
            loss = ctx.hit * loss + smoothing * (log_sum - logit_sum / vocab)
        return loss.view(target.shape)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> Any:
        from megatron.core.kernels.cross_entropy import overwrite_with_gradient

        logits, local_target, log_sum = ctx.saved_tensors
        logits = logits.detach()
        rows = logits.view(-1, logits.shape[-1])
        overwrite_with_gradient(rows, local_target, log_sum, grad_loss.reshape(-1), ctx.hit, ctx.rest)
        return logits, None, None, None
