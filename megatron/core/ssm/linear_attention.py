# SPDX-License-Identifier: Apache-2.0
"""Linear attention with decay, and with or without the delta rule: a state instead of keys and values.

For each head, with a state S [K, V] and for every token a query and a key [K], a value [V], a decay exp(g):

    sum         S_t = exp(g_t) S_{t-1} + k_t v_t^T                                  o_t = S_t^T q_t
    delta rule  S'  = exp(g_t) S_{t-1};  S_t = S' + k_t (v_t - S'^T e_t)^T          o_t = S_t^T q_t

g <= 0 is one number for each head (Mamba-2, gated delta net) or one for each channel of the key (Kimi delta attention).
e erases: it is a multiple of the key, and what the state says of it makes room for the value. Heads may share queries
and keys in groups. Training computes chunks of tokens by matrix products: with c the running
sum of g in a chunk, M_ij = exp(c_i - c_j) for j <= i and S the state before the chunk,

    U = V, or with the delta rule (I + tril((E K^T) M, -1))^{-1} (V - (E exp(c)) S)
    O = (Q exp(c)) S + ((Q K^T) M) U
    S <- exp(c_last) S + (K exp(c_last - c))^T U

Differences of c are formed before they are exponentiated: for j <= i none is positive, so that nothing overflows.
Sources: Dao and Gu, "Transformers are SSMs", 2024, section 6 (sum); Yang et al., "Gated Delta Networks", 2024, section
3.3, and "Parallelizing Linear Transformers with the Delta Rule", 2024, section 3 (delta rule).

b: batch, s: tokens, G: groups, H: heads (a multiple of G), K, V: channels of a key, of a value; n chunks of C tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 16
"""Tokens of a block whose pairs are summed channel by channel where decay differs between channels."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    erase: Tensor | None = None,
    *,
    state: Tensor | None = None,
    documents: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Return the outputs [b, s, H, V] and the state after the last token [b, H, K, V], computed chunk by chunk.

    query, key [b, s, G, K]; value [b, s, H, V]; log_decay [b, s, G or H], or [b, s, G or H, K]; erase [b, s, G or H, K]
    for the delta rule, None for the plain sum. state: before the first token, [b, H, K, V]; zeros when None. documents:
    number of each token's document, int [b or 1, s], rising; the state begins anew with each, and the one that is
    given belongs to the first token's. Everything is computed in float32,
    or in float64 where the values are; outputs have the values' dtype. Of what is computed only the arguments are saved
    for backward.
    """
    return _Attention.apply(query, key, value, log_decay, erase, state, documents, chunk_size)  # type: ignore[no-any-return]


def attend_step(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, erase: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output [b, H, V] of one token, and the state after it [b, H, K, V].

    query, key [b, G, K]; value [b, H, V]; log_decay [b, G or H] or [b, G or H, K]; erase [b, G or H, K] or None.
    """
    dtype, heads = state.dtype, value.shape[1]

    def spread(x: Tensor) -> Tensor:
        return x.to(dtype).repeat_interleave(heads // x.shape[1], dim=1)

    query, key, decay = spread(query), spread(key), spread(log_decay).exp()
    state = state * (decay[..., None, None] if decay.dim() == 2 else decay[..., None])
    update = value.to(dtype)
    if erase is not None:
        update = update - torch.einsum("bhkv,bhk->bhv", state, spread(erase))
    state = state + key[..., None] * update[..., None, :]
    return torch.einsum("bhkv,bhk->bhv", state, query).to(value.dtype), state


class _Attention(torch.autograd.Function):
    """`_attend_in_chunks`, which backward computes again: what lies between takes a multiple of its arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        erase: Tensor | None,
        state: Tensor | None,
        documents: Tensor | None,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(query, key, value, log_decay, erase, state, documents)
        ctx.chunk_size = chunk_size
        return _attend_in_chunks(query, key, value, log_decay, erase, state, documents, chunk_size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, documents = ctx.saved_tensors
        wanted = ctx.needs_input_grad[: len(inputs)]
        with torch.enable_grad():
            again: list[Any] = [
                x if x is None else x.detach().requires_grad_(w) for x, w in zip(inputs, wanted, strict=True)
            ]
            query, key, value, log_decay, erase, state = again
            outputs = _attend_in_chunks(query, key, value, log_decay, erase, state, documents, ctx.chunk_size)
            sources = [x for x, w in zip(again, wanted, strict=True) if x is not None and w]
            found = iter(torch.autograd.grad(outputs, sources, grads))
        return *(next(found) if w and x is not None else None for x, w in zip(again, wanted, strict=True)), None, None


def _attend_in_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    erase: Tensor | None,
    state: Tensor | None,
    documents: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """See `attend`."""
    batch, length, heads, width = value.shape
    groups, channels = key.shape[2:]
    chunk_size = min(chunk_size, -(-length // _BLOCK) * _BLOCK)
    dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
    # [b, G, r, n, C, ...]: of a group r heads, or one where they share it.
    queries, keys, values = (_divide(x.to(dtype), groups, chunk_size) for x in (query, key, value))
    decay = _Decay(_divide(log_decay.double(), groups, chunk_size), log_decay.dim() == 4, documents, chunk_size, dtype)
    entering, leaving, kept = decay.enter(queries), decay.leave(keys), decay.keep()
    if erase is None:
        (pairs,), reading = decay.weigh_pairs([queries], keys), None
    else:
        # Each token's correction depends on those of earlier tokens of its chunk: a triangular system, solved for the
        # part that values cause and for the part that each channel of the incoming state causes.
        erasing = _divide(erase.to(dtype), groups, chunk_size)
        pairs, alike = decay.weigh_pairs([queries, erasing], keys)
        causes = decay.enter(erasing).expand(*values.shape[:-1], channels)
        solved = torch.linalg.solve_triangular(
            alike.tril(-1), torch.cat([values, causes], dim=-1), upper=False, unitriangular=True
        )
        values, reading = solved.split([width, channels], dim=-1)
    shape = (batch, groups, heads // groups, channels, width)
    now = values.new_zeros(shape) if state is None else state.to(dtype).reshape(shape)
    # Unbound once: the gradient of a slice taken inside the loop would be a tensor of zeros for each chunk.
    inside = (pairs @ values).unbind(3)
    pairs_of, entering_of, leaving_of, kept_of, values_of = (
        x.unbind(3) for x in (pairs, entering, leaving.transpose(-1, -2), kept[..., None], values)
    )
    reading_of = None if reading is None else reading.unbind(3)
    outputs = []
    for chunk, written in enumerate(values_of):
        output = inside[chunk]
        if reading_of is not None:
            read = reading_of[chunk] @ now
            written, output = written - read, output - pairs_of[chunk] @ read
        outputs.append(output + entering_of[chunk] @ now)
        now = kept_of[chunk] * now + leaving_of[chunk] @ written
    joined = torch.stack(outputs, dim=3)  # [b, G, r, n, C, V]
    merged = joined.permute(0, 3, 4, 1, 2, 5).reshape(batch, -1, heads, width)[:, :length]
    return merged.to(value.dtype), now.reshape(batch, heads, channels, width)


def _divide(x: Tensor, groups: int, chunk_size: int) -> Tensor:
    """[b, s, G r, ...] -> [b, G, r, n, C, ...], filled up with zeros: such tokens decay nothing and write nothing."""
    missing = -x.shape[1] % chunk_size
    if missing:
        x = torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], dim=1)
    x = x.reshape(x.shape[0], -1, chunk_size, groups, x.shape[2] // groups, *x.shape[3:])
    return x.movedim((3, 4), (1, 2))


class _Decay:
    """The decay between tokens of a chunk, and from and to its ends; nothing passes from one document to another.

    log_decay: float64 [b, G, r, n, C], or [b, G, r, n, C, K] with one number for each channel.
    """

    def __init__(
        self,
        log_decay: Tensor,
        is_by_channel: bool,
        documents: Tensor | None,
        chunk_size: int,
        dtype: torch.dtype,
    ) -> None:
        self._is_by_channel = is_by_channel
        total = log_decay.cumsum(dim=4)
        # As a sum of two numbers: differences of far larger sums then have all digits of float32.
        self._high = total.to(dtype)
        self._low = (total - self._high).to(dtype)
        causal = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=total.device).tril()
        self._hidden = ~causal
        self._enters: Tensor | None = None
        self._leaves: Tensor | None = None
        self._stays: Tensor | None = None
        if documents is not None:
            missing = -documents.shape[1] % chunk_size
            padded = torch.cat([documents, documents[:, -1:].expand(-1, missing)], dim=1)
            numbers = padded.unflatten(1, (-1, chunk_size))[:, None, None]  # [b, 1, 1, n, C]
            last = numbers[..., -1]
            before = torch.cat([numbers[..., :1, 0], last[..., :-1]], dim=-1)
            self._hidden = ~(causal & (numbers[..., :, None] == numbers[..., None, :]))
            self._enters = numbers == before[..., None]
            self._leaves = numbers == last[..., None]
            self._stays = before == last

    def weigh_pairs(self, others: Sequence[Tensor], key: Tensor) -> list[Tensor]:
        """For each x of the others the sums over channels x_i key_j exp(c_i - c_j) for j <= i of one document, else 0:
        [b, G, r, n, C, C]."""
        if not self._is_by_channel:
            factor = self._difference(slice(None), slice(None)).masked_fill(self._hidden, -torch.inf).exp()
            return [(x @ key.transpose(-1, -2)) * factor for x in others]
        # Blocks of queries: keys of earlier blocks meet them at the block's beginning, so that both factors are at most
        # one; pairs inside of a block are summed channel by channel.
        rows: list[list[Tensor]] = [[] for _ in others]
        size = key.shape[4]
        for first in range(0, size, _BLOCK):
            block, start = slice(first, first + _BLOCK), slice(max(first - 1, 0), max(first, 1))
            weighted = key[..., None, block, :] * self._difference(block, block).clamp(max=0.0).exp()
            near = self._difference(block, start).squeeze(-2).exp()
            far = (key[..., :first, :] * self._difference(start, slice(0, first)).squeeze(-3).exp()).transpose(-1, -2)
            for x, row in zip(others, rows, strict=True):
                within = (weighted @ x[..., block, :, None]).squeeze(-1)
                parts = [(x[..., block, :] * near) @ far, within] if first else [within]
                row.append(F.pad(torch.cat(parts, dim=-1), (0, size - first - _BLOCK)))
        return [torch.cat(row, dim=-2).masked_fill(self._hidden, 0.0) for row in rows]

    def enter(self, x: Tensor) -> Tensor:
        """X weighted by the decay from the chunk's beginning: [b, G, r, n, C, K]."""
        factor = self._high.exp() if self._is_by_channel else self._high.exp()[..., None]
        return x * (factor if self._enters is None else factor * self._enters[..., None])

    def leave(self, key: Tensor) -> Tensor:
        """Keys weighted by the decay up to the chunk's end: [b, G, r, n, C, K]."""
        last = (self._high[:, :, :, :, -1:] - self._high) + (self._low[:, :, :, :, -1:] - self._low)
        factor = last.exp() if self._is_by_channel else last.exp()[..., None]
        return key * (factor if self._leaves is None else factor * self._leaves[..., None])

    def keep(self) -> Tensor:
        """The decay of the state over each chunk: [b, G, r, n, K], or 1 in place of K."""
        factor = self._high[:, :, :, :, -1].exp()
        factor = factor if self._is_by_channel else factor[..., None]
        return factor if self._stays is None else factor * self._stays[..., None]

    def _difference(self, later: slice, earlier: slice) -> Tensor:
        """c of `later` less c of `earlier` tokens: [b, G, r, n, later, earlier], or [..., K]."""
        # [..., C, 1 or K]: the dimension of tokens stands in the same place in both forms.
        high, low = (x if self._is_by_channel else x[..., None] for x in (self._high, self._low))
        result = (high[..., later, None, :] - high[..., None, earlier, :]) + (
            low[..., later, None, :] - low[..., None, earlier, :]
        )
        return result if self._is_by_channel else result.squeeze(-1)
