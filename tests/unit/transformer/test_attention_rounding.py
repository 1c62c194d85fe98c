# SPDX-License-Identifier: Apache-2.0
"""16-bit attention against float64: no form of ours may lose more than torch's operator, whose scores are float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.core.transformer.core_attention.block_kernels import CPUFlashKernel, MergedBlocks, PlainKernel, Rule
from megatron.core.transformer.core_attention.interface import (
    AttentionInputs,
    AttentionOptions,
    CoreAttention,
    Visible,
)
from megatron.core.transformer.core_attention.local import LocalAttention
from megatron.core.transformer.core_attention.query_blocks import QueryBlocksAttention
from megatron.core.transformer.core_attention.sdpa import SDPAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.plain_attention import Case, draw, plain_attention

LENGTH, HEADS, GROUPS, WIDTH = 192, 6, 3, 64
FACTOR = 2.0
"""Of torch's own error: other kernels round partial sums in another order."""
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class ByBlocks:
    """A kernel's blocks of keys, merged, as in a ring of two ranks."""

    def __init__(self, kernel: PlainKernel | CPUFlashKernel) -> None:
        self.kernel = kernel
        self.name = kernel.name

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        """As CoreAttention."""
        result: Tensor = _Merged.apply(inputs.query, inputs.key, inputs.value, self.kernel)
        return result.flatten(2)


class _Merged(torch.autograd.Function):
    """The first half of the queries sees the first half of the keys, the second one both."""

    @staticmethod
    def blocks() -> list[tuple[slice, slice, bool]]:
        first, second = slice(0, LENGTH // 2), slice(LENGTH // 2, None)
        return [(first, first, True), (second, second, True), (second, first, False)]

    @staticmethod
    def forward(ctx, query, key, value, kernel):  # type: ignore[no-untyped-def]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        merged = MergedBlocks(q, v.shape[-1])
        for rows, seen, causal in _Merged.blocks():
            merged.add(rows, *kernel.forward(q[:, :, rows], k[:, :, seen], v[:, :, seen], Rule(causal)))
        out = merged.out.to(q.dtype)
        ctx.kernel = kernel
        ctx.save_for_backward(q, k, v, out, merged.log_sum)
        return out.permute(2, 0, 1, 3)

    @staticmethod
    def backward(ctx, grad_output):  # type: ignore[no-untyped-def]
        q, k, v, out, log_sum = ctx.saved_tensors
        grad = grad_output.permute(1, 2, 0, 3)
        grads = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
        for rows, seen, causal in _Merged.blocks():
            inputs = (q[:, :, rows], k[:, :, seen], v[:, :, seen])
            merged = (out[:, :, rows], log_sum[:, :, rows])
            add = ctx.kernel.backward(grad[:, :, rows], inputs, merged, Rule(causal))
            for total, where, part in zip(grads, (rows, seen, seen), add, strict=True):
                total[:, :, where] += part
        return *(total.to(q.dtype).permute(2, 0, 1, 3) for total in grads), None


def forms(device: str) -> list[CoreAttention]:
    """Everything that --attention-backend or an option of attention can make of a layer, for a causal sequence."""
    config = TransformerConfig(
        num_layers=1, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, num_query_groups=GROUPS,
        attention_dropout=0.0, attention_softmax_in_fp32=True, bf16=True, params_dtype=torch.bfloat16,
    )  # fmt: skip
    options = AttentionOptions.from_config(config, 1)
    found: list[CoreAttention] = [
        LocalAttention(options),
        QueryBlocksAttention(options),
        SDPAttention(options, "unfused"),
    ]
    kernels = [PlainKernel(options.scale), *([CPUFlashKernel(options.scale)] if device == "cpu" else [])]
    return [*found, *(ByBlocks(kernel) for kernel in kernels)]


def errors(attention: CoreAttention, factor: float, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Root mean square of the error of the output and of each gradient, by the largest value of the exact one."""
    shapes = {
        "query": (LENGTH, 2, HEADS, WIDTH),
        "key": (LENGTH, 2, GROUPS, WIDTH),
        "value": (LENGTH, 2, GROUPS, WIDTH),
    }
    given = {name: draw(shape, seed) for seed, (name, shape) in enumerate(shapes.items())}
    for name in ("query", "key"):
        given[name] *= factor
    given = {name: x.to(dtype) for name, x in given.items()}
    grad = draw([LENGTH, 2, HEADS * WIDTH], 5).to(dtype)
    exact = plain_attention(Case("causal", {}), *given.values(), None, grad)
    leaves = {name: x.to(device).requires_grad_() for name, x in given.items()}
    output = attention(AttentionInputs(*leaves.values(), Visible()))
    output.backward(grad.to(device))
    results = {"output": output.detach()} | {name: leaf.grad for name, leaf in leaves.items()}
    return {
        name: float((results[name].cpu().double() - wanted).square().mean().sqrt() / wanted.abs().max())
        for name, wanted in exact.items()
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("factor", "dtype"), [(1.0, torch.bfloat16), (2.0, torch.bfloat16), (4.0, torch.bfloat16), (4.0, torch.float16)]
)
def test_no_form_rounds_scores(factor: float, device: str, dtype: torch.dtype) -> None:
    config = TransformerConfig(
        num_layers=1, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, attention_dropout=0.0
    )
    torchs = errors(SDPAttention(AttentionOptions.from_config(config, 1), "auto"), factor, dtype, device)
    for form in forms(device):
        own = errors(form, factor, dtype, device)
        for name, allowed in torchs.items():
            assert own[name] <= FACTOR * allowed, f"{form.name}, {name}: {own[name]:.2e}, torch {allowed:.2e}"
