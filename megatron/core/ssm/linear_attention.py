# SPDX-License-Identifier: Apache-2.0
"""Linear attention with decay, and with or without the delta rule: a state instead of keys and values.

For each head, with a state S [K, V] and for every token a query and a key [K], a value [V], a decay exp(g), and s, the
strength with which it is written:

    sum         S_t = exp(g_t) S_{t-1} + k_t (s_t v_t)^T                                  o_t = S_t^T q_t
    delta rule  S'  = exp(g_t) S_{t-1};  S_t = S' + k_t (s_t v_t - S'^T (e_t k_t))^T      o_t = S_t^T q_t

g <= 0 is one number for each head (Mamba-2, gated delta net) or one for each channel of the key (Kimi delta attention).
e erases: what the state says of so much of the key makes room for the value; it is one number, or one for each channel.
Heads may share queries and keys in groups. Training computes chunks of tokens by matrix products (chunks.py), some
chunks at a time, so that what lies between does not grow with the sequence; only states pass from chunk to chunk.

Sources: Dao and Gu, "Transformers are SSMs", 2024, section 6 (sum); Yang et al., "Gated Delta Networks", 2024, section
3.3, and "Parallelizing Linear Transformers with the Delta Rule", 2024, section 3 (delta rule).

b: batch, s: tokens, G: groups, H: heads (a multiple of G), K, V: channels of a key, of a value; n chunks of C tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.core.device import is_cpu
from megatron.core.plan.state_kinds import CHUNK
from megatron.core.ssm.chunks import SMALLEST, Chunks, Inputs, count_chunks_at_once, list_slabs
from megatron.core.ssm.decay import DocumentCells


def attend(
    inputs: Inputs,
    *,
    state: Tensor | None = None,
    documents: Tensor | None = None,
    unit: tuple[float, float] | None = None,
    chunk_size: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return the outputs [b, s, H, V] and the state after the last token [b, H, K, V], computed chunk by chunk.

    inputs: query, key [b, s, G, K]; value [b, s, H, V]; log_decay [b, s, G or H], or [b, s, G or H, K]; strength
    [b, s, H], 1 when None; erase [b, s, H] or [b, s, G or H, K] for the delta rule, None for the plain sum. state:
    before the first token, [b, H, K, V]; zeros when None. documents: number of each token's document, int [b or 1, s],
    rising; the state starts again with each, and the one that is passed belongs to the first token's. unit: (epsilon,
    length) makes queries and keys x / sqrt(|x|^2 + epsilon), and multiplies queries by length. chunk_size: a power of
    two, 16 or more. Everything is computed in float32, or in float64 where the values are; outputs have the values'
    dtype. Saved for backward are the arguments, and the states before all but the first of `list_slabs`.
    """
    size = min(chunk_size, max(SMALLEST, 1 << (inputs.value.shape[1] - 1).bit_length()))
    return _Attention.apply(size, unit, state, documents, *inputs)  # type: ignore[no-any-return]


def attend_step(inputs: Inputs, state: Tensor, unit: tuple[float, float] | None = None) -> tuple[Tensor, Tensor]:
    """Return the output [b, H, V] of one token, and the state after it [b, H, K, V].

    inputs as for `attend`, without the dimension s.
    """
    dtype, heads = state.dtype, inputs.value.shape[1]

    def spread(x: Tensor) -> Tensor:
        return x.to(dtype).repeat_interleave(heads // x.shape[1], dim=1)

    query, key = inputs.query.to(dtype), inputs.key.to(dtype)
    if unit is not None:
        query, key = (x * (x.square().sum(-1, keepdim=True) + unit[0]).rsqrt() for x in (query, key))
        query = query * unit[1]
    query, key, decay = spread(query), spread(key), spread(inputs.log_decay).exp()
    state = state * (decay[..., None, None] if decay.dim() == 2 else decay[..., None])
    update = inputs.value.to(dtype)
    if inputs.strength is not None:
        update = update * inputs.strength.to(dtype)[..., None]
    if inputs.erase is not None:
        erase = spread(inputs.erase)
        erasing = key * (erase[..., None] if erase.dim() == 2 else erase)
        update = update - torch.einsum("bhkv,bhk->bhv", state, erasing)
    state = state + key[..., None] * update[..., None, :]
    return torch.einsum("bhkv,bhk->bhv", state, query).to(inputs.value.dtype), state


class _Attention(torch.autograd.Function):
    """Backward computes chunks again, some at a time, the last ones first: what lies between takes a multiple of the
    arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        chunk_size: int,
        unit: tuple[float, float] | None,
        state: Tensor | None,
        documents: Tensor | None,
        *tensors: Any,
    ) -> tuple[Tensor, Tensor]:
        inputs = Inputs(*tensors)
        output = inputs.value.new_empty(inputs.value.shape)
        before: list[Tensor] = []
        now = _start(inputs, state)
        for start, stop, of_documents in _divide(inputs, documents, chunk_size):
            if start:
                before.append(now)
            chunks = Chunks(_cut(inputs, start, stop), of_documents, chunk_size, unit)
            output[:, start:stop], now = chunks.forward(now)
        ctx.save_for_backward(*tensors, state, documents, torch.stack(before) if before else None)
        ctx.chunk_size, ctx.unit = chunk_size, unit
        return output, now

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, state, documents, before = ctx.saved_tensors
        inputs = Inputs(*tensors)
        of_output, of_state = grads
        found = inputs.map(torch.empty_like)
        slabs = list(_divide(inputs, documents, ctx.chunk_size))
        for number, (start, stop, of_documents) in reversed(list(enumerate(slabs))):
            now = before[number - 1] if number else _start(inputs, state)
            chunks = Chunks(_cut(inputs, start, stop), of_documents, ctx.chunk_size, ctx.unit)
            gradients, of_state = chunks.backward(now, of_output[:, start:stop], of_state)
            for whole, gradient in zip(found, gradients, strict=True):
                if whole is not None:
                    assert gradient is not None
                    whole[:, start:stop] = gradient
        return None, None, None if state is None else of_state.to(state.dtype), None, *found


def _start(inputs: Inputs, state: Tensor | None) -> Tensor:
    """The state before the first token, in the format of states."""
    batch, _, heads, width = inputs.value.shape
    dtype = torch.float64 if inputs.value.dtype == torch.float64 else torch.float32
    if state is not None:
        return state.to(dtype)
    return inputs.value.new_zeros(batch, heads, inputs.key.shape[3], width, dtype=dtype)


def _cut(inputs: Inputs, start: int, stop: int) -> Inputs:
    return inputs.map(lambda x: x[:, start:stop])


def _divide(
    inputs: Inputs, documents: Tensor | None, chunk_size: int
) -> Iterator[tuple[int, int, DocumentCells | None]]:
    """Yield the stretches of tokens that are computed at a time, and what documents they have."""
    batch, tokens, heads, _ = inputs.value.shape
    at_once = count_chunks_at_once(batch, heads, chunk_size, is_cpu(inputs.value))
    for start, stop in list_slabs(tokens, at_once * chunk_size):
        found = None
        if documents is not None:
            missing = -(stop - start) % chunk_size
            numbers = torch.cat([documents[:, start:stop], documents[:, stop - 1 : stop].expand(-1, missing)], dim=1)
            found = DocumentCells(numbers, documents[:, max(start - 1, 0)], chunk_size)
        yield start, stop, found
