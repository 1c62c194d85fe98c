"""Cross entropy straight from logits in a short number format, without a float32 copy of them.

    loss = log(sum_v exp(x_v)) - x_target        gradient = softmax(x) - onehot(target)

All arithmetic is in float32, on blocks of tokens that are small against the logits. Forward keeps the logits as they
are and one number per token; backward computes the softmax again and writes the gradient over the logits. With bfloat16
logits of n bytes the plain way (cross_entropy.py after a conversion) holds n + 2n + 2n bytes at its peak, this one n.
Reference: vocab_parallel_cross_entropy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.core.collectives import all_reduce
from megatron.core.process_groups_config import Group

BLOCK_ELEMENTS = 2**22
"""Logits that are converted to float32 at a time: 16 MiB."""


def fused_vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, *, tp_group: Group) -> Tensor:
    """Loss of every token.

    vocab_parallel_logits: [s, b, v / tp] in any number format; overwritten in backward. target: [s, b] token numbers in
    the whole vocabulary. Returns [s, b] float32.
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

        target_logit = rows.gather(-1, local_target).float().masked_fill_(~is_local, 0.0)  # [tokens, 1]
        log_sum = torch.empty_like(target_logit)
        for block in _blocks(rows):
            torch.logsumexp(rows[block].float(), -1, keepdim=True, out=log_sum[block])
        if group.size() > 1:
            # log(sum of exp over all ranks) = max + log(sum over ranks of exp(own - max)).
            largest = log_sum.clone()
            all_reduce(largest, group, op="max")
            total = log_sum.sub_(largest).exp_()
            all_reduce(total, group)
            log_sum = largest.add_(total.log_())
            all_reduce(target_logit, group)
        ctx.save_for_backward(logits, local_target, is_local, log_sum)
        return (log_sum - target_logit).view(target.shape)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> Any:
        logits, local_target, is_local, log_sum = ctx.saved_tensors
        rows = logits.detach().view(-1, logits.shape[-1])
        grad = grad_loss.reshape(-1, 1)  # [s, b] -> [tokens, 1]
        for block in _blocks(rows):
            gradient = rows[block].float().sub_(log_sum[block]).exp_()  # softmax
            gradient.scatter_add_(-1, local_target[block], -is_local[block].to(gradient.dtype))
            rows[block].copy_(gradient.mul_(grad[block]))
        return rows.view(logits.shape), None, None


def _blocks(rows: Tensor) -> Iterator[slice]:
    """Slices of tokens; rows [tokens, v / tp]."""
    step = max(1, BLOCK_ELEMENTS // rows.shape[-1])
    return (slice(start, start + step) for start in range(0, rows.shape[0], step))
