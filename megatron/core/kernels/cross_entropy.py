# SPDX-License-Identifier: Apache-2.0
"""Cross entropy of logits in any dtype, read once forward and once backward; see
megatron/core/tensor_parallel/cross_entropy.py for the formulas.

Forward keeps a running maximum and the sum of exponentials relative to it, which is scaled down whenever the maximum
grows (Milakov and Gimelshein, 2018, "Online normalizer calculation for softmax"). A program takes one token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels import launching
from megatron.core.kernels.launching import choose_block

_BLOCK, _WARPS = 4096, 8  # sixteen logits for each thread: two reads of 16 bytes in a 16-bit format


@triton.jit
def loss_forward(logits, targets, log_sums, target_logits, logit_sums, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * VOCABULARY
    largest = float("-inf")
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    plain_total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, VOCABULARY, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < VOCABULARY
        values = tl.load(logits + columns, mask=mask, other=float("-inf")).to(tl.float32)
        grown = tl.maximum(largest, tl.max(values, axis=0))
        # While all have been -inf, any number will do: exp(-inf - -inf) would not be zero.
        base = tl.where(grown == float("-inf"), 0.0, grown)
        total = total * tl.exp(largest - base) + tl.exp(values - base)
        largest = grown
        if logit_sums is not None:
            plain_total += tl.where(mask, values, 0.0)
    tl.store(log_sums + row, largest + tl.log(tl.sum(total, axis=0)))
    if logit_sums is not None:
        tl.store(logit_sums + row, tl.sum(plain_total, axis=0))
    target = tl.load(targets + row)
    is_local = (target >= 0) & (target < VOCABULARY)
    tl.store(target_logits + row, tl.load(logits + target, mask=is_local, other=0.0).to(tl.float32))


@triton.jit
def loss_backward(logits, targets, log_sums, grads, hit, rest, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * VOCABULARY
    target = tl.load(targets + row)
    log_sum = tl.load(log_sums + row)
    grad = tl.load(grads + row).to(tl.float32)
    for start in range(0, VOCABULARY, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < VOCABULARY
        values = tl.load(logits + columns, mask=mask, other=0.0).to(tl.float32)
        values = tl.exp(values - log_sum) - rest
        values -= tl.where(columns == target, hit, 0.0)
        tl.store(logits + columns, values * grad, mask=mask)


def summarise_logits(rows: Tensor, targets: Tensor, with_sums: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """For each token log(sum of exp), its target's logit, and, with_sums, the sum of its logits; float32 [tokens].

    rows: [tokens, v] contiguous. targets: int64 [tokens], counted in these v columns; the logit of a target that is not
    among them is 0.
    """
    log_sums = torch.empty(rows.shape[0], dtype=torch.float32, device=rows.device)
    target_logits = torch.empty_like(log_sums)
    logit_sums = torch.empty_like(log_sums) if with_sums else None
    launching.launch(
        loss_forward, (rows.shape[0],), rows, targets, log_sums, target_logits, logit_sums, num_warps=_WARPS,
        VOCABULARY=rows.shape[1], BLOCK=choose_block(rows.shape[1], _BLOCK),
    )  # fmt: skip
    return log_sums, target_logits, logit_sums


def overwrite_with_gradient(
    rows: Tensor, targets: Tensor, log_sums: Tensor, grads: Tensor, hit: float = 1.0, rest: float = 0.0
) -> None:
    """Overwrite the logits [tokens, v] with (softmax - rest - hit * onehot(target)) * grad.

    log_sums: float32 [tokens], over the whole vocabulary. grads: [tokens], of each token's loss.
    """
    launching.launch(
        loss_backward, (rows.shape[0],), rows, targets, log_sums, grads.contiguous(), hit, rest, num_warps=_WARPS,
        VOCABULARY=rows.shape[1], BLOCK=choose_block(rows.shape[1], _BLOCK),
    )  # fmt: skip
    # As torch's in-place operations do: autograd then refuses to run through the same graph again.
    torch.autograd.graph.increment_version(rows)
