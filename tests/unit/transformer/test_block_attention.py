# SPDX-License-Identifier: Apache-2.0
"""Attention by blocks of keys: each kernel's blocks, merged, against attention over all keys at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.core.transformer.core_attention.block_kernels import (
    BlockKernel,
    CPUFlashKernel,
    MergedBlocks,
    PlainKernel,
    Rule,
)
from megatron.core.transformer.core_attention.flash import FlashKernel
from tests.support import flash_stand_in

SCALE = 0.3
BATCH, HEADS, QUERIES, WIDTH = 2, 4, 6, 8


@pytest.fixture(autouse=True)
def flash_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's kernel is its definition."""
    flash_stand_in.install(monkeypatch)


def tensors(groups: int, blocks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and a gradient; as many keys as `blocks` blocks of QUERIES."""
    torch.manual_seed(0)
    keys = (BATCH, groups, blocks * QUERIES, WIDTH)
    shapes = ((BATCH, HEADS, QUERIES, WIDTH), keys, keys, (BATCH, HEADS, QUERIES, WIDTH))
    return tuple(torch.randn(shape) for shape in shapes)  # type: ignore[return-value]


def reference(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Output, and gradients of q, k and v."""
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    k_all, v_all = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
    scores = (q @ k_all.transpose(-1, -2) * SCALE).masked_fill(mask, float("-inf"))
    out = scores.softmax(-1).nan_to_num() @ v_all
    out.backward(grad)
    return out.detach(), q.grad, k.grad, v.grad  # type: ignore[return-value]


def by_blocks(kernel: BlockKernel, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, rules: list[Rule]) -> list[Tensor]:
    """The same, one block of QUERIES keys after another."""
    pairs = list(zip(k.split(QUERIES, 2), v.split(QUERIES, 2), rules, strict=True))
    merged = MergedBlocks(q, v.shape[-1])
    for k_block, v_block, rule in pairs:
        merged.add(slice(None), *kernel.forward(q, k_block, v_block, rule))
    whole = (merged.out.to(q.dtype), merged.log_sum)
    grads = [kernel.backward(grad, (q, k_block, v_block), whole, rule) for k_block, v_block, rule in pairs]
    grad_q = sum(add for add, _, _ in grads)
    return [merged.out, grad_q, torch.cat([add for _, add, _ in grads], 2), torch.cat([add for *_, add in grads], 2)]


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize(
    "kernel", [PlainKernel(SCALE), CPUFlashKernel(SCALE), FlashKernel(SCALE)], ids=lambda kernel: kernel.name
)
def test_merged_blocks_equal_the_whole(kernel: BlockKernel, groups: int) -> None:
    q, k, v, grad = tensors(groups, 3)
    mask = torch.ones(QUERIES, 3 * QUERIES, dtype=torch.bool).triu(2 * QUERIES + 1)
    found = by_blocks(kernel, q, k, v, grad, [Rule(False), Rule(False), Rule(True)])
    for ours, theirs in zip(found, reference(q, k, v, grad, mask), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "kernel", [PlainKernel(SCALE), CPUFlashKernel(SCALE), FlashKernel(SCALE)], ids=lambda kernel: kernel.name
)
def test_masks_that_hide_a_block_or_everything(kernel: BlockKernel) -> None:
    """Query 0 sees nothing at all, query 1 nothing of the first block, and nobody key 3, whose exponentials would
    overflow: zeros and no NaN."""
    q, k, v, grad = tensors(2, 2)
    k[:, :, 3] *= 1e3
    mask = torch.rand(BATCH, 1, QUERIES, 2 * QUERIES) < 0.4
    mask[:, :, 0], mask[:, :, 1, :QUERIES], mask[..., 3] = True, True, True
    found = by_blocks(kernel, q, k, v, grad, [Rule(False, part) for part in mask.split(QUERIES, -1)])
    assert not found[0][:, :, 0].any()
    for ours, theirs in zip(found, reference(q, k, v, grad, mask), strict=True):
        torch.testing.assert_close(ours, theirs.nan_to_num())


def test_dropout_is_the_same_in_backward() -> None:
    """The gradient is that of the function which the seed fixes: compared with differences."""
    kernel = PlainKernel(SCALE, dropout=0.5)
    q, k, v, grad = (x.double() for x in tensors(2, 1))
    rule = Rule(causal=True, seed=7)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> float:
        out, _ = kernel.forward(q.float(), k.float(), v.float(), rule)
        return float((out.double() * grad).sum())

    out, log_sum = kernel.forward(q.float(), k.float(), v.float(), rule)
    other, _ = kernel.forward(q.float(), k.float(), v.float(), rule._replace(seed=8))
    assert not torch.equal(out, other)
    grads = kernel.backward(grad.float(), (q.float(), k.float(), v.float()), (out, log_sum), rule)
    for index, x in enumerate((q, k, v)):
        direction = torch.randn_like(x)
        around = [[q, k, v], [q, k, v]]
        around[0][index], around[1][index] = x + 1e-3 * direction, x - 1e-3 * direction
        slope = (loss(*around[0]) - loss(*around[1])) / 2e-3
        assert slope == pytest.approx(float((grads[index] * direction).sum()), rel=1e-2)


def test_bfloat16_is_merged_in_float32() -> None:
    q, k, v, grad = (x.bfloat16() for x in tensors(4, 2))
    for kernel in (PlainKernel(SCALE), CPUFlashKernel(SCALE), FlashKernel(SCALE)):
        found = by_blocks(kernel, q, k, v, grad, [Rule(False), Rule(True)])
        assert found[0].dtype == torch.float32
        mask = torch.ones(QUERIES, 2 * QUERIES, dtype=torch.bool).triu(QUERIES + 1)
        expected = reference(*(x.float() for x in (q, k, v, grad)), mask)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.float(), theirs, rtol=0.05, atol=0.05)
