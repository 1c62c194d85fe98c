# SPDX-License-Identifier: Apache-2.0
"""The GPU's flash kernel by its definition, to put in its place where there is no GPU; it checks what it is given.

    flash_stand_in.install(monkeypatch)

Results are those that the operator documents: bands counted from the last query and key, L of what is scaled, one key
head for several query heads. Float32 is let through, so that results can be compared closely.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.core import operation_table
from megatron.core.transformer.core_attention import flash
from megatron.core.transformer.core_attention.flash import FlashCall, FlashResult


def install(monkeypatch: pytest.MonkeyPatch) -> list[FlashCall]:
    """Compute by definition from now on; returns the list of forward calls, to which each further one is added."""
    calls: list[FlashCall] = []

    def forward(q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> FlashResult:
        calls.append(call)
        return run_forward(q, k, v, call)

    monkeypatch.setattr(flash, "run_forward", forward)
    monkeypatch.setattr(flash, "run_backward", run_backward)
    monkeypatch.setattr(operation_table, "FLASH_DTYPES", operation_table.FLASH_DTYPES | {torch.float32})
    return calls


def run_forward(q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> FlashResult:
    """As flash.run_forward."""
    check_operands(call, q, k, v)
    out, log_sum = (
        q.new_empty(*q.shape[:-1], v.shape[-1]),
        q.new_empty(find_log_sum_shape(q, call), dtype=torch.float32),
    )
    for queries, keys in find_sequences(q, k, call):
        scores = compute_scores(q[queries], k[keys], call)
        sums = scores.logsumexp(-1)  # [n, s]
        weights = (scores - sums.unsqueeze(-1)).exp().nan_to_num()
        out[queries] = torch.einsum("nst,tnd->snd", weights, per_head(v[keys], q)).to(q.dtype)
        # The operator's mark of a query that sees nothing.
        cut(log_sum, queries)[:] = sums.masked_fill(sums == float("-inf"), float("inf"))
    return FlashResult(out, log_sum)


def run_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, result: FlashResult, call: FlashCall
) -> tuple[Tensor, Tensor, Tensor]:
    """As flash.run_backward."""
    check_operands(call, q, k, v, grad, result.out)
    assert result.log_sum.is_contiguous() and result.log_sum.dtype == torch.float32
    assert result.log_sum.shape == find_log_sum_shape(q, call)
    grads = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    groups = k.shape[-2]
    for queries, keys in find_sequences(q, k, call):
        weights = (compute_scores(q[queries], k[keys], call) - cut(result.log_sum, queries).unsqueeze(-1)).exp()
        own = grad[queries].float()
        row_sum = torch.einsum("snd,snd->ns", own, result.out[queries].float()).unsqueeze(-1)
        grad_weights = torch.einsum("snd,tnd->nst", own, per_head(v[keys], q))
        grad_scores = weights * (grad_weights - row_sum) * call.scale
        grads[0][queries] += torch.einsum("nst,tnd->snd", grad_scores, per_head(k[keys], q))
        for total, part in (
            (grads[1], torch.einsum("nst,snd->tnd", grad_scores, q[queries].float())),
            (grads[2], torch.einsum("nst,snd->tnd", weights, own)),
        ):
            total[keys] += part.unflatten(1, (groups, -1)).sum(2)
    grad_q, grad_k, grad_v = (x.to(q.dtype) for x in grads)
    return grad_q, grad_k, grad_v


def check_operands(call: FlashCall, *operands: Tensor) -> None:
    """What the operator asks for."""
    of_keys, of_values = ({x.shape[-1] for x in part} for part in (operands[:2], operands[2:]))
    assert len(of_keys) == 1 == len(of_values), [x.shape for x in operands]
    assert call.keeps_widths or of_keys == of_values, [x.shape for x in operands]
    assert of_keys.pop() % 8 == 0 == of_values.pop() % 8, [x.shape for x in operands]
    assert all(x.stride(-1) == 1 and x.dim() == (4 if call.sequences is None else 3) for x in operands)
    assert len({x.dtype for x in operands}) == 1
    q, k, v = operands[:3]
    assert k.shape[:-1] == v.shape[:-1] and q.shape[-2] % k.shape[-2] == 0
    if call.sequences is None:
        assert q.shape[0] == k.shape[0]
        return
    queries, keys, most_queries, most_keys = call.sequences
    for bounds, most, x in ((queries, most_queries, q), (keys, most_keys, k)):
        assert bounds.dtype == torch.int32 and bounds.device == x.device and bounds.is_contiguous()
        assert bounds[0] == 0 and bounds[-1] == x.shape[0] and bounds.diff().max() == most
    assert queries.shape == keys.shape


def find_log_sum_shape(q: Tensor, call: FlashCall) -> tuple[int, ...]:
    """[b, n, s], or [n, tokens]."""
    return (q.shape[0], q.shape[2], q.shape[1]) if call.sequences is None else (q.shape[1], q.shape[0])


def find_sequences(q: Tensor, k: Tensor, call: FlashCall) -> list[tuple]:  # type: ignore[type-arg]
    """Indices of the queries and of the keys of each sequence."""
    if call.sequences is None:
        return [(index, index) for index in range(q.shape[0])]
    rows, columns = (
        [slice(*pair) for pair in zip(bounds.tolist(), bounds.tolist()[1:], strict=False)]
        for bounds in call.sequences[:2]
    )
    return list(zip(rows, columns, strict=True))


def cut(log_sum: Tensor, queries: int | slice) -> Tensor:
    """[n, s] of one sequence."""
    return log_sum[queries] if isinstance(queries, int) else log_sum[:, queries]


def per_head(x: Tensor, q: Tensor) -> Tensor:
    """[t, g, d] -> float32 [t, n, d]."""
    return x.float().repeat_interleave(q.shape[-2] // x.shape[-2], dim=1)


def compute_scores(q: Tensor, k: Tensor, call: FlashCall) -> Tensor:
    """[n, s, t] of q [s, n, d], minus infinity outside of the band."""
    scores = torch.einsum("snd,tnd->nst", q.float(), per_head(k, q)) * call.scale
    before, after = call.band()
    # Bounds are as the operator takes them: one that reaches over all keys is none, and one alone gets the number of
    # keys as the other.
    before, after = (bound if bound < k.shape[0] else -1 for bound in (before, after))
    if before >= 0 and after < 0:
        after = k.shape[0]
    # The last query stands at the last key's position.
    at = torch.arange(q.shape[0]).unsqueeze(1) + k.shape[0] - q.shape[0]
    key = torch.arange(k.shape[0])
    hidden = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bool)
    hidden |= (key < at - before) if before >= 0 else False
    hidden |= (key > at + after) if after >= 0 else False
    return scores.masked_fill(hidden, float("-inf"))
