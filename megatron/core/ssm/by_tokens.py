# SPDX-License-Identifier: Apache-2.0
"""Functions of single tokens, of which only the arguments are saved for backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.device import is_cpu
from megatron.core.ssm.chunks import list_slabs

_ELEMENTS = 2**18
"""Of an argument, at a time, on a CPU: what its caches hold."""

Function = Callable[..., tuple[Tensor, ...]]


def compute_by_tokens(function: Function, arguments: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> Any:
    """Return function(*arguments), a tuple of tensors; arguments and results are [s, ...].

    parameters: those that the function reads in addition to its arguments. Backward computes the function again. On a
    CPU both take some tokens at a time, so that what lies between stays in its caches.
    """
    return _ByTokens.apply(function, len(arguments), *arguments, *parameters)


class _ByTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Function, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        arguments = tensors[:count]
        ctx.function, ctx.parameters = function, tensors[count:]
        ctx.save_for_backward(*arguments)
        results: list[Tensor] = []
        for start, stop in _list_stretches(arguments):
            parts = function(*(x[start:stop] for x in arguments))
            results = results or [part.new_empty(len(arguments[0]), *part.shape[1:]) for part in parts]
            for result, part in zip(results, parts, strict=True):
                result[start:stop] = part
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        arguments: Sequence[Tensor] = ctx.saved_tensors
        found = [torch.empty_like(x) for x in arguments]
        sums: list[Tensor | None] = [None] * len(ctx.parameters)
        for start, stop in _list_stretches(arguments):
            with torch.enable_grad():
                leaves = [x[start:stop].detach().requires_grad_() for x in arguments]
                results = ctx.function(*leaves)
                parts = torch.autograd.grad(results, [*leaves, *ctx.parameters], [x[start:stop] for x in grads])
            for whole, part in zip(found, parts, strict=False):
                whole[start:stop] = part
            for number, part in enumerate(parts[len(leaves) :]):
                known = sums[number]
                # As autograd adds up what several uses of a parameter give; here they are pieces of one sum.
                sums[number] = part if known is None else known + part
        return None, None, *found, *sums


def _list_stretches(arguments: Sequence[Tensor]) -> Sequence[tuple[int, int]]:
    tokens = len(arguments[0])
    largest = max(x.numel() for x in arguments)
    at_once = max(1, _ELEMENTS * tokens // max(largest, 1)) if is_cpu(arguments[0]) else tokens
    return list_slabs(tokens, max(at_once, 1))
