# SPDX-License-Identifier: Apache-2.0
"""Decay inside of chunks of tokens, by head or by channel: what it weighs, and the gradients of that.

With c the running sum of log decay in a chunk, and everything 0 across the border of two documents:

    pairs   sum over channels of x_i k_j exp(c_i - c_j) for j <= i        enter   x_i exp(c_i)
    keep    exp(c_last)                                                   leave   k_j exp(c_last - c_j)

Differences are formed before they are exponentiated: none is positive, so that nothing overflows. Running sums are two
numbers, the rounded one and the rest: differences of far larger sums then have all digits of float32.

Where decay differs by channel, pairs are no product of two matrices. A chunk is halved again and again: pairs of a
token of the later half with one of the earlier are a product, since both meet at the border, c_i - c_m and c_m - c_j;
pairs within the last `_CELL` tokens are summed channel by channel.

Tensors are [n, b, G, r, C, ...]: n chunks of C tokens (a power of two), b sequences, G groups of r heads; where heads
of a group share something, it has 1 in place of r.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_CELL = 4
_LOWEST = -1000.0
"""exp of it is 0, in float64, too; below it sums of chunks would lose the digits of other tokens."""


class DocumentCells:
    """Membership of tokens in documents, chunk by chunk.

    numbers: of each token's document, int [b or 1, tokens], whole chunks; before: of the token before them, [b or 1].
    """

    def __init__(self, numbers: Tensor, before: Tensor, chunk_size: int) -> None:
        divided = numbers.unflatten(1, (-1, chunk_size)).movedim(1, 0)[:, :, None, None]  # [n, b, 1, 1, C]
        last = divided[..., -1]
        entering = torch.cat([before.expand(1, last.shape[1])[..., None, None], last[:-1]])
        self.are_together = divided[..., :, None] == divided[..., None, :]
        """[n, b, 1, 1, C, C]."""
        self.enters = divided == entering[..., None]
        """True for tokens of the document in which the chunk begins, [n, b, 1, 1, C]."""
        self.leaves = divided == last[..., None]
        """True for tokens of the document in which it ends."""
        self.stays = entering == last
        """True if that is one, [n, b, 1, 1]."""


class Decay(ABC):
    """log_decay: at most 0, [n, b, G, r, C, 1], or [n, b, G, r, C, K] with a number for each channel."""

    def __init__(self, log_decay: Tensor, documents: DocumentCells | None, dtype: torch.dtype) -> None:
        self._is_counted = log_decay >= _LOWEST
        total = log_decay.double().clamp_(min=_LOWEST).cumsum_(dim=4)
        self._high = total.to(dtype, copy=True)
        self._low = total.sub_(self._high).to(dtype)
        self._documents = documents
        size = log_decay.shape[4]
        hidden = torch.ones(size, size, dtype=torch.bool, device=total.device).triu_(1)
        self.hidden = hidden if documents is None else hidden | ~documents.are_together
        """True for pairs that do not see each other."""
        self.grad = torch.zeros_like(self._high)
        """Of the running sums; what is called with gradients adds to it."""

    @abstractmethod
    def weigh_pairs(self, others: Sequence[Tensor], key: Tensor) -> list[Tensor]:
        """For each x of the others the pairs of x and key, [n, b, G, r, C, C]."""

    @abstractmethod
    def weigh_pairs_backward(
        self, others: Sequence[Tensor], key: Tensor, pairs: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """The gradients of others and key; grads, of the pairs, are overwritten."""

    def enter(self, x: Tensor) -> Tensor:
        """X weighted by the decay from the chunk's beginning."""
        return x * self._entering()

    def enter_backward(self, entered: Tensor, grad: Tensor) -> Tensor:
        """The gradient of x."""
        self._add(grad * entered)
        return grad * self._entering()

    def leave(self, key: Tensor) -> Tensor:
        """Keys weighted by the decay up to the chunk's end."""
        return key * self._leaving()

    def leave_backward(self, left: Tensor, grad: Tensor) -> Tensor:
        """The gradient of the keys."""
        self._add(grad * left, leaves=True)
        return grad * self._leaving()

    def keep(self) -> Tensor:
        """The decay of the state over each chunk: [n, b, G, r, K or 1, 1]."""
        factor = self._high[..., -1, :].exp()
        return (factor if self._documents is None else factor * self._documents.stays[..., None])[..., None]

    def keep_backward(self, kept: Tensor, grad: Tensor) -> None:
        """Add the gradient; grad: [n, b, G, heads, K, V] times the state, not yet summed over V and heads."""
        of_factor = grad.sum(-1, keepdim=True).sum_to_size(kept.shape)
        self.grad[..., -1, :] += (of_factor * kept)[..., 0]

    def backward(self) -> Tensor:
        """The gradient of log_decay, from what the calls before have added."""
        # The gradient of a prefix sum: each token gets the sum of the gradients from its position on.
        total = self.grad.sum(4, keepdim=True)
        return (total - self.grad.cumsum(4) + self.grad) * self._is_counted

    def _entering(self) -> Tensor:
        factor = self._high.exp()
        return factor if self._documents is None else factor * self._documents.enters[..., None]

    def _leaving(self) -> Tensor:
        last = (self._high[..., -1:, :] - self._high).add_(self._low[..., -1:, :]).sub_(self._low)
        factor = last.exp_()
        return factor if self._documents is None else factor * self._documents.leaves[..., None]

    def _add(self, grad: Tensor, *, leaves: bool = False) -> None:
        """Add the gradient of exp(c), or of exp(c_last - c), times that factor: [n, b, G, r, C, K]."""
        grad = grad.sum_to_size(self._high.shape)
        if leaves:
            self.grad -= grad
            self.grad[..., -1, :] += grad.sum(4)
        else:
            self.grad += grad


class DecayByHead(Decay):
    """One number for each token: pairs are products of matrices, weighed."""

    _factor: Tensor

    def weigh_pairs(self, others: Sequence[Tensor], key: Tensor) -> list[Tensor]:
        """See Decay."""
        high, low = self._high, self._low
        difference = (high - high.mT).add_(low).sub_(low.mT)
        self._factor = difference.masked_fill_(self.hidden, -torch.inf).exp_()
        return [(x @ key.mT) * self._factor for x in others]

    def weigh_pairs_backward(
        self, others: Sequence[Tensor], key: Tensor, pairs: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """See Decay."""
        of_others, of_key = [], torch.zeros_like(key)
        for x, pair, grad in zip(others, pairs, grads, strict=True):
            # A token with itself has no decay; what it would add and take away again would only round.
            both = (grad * pair).tril_(-1)
            self.grad += both.sum(-1, keepdim=True) - both.sum(-2)[..., None]
            shape = (*torch.broadcast_shapes(x.shape[:4], key.shape[:4]), *grad.shape[4:])
            grad = grad.mul_(self._factor).sum_to_size(shape)
            of_others.append((grad @ key).sum_to_size(x.shape))
            of_key += (grad.mT @ x).sum_to_size(key.shape)
        return of_others, of_key


class DecayByChannel(Decay):
    """One number for each channel of a key, too."""

    def weigh_pairs(self, others: Sequence[Tensor], key: Tensor) -> list[Tensor]:
        """See Decay."""
        shape = (*self._high.shape[:4], key.shape[4], key.shape[4])
        found = [key.new_zeros(shape) for _ in others]
        for half, to_border, from_border in self._halve():
            early = _take_half(key, half, 0) * to_border
            for x, pairs in zip(others, found, strict=True):
                view_halves(pairs, half).copy_((_take_half(x, half, 1) * from_border) @ early.mT)
        weighed = self._weigh_cells(key)
        for x, pairs in zip(others, found, strict=True):
            cells = (x.unflatten(4, (-1, _CELL))[..., None, :] * weighed).sum(-1)
            view_cells(pairs, _CELL).copy_(cells)
            pairs.masked_fill_(self.hidden, 0.0)
        return found

    def weigh_pairs_backward(
        self, others: Sequence[Tensor], key: Tensor, pairs: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """See Decay."""
        of_others, of_key = [torch.zeros_like(x) for x in others], torch.zeros_like(key)
        for grad in grads:
            grad.masked_fill_(self.hidden, 0.0)
        for half, to_border, from_border in self._halve():
            early = _take_half(key, half, 0) * to_border
            of_early = torch.zeros_like(early)
            for x, grad, of_x in zip(others, grads, of_others, strict=True):
                late, block = _take_half(x, half, 1) * from_border, view_halves(grad, half).contiguous()
                of_late = block @ early
                of_early += block.mT @ late
                _take_half(self.grad, half, 1).add_(of_late * late)
                _take_half(of_x, half, 1).add_((of_late * from_border).sum_to_size(_take_half(x, half, 1).shape))
            # What the border's sum adds to both sides cancels.
            _take_half(self.grad, half, 0).sub_(of_early * early)
            _take_half(of_key, half, 0).add_((of_early * to_border).sum_to_size(_take_half(key, half, 0).shape))
        self._add_cells(others, key, grads, of_others, of_key)
        return of_others, of_key

    def _add_cells(
        self, others: Sequence[Tensor], key: Tensor, grads: Sequence[Tensor], of_others: list[Tensor], of_key: Tensor
    ) -> None:
        weighed, factor = self._weigh_cells(key), self._find_cells()
        of_weighed = torch.zeros_like(weighed)
        for x, grad, of_x in zip(others, grads, of_others, strict=True):
            cells = view_cells(grad, _CELL)[..., None]  # [n, b, G, r, cells, later, earlier, 1]
            divided = x.unflatten(4, (-1, _CELL))
            of_weighed.addcmul_(cells, divided[..., None, :])
            of_x.unflatten(4, (-1, _CELL)).add_((cells * weighed).sum(-2).sum_to_size(divided.shape))
        divided = key.unflatten(4, (-1, _CELL))
        of_key.unflatten(4, (-1, _CELL)).add_((of_weighed * factor).sum(-3).sum_to_size(divided.shape))
        both = of_weighed.mul_(weighed)
        both.diagonal(dim1=-3, dim2=-2).zero_()
        self.grad.unflatten(4, (-1, _CELL)).add_(both.sum(-2)).sub_(both.sum(-3))

    def _halve(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield for each length of halves the decay of earlier halves up to the border, and of later ones from it."""
        half = self._high.shape[4] // 2
        while half >= _CELL:
            high, low = (x.unflatten(4, (-1, 2, half)) for x in (self._high, self._low))
            border = (high[..., 0, -1:, :], low[..., 0, -1:, :])  # [n, b, G, r, blocks, 1, K]
            to_border = (border[0] - high[..., 0, :, :]).add_(border[1]).sub_(low[..., 0, :, :]).exp_()
            from_border = (high[..., 1, :, :] - border[0]).add_(low[..., 1, :, :]).sub_(border[1]).exp_()
            yield half, to_border, from_border
            half //= 2

    def _find_cells(self) -> Tensor:
        """exp(c_i - c_j) within cells: [n, b, G, r, cells, later, earlier, K]; 1 where j > i."""
        high, low = (x.unflatten(4, (-1, _CELL)) for x in (self._high, self._low))
        difference = (high[..., :, None, :] - high[..., None, :, :]).add_(low[..., :, None, :])
        return difference.sub_(low[..., None, :, :]).clamp_(max=0.0).exp_()

    def _weigh_cells(self, key: Tensor) -> Tensor:
        return self._find_cells().mul_(key.unflatten(4, (-1, _CELL))[..., None, :, :])


def _take_half(x: Tensor, half: int, which: int) -> Tensor:
    """[n, b, G, r, C, K] -> [n, b, G, r, blocks, half, K], the earlier or the later half of each block."""
    return x.unflatten(4, (-1, 2, half))[..., which, :, :]


def view_cells(pairs: Tensor, size: int) -> Tensor:
    """[..., C, C] -> its blocks on the diagonal, [..., C / size, size, size], in the same memory."""
    blocks = pairs.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def view_halves(pairs: Tensor, half: int) -> Tensor:
    """[..., C, C] -> the pairs of later with earlier halves, [..., C / half / 2, half, half], in the same memory."""
    return view_cells(pairs, 2 * half)[..., half:, :half]
