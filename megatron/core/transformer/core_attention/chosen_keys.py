# SPDX-License-Identifier: Apache-2.0
"""Attention of each query to a few keys: which ones, by the scores of an indexer, and attention to these alone
(DeepSeek-V3.2, 2025, section 2.1).

    I[s, t] = sum over indexer heads of  w[s] * relu(q[s] . k[t])      float32, for keys that the query may see
    chosen  = the keys with the k largest I[s, :], of equal ones the earliest, in the order of the sequence

Everything works on blocks of queries, so that nothing has the size of the square of a sequence.

s: queries, t: keys, b: batch, g: heads of the indexer, d: their channels, k: keys that a query chooses, n: heads of
attention, c: channels of the one key that they share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.collectives import all_reduce
from megatron.core.context_parallel.sharding import list_pieces_of_rank, list_positions_of_rank
from megatron.core.device import is_cpu
from megatron.core.plan.indexer_memory import BLOCK_ELEMENTS as _BLOCK_ELEMENTS
from megatron.core.plan.indexer_memory import count_gathered
from megatron.core.process_groups_config import Group
from megatron.core.sequences.token_layout import TokenLayout
from megatron.core.tensor_parallel.products import at_least_float32, wide_dtype
from megatron.core.transformer.core_attention.block_kernels import (
    PlainKernel,
    Rule,
    draw_seed,
    find_shared_gradients,
    multiply_in_float32,
)


class QueryBlock(NamedTuple):
    """Some queries, and the keys that any of them may see."""

    rows: slice
    keys: slice
    allowed: Tensor
    """bool [rows, keys]."""


class Seen(Protocol):
    """Keys that queries may see, block by block."""

    most_seen: int

    def blocks(self, elements: int) -> Iterator[QueryBlock]:
        """See Places."""
        ...


class Places:
    """Positions of a process's queries among the keys of the whole sequence, and the keys that each may see."""

    def __init__(
        self, queries: int, keys: int, device: torch.device, *, sharers: Group | None = None,
        documents: TokenLayout | None = None,
    ) -> None:  # fmt: skip
        """The queries are the last of the positions, or this rank's pieces of them, where `sharers` divide a sequence.
        documents: packed ones, of which a query sees the one it is in."""
        self.keys, self.device = keys, device
        if sharers is None or sharers.size() == 1:
            self._pieces = [(slice(0, queries), keys)]
            positions = torch.arange(keys - queries, keys)
        else:
            length = queries // 2
            pieces = list_pieces_of_rank(sharers.rank(), sharers.size())
            self._pieces = [(slice(i * length, (i + 1) * length), (p + 1) * length) for i, p in enumerate(pieces)]
            positions = list_positions_of_rank(keys, sharers.rank(), sharers.size())
        self._firsts = None if documents is None else documents.starts[positions]
        self.most_seen = keys if documents is None else max(documents.new)
        """Keys that a query may see at most."""

    def blocks(self, elements: int) -> Iterator[QueryBlock]:
        """Yield blocks of queries. elements: numbers that a query needs for each of its keys."""
        size = max(1, _BLOCK_ELEMENTS // (elements * self.keys))
        for piece, end in self._pieces:
            for start in range(piece.start, piece.stop, size):
                stop = min(start + size, piece.stop)
                first = 0 if self._firsts is None else int(self._firsts[start])
                last = end - (piece.stop - stop)  # behind the position of the block's last query
                positions = torch.arange(last - (stop - start), last, device=self.device)
                keys = torch.arange(first, last, device=self.device)
                allowed = keys <= positions[:, None]
                if self._firsts is not None:
                    allowed &= keys >= self._firsts[start:stop, None].to(self.device, non_blocking=True)
                yield QueryBlock(slice(start, stop), slice(first, last), allowed)


class IndexVectors(NamedTuple):
    """Vectors and weights that the indexer makes of its inputs."""

    query: Tensor
    """[s, b, g, d]."""
    key: Tensor
    """[t, b, d]."""
    weight: Tensor
    """[s, b, g], with all constant factors."""


def score_keys(vectors: IndexVectors, rows: slice, keys: Tensor, rectifies: bool) -> tuple[Tensor, Tensor]:
    """Scores I [b, rows, t] float32 and the products that they are sums of, [b, rows, g, t], behind the relu. keys:
    [b, t, d], the same for all rows, or [b, rows, t, d]."""
    products = multiply_rows(vectors.query[rows].transpose(0, 1), keys)
    products = products.relu_() if rectifies else products
    weight = at_least_float32(vectors.weight[rows]).transpose(0, 1).unsqueeze(2)  # [b, rows, 1, g]
    return (weight @ products).squeeze(2), products


def multiply_rows(queries: Tensor, keys: Tensor) -> Tensor:
    """[b, rows, n, d] x [b, t, d], the same for all rows, or [b, rows, t, d] -> [b, rows, n, t] float32."""
    if keys.dim() == 4:
        return multiply_in_float32(queries, keys.transpose(-1, -2))
    products = multiply_in_float32(queries.flatten(1, 2).unsqueeze(0), keys.transpose(-1, -2).unsqueeze(0))
    return products.squeeze(0).unflatten(1, queries.shape[1:3])


@torch.no_grad()
def choose_keys(vectors: IndexVectors, places: Seen, count: int, rectifies: bool = True) -> Tensor | None:
    """The keys that each query chooses, int32 [s, b, count] in ascending order and behind them -1 where it sees fewer;
    None where no query sees more than `count`, and all are chosen. rectifies: the relu."""
    if places.most_seen <= count:
        return None
    queries, batch, heads, _ = vectors.query.shape
    chosen = torch.full((queries, batch, count + 1), -1, dtype=torch.int32, device=vectors.query.device)
    key = vectors.key.transpose(0, 1)  # [b, t, d]
    for rows, keys, allowed in places.blocks(batch * heads):
        kept = allowed.expand(batch, -1, -1)
        if keys.stop - keys.start > count:
            scores, _ = score_keys(vectors, rows, key[:, keys], rectifies)
            scores.add_((~allowed).to(scores.dtype).mul_(torch.finfo(scores.dtype).min / 2))
            kept = _keep_best(scores, count) & allowed
        # Each kept key goes to the place of its number among those that are kept; the others before the first place.
        places_of_kept = kept.cumsum(-1, dtype=torch.int32).mul_(kept)
        numbers = torch.arange(keys.start, keys.stop, dtype=torch.int32, device=chosen.device).expand(kept.shape)
        chosen[rows].transpose(0, 1).scatter_(2, places_of_kept.long(), numbers)
    return chosen[..., 1:].contiguous()


def _keep_best(scores: Tensor, count: int) -> Tensor:
    """Mark the `count` largest of [..., t], bool; of equal ones the first, on every device."""
    least = scores.topk(count, sorted=False).values.amin(-1, keepdim=True)
    best = scores >= least
    if (
        is_cpu(scores) and best.sum(-1, dtype=torch.int32).amax() == count
    ):  # on other devices the host would wait for it
        return best
    above, level = scores > least, scores == least
    # Relu makes many scores exactly zero.
    room = count - above.sum(-1, keepdim=True, dtype=torch.int32)
    return above | (level & (level.cumsum(-1, dtype=torch.int32) <= room))


def gather_rows(key: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """key [t, b, c], chosen [rows, b, k] -> keys [rows, b, k, c], where there is none bool [rows, b, k], and where they
    lie among [t * b], int64 [rows * b * k]."""
    batch = key.shape[1]
    lies = chosen.long().clamp_(min=0).mul_(batch).add_(torch.arange(batch, device=key.device).unsqueeze(1)).flatten()
    keys = key.flatten(0, 1).index_select(0, lies).view(*chosen.shape, -1)
    return keys, chosen < 0, lies


def add_rows_(total: Tensor, lies: Tensor, rows: Tensor) -> None:
    """Add [rows * b * k, c] to [t, b, c] at the places that `gather_rows` returns."""
    total.flatten(0, 1).index_add_(0, lies, rows)


def attend_chosen(
    query: Tensor, key: Tensor, chosen: Tensor, value_width: int, scale: float, dropout: float = 0.0
) -> Tensor:
    """softmax(scale * q . k over the chosen keys) times their first `value_width` channels: query [s, b, n, c], key
    [t, b, c] of all heads, chosen int32 [s, b, k] -> [s, b, n, value_width]. A query without keys gets zeros."""
    seed = draw_seed() if dropout else None
    result: Tensor = _AttendChosen.apply(
        query, key, chosen, _ChosenKeysCall(PlainKernel(scale, dropout), value_width, seed)
    )
    return result


class _ChosenKeysCall(NamedTuple):
    """Settings of one call besides its tensors."""

    kernel: PlainKernel
    value_width: int
    seed: int | None

    def blocks(
        self, query: Tensor, key: Tensor, chosen: Tensor
    ) -> Iterator[tuple[slice, tuple[Tensor, Tensor, Tensor], Rule, Tensor]]:
        """Rows, query [rows * b, 1, n, c] with keys, which are values, too, [rows * b, 1, k, c], what of these, and
        where they lie."""
        size = max(1, _BLOCK_ELEMENTS // (chosen[0].numel() * key.shape[-1]))
        for start in range(0, query.shape[0], size):
            rows = slice(start, min(start + size, query.shape[0]))
            keys, none, lies = gather_rows(key, chosen[rows])
            keys = keys.flatten(0, 1).unsqueeze(1)
            inputs = query[rows].flatten(0, 1).unsqueeze(1), keys, keys
            seed = None if self.seed is None else self.seed + start
            # The first rows alone have fewer keys.
            mask = none.flatten(0, 1)[:, None, None].expand(-1, -1, query.shape[2], -1)
            yield rows, inputs, Rule(False, mask=mask, seed=seed), lies


class _AttendChosen(torch.autograd.Function):
    """Keeps the output and the logarithm of each query's sum; keys are gathered and scores computed again."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, chosen: Tensor, call: _ChosenKeysCall) -> Tensor:
        output = query.new_empty(*query.shape[:3], call.value_width)
        log_sum = query.new_empty(query.shape[:3], dtype=wide_dtype(query))
        for rows, inputs, rule, _ in call.blocks(query, key, chosen):
            part, logs = call.kernel.forward(*inputs, rule)
            output[rows] = part[..., : call.value_width].reshape(output[rows].shape)
            log_sum[rows] = logs.reshape(log_sum[rows].shape)
        ctx.call = call
        ctx.save_for_backward(query, key, chosen, output, log_sum)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        query, key, chosen, output, log_sum = ctx.saved_tensors
        call: _ChosenKeysCall = ctx.call
        grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
        grad_key = torch.zeros(key.shape, dtype=wide_dtype(key), device=key.device)
        for rows, inputs, rule, lies in call.blocks(query, key, chosen):
            more = query.shape[-1] - call.value_width
            grad, merged = (F.pad(x[rows].flatten(0, 1).unsqueeze(1), (0, more)) for x in (grad_output, output))
            logs = log_sum[rows].flatten(0, 1).unsqueeze(1)
            of_query, of_keys = find_shared_gradients(call.kernel, grad, inputs[:2], (merged, logs), rule)
            grad_query[rows] = of_query.reshape(grad_query[rows].shape)
            add_rows_(grad_key, lies, at_least_float32(of_keys).flatten(0, 2))
        return grad_query, grad_key.to(key.dtype), None, None


# ---- the indexer's loss


class LossCall(NamedTuple):
    """Target of the indexer, all of it without gradients: the keys at which attention itself looks."""

    query: Tensor
    """[s, b, n, c], of this tensor-parallel rank's heads."""
    key: Tensor
    """[t, b, c]."""
    scale: float
    places: Seen
    chosen: Tensor | None
    """The keys over which both distributions live; None: all that a query sees."""
    ranks: Group
    """That have the other heads."""
    rectifies: bool
    log_sum: Tensor | None = None
    """Logarithm of the denominators of attention's softmax, [s, b, n], where it sees other keys, too; else it runs
    over the keys here."""


def compute_index_loss(vectors: IndexVectors, call: LossCall) -> Tensor:
    """The sum over queries of KL(t || p), scalar float32: p = softmax of the indexer's scores, t the mean of the
    softmaxes of all attention heads. Its gradient, p - t at the scores, is computed at once and kept."""
    result: Tensor = _IndexLoss.apply(*vectors, call)
    return result


class _IndexLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, weight: Tensor, call: LossCall) -> Tensor:
        vectors = IndexVectors(query, key, weight)
        total = torch.zeros((), dtype=wide_dtype(query), device=query.device)
        grads = [torch.zeros(x.shape, dtype=wide_dtype(x), device=x.device) for x in vectors]
        batch, numbers = query.shape[1], max(query.shape[2], call.query.shape[2])
        if call.chosen is not None:
            of_keys = query.shape[-1] + call.key.shape[-1]
            numbers = max(numbers, count_gathered(of_keys, call.chosen.shape[-1], len(key)))
        for rows, keys, allowed in call.places.blocks(batch * numbers):
            total += _add_block(vectors, call, (rows, keys, allowed), grads)
        ctx.save_for_backward(*(grad.to(x.dtype) for grad, x in zip(grads, vectors, strict=True)))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return *(x * grad.to(x.dtype) for x in ctx.saved_tensors), None


def _add_block(
    vectors: IndexVectors, call: LossCall, block: tuple[slice, slice, Tensor], grads: list[Tensor]
) -> Tensor:
    """Add a block's gradients to the gradients of the three vectors, and return its loss."""
    rows, keys, allowed = block
    lies = None
    if call.chosen is None:
        index_keys, attention_keys = (x[keys].transpose(0, 1) for x in (vectors.key, call.key))
        hidden = ~allowed.expand(vectors.query.shape[1], -1, -1)
    else:
        index_keys, none, lies = gather_rows(vectors.key, call.chosen[rows])
        index_keys, attention_keys, hidden = (
            x.transpose(0, 1) for x in (index_keys, gather_rows(call.key, call.chosen[rows])[0], none)
        )
    target = multiply_rows(call.query[rows].transpose(0, 1), attention_keys).mul_(call.scale)
    del attention_keys  # as large as anything here
    target.masked_fill_(hidden.unsqueeze(2), -math.inf)
    if call.log_sum is None:
        target = target.softmax(-1).sum(2)
    else:
        target = target.sub_(call.log_sum[rows].transpose(0, 1).unsqueeze(3)).exp_().sum(2)
    all_reduce(target, call.ranks)
    target = target / target.sum(-1, keepdim=True).clamp_(min=1e-10)
    scores, products = score_keys(vectors, rows, index_keys, call.rectifies)
    logs = scores.masked_fill_(hidden, -math.inf).log_softmax(-1)
    loss = (target * (target.clamp(min=1e-10).log() - logs.masked_fill(hidden, 0.0))).sum()
    # A query may see none of the keys.
    at_scores = logs.exp().masked_fill_(hidden, 0.0).sub_(target).unsqueeze(2)  # [b, rows, 1, t]
    weight = at_least_float32(vectors.weight[rows]).transpose(0, 1).unsqueeze(3)  # [b, rows, g, 1]
    grads[2][rows] = (products @ at_scores.transpose(-1, -2)).squeeze(3).transpose(0, 1)
    at_products = weight * at_scores
    if call.rectifies:
        at_products *= products > 0
    wide = at_least_float32(index_keys)
    index_query = at_least_float32(vectors.query[rows]).transpose(0, 1)
    if lies is None:
        grads[0][rows] = (at_products.flatten(1, 2) @ wide).view_as(index_query).transpose(0, 1)
        grads[1][keys] += (at_products.flatten(1, 2).transpose(1, 2) @ index_query.flatten(1, 2)).transpose(0, 1)
    else:
        grads[0][rows] = (at_products @ wide).transpose(0, 1)
        add_rows_(grads[1], lies, (at_products.transpose(-1, -2) @ index_query).transpose(0, 1).flatten(0, 2))
    return loss
