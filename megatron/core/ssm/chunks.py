# SPDX-License-Identifier: Apache-2.0
"""Linear attention over a few chunks of tokens by matrix products, and its gradients, both written out.

With q, k, v of a chunk's tokens, P and A the pairs of q and k and of e and k, weighed by decay (decay.py), S the state
before the chunk:

    T = (I + tril(A, -1))^{-1}                  U = T (v - enter(e) S), without a delta rule v
    O = enter(q) S + P U                        S <- keep S + leave(k)^T U

Backward goes through the same products, transposed; of U = T W, with dW = T^T dU, the gradient of A is -dW U^T.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.plan.state_kinds import PAIRS_AT_ONCE
from megatron.core.ssm.decay import Decay, DecayByChannel, DecayByHead, DocumentCells, view_cells, view_halves
from megatron.core.ssm.state_passing import pass_states, pass_states_backward

SMALLEST = 16
"""Tokens of a chunk at least; systems of so many are solved by substitution, larger ones by products."""


class Inputs(NamedTuple):
    """Inputs of linear attention, or gradients of them: see `linear_attention.attend`."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    strength: Tensor | None = None
    erase: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> Inputs:
        """The same with each tensor changed."""
        query, key, value, log_decay = (function(x) for x in self[:4])
        return Inputs(query, key, value, log_decay, *(x if x is None else function(x) for x in self[4:]))


class Chunks:
    """Chunks that follow each other; inputs: [b, tokens, heads, ...] as `attend` takes them.

    documents: see `DocumentCells`. unit: (epsilon, length) where queries and keys become vectors of length one, and
    queries then of `length`.
    """

    def __init__(
        self, inputs: Inputs, documents: DocumentCells | None, chunk_size: int, unit: tuple[float, float] | None
    ) -> None:
        self._shape, self._size = inputs.value.shape, chunk_size
        self._groups = inputs.key.shape[2]
        dtype = torch.float64 if inputs.value.dtype == torch.float64 else torch.float32
        query, key, value = (self._divide(x.to(dtype)) for x in inputs[:3])
        self._units: list[_UnitVectors] = []
        if unit is not None:
            self._units = [_UnitVectors(query, unit[0], unit[1]), _UnitVectors(key, unit[0], 1.0)]
            query, key = (x.forward() for x in self._units)
        self._query, self._key, self._value = query, key, value
        by_channel = inputs.log_decay.dim() == 4
        kind = DecayByChannel if by_channel else DecayByHead
        log_decay = self._divide(inputs.log_decay)
        self._decay: Decay = kind(log_decay if by_channel else log_decay[..., None], documents, dtype)
        self._strength = self._divide_rows(inputs.strength, dtype)
        self._written_first = value if self._strength is None else value * self._strength
        self._entering, self._leaving, self._keep = (
            self._decay.enter(query), self._decay.leave(key), self._decay.keep()
        )  # fmt: skip
        # What erases is the key times something of each token, or of each of its channels, too.
        self._erase = self._divide_rows(inputs.erase, dtype)
        self._erases_by_channel = inputs.erase is not None and inputs.erase.dim() == 4
        self._causes: Tensor | None = None
        self._solved: Tensor | None = None
        if self._erase is None:
            self._others = [query]
            self._pairs = self._decay.weigh_pairs(self._others, key)
        else:
            self._others = [query, key * self._erase if self._erases_by_channel else key]
            self._pairs = self._decay.weigh_pairs(self._others, key)
            self._entered = self._decay.enter(self._others[1])
            self._causes = self._entered if self._erases_by_channel else self._entered * self._erase
            system = self._pairs[1] if self._erases_by_channel else self._pairs[1] * self._erase
            self._solved = self._spread(invert(system))
            self._causes = self._spread(self._causes)
        self._left, self._kept = self._spread(self._leaving), self._spread(self._keep)

    def _spread(self, x: Tensor) -> Tensor:
        """Return what heads share, once for each, without gaps, as kernels want it."""
        return x.expand(*self._value.shape[:4], *x.shape[4:]).contiguous()

    def _pass(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return pass_states(
            self._written_first, self._causes, self._solved, self._left, self._kept, state.unflatten(1, self._heads)
        )

    @property
    def _heads(self) -> tuple[int, int]:
        return self._groups, self._shape[2] // self._groups

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs [b, tokens, H, V], and the state after the chunks, from the one before them, [b, H, K, V]."""
        states, written, last = self._pass(state)
        output = self._pairs[0] @ written
        output += self._entering @ states
        return self._join(output), last.flatten(1, 2)

    def backward(self, state: Tensor, of_output: Tensor, of_last: Tensor) -> tuple[Inputs, Tensor]:
        """The gradients of the inputs and of the state, from the gradients of the outputs and of the last state."""
        states, written, _ = self._pass(state)
        of_output = self._divide(of_output.to(written.dtype))
        decay, pairs = self._decay, self._pairs
        of_values, after, of_state = pass_states_backward(
            self._causes, self._solved, self._left, self._kept, self._entering.mT @ of_output, pairs[0].mT @ of_output,
            of_last.unflatten(1, self._heads),
        )  # fmt: skip
        decay.keep_backward(self._keep, after * states)
        of_entering = (of_output @ states.mT).sum_to_size(self._entering.shape)
        of_query = decay.enter_backward(self._entering, of_entering).sum_to_size(self._query.shape)
        of_leaving = (written @ after.mT).sum_to_size(self._leaving.shape)
        of_key = decay.leave_backward(self._leaving, of_leaving).sum_to_size(self._key.shape)
        of_pairs, of_erase = [(of_output @ written.mT).sum_to_size(pairs[0].shape)], None
        if self._erase is not None:
            of_causes, of_system = -(of_values @ states.mT), -(of_values @ written.mT)
            if self._erases_by_channel:
                of_entered, of_alike = of_causes, of_system.tril_(-1)
            else:
                of_alike = of_system.tril_(-1)
                of_erase = (of_alike * pairs[1]).sum(-1, keepdim=True)
                of_erase += (of_causes * self._entered).sum(-1, keepdim=True)
                of_entered, of_alike = of_causes * self._erase, of_alike * self._erase
            of_pairs.append(of_alike.sum_to_size(pairs[1].shape))
            of_erasing = decay.enter_backward(self._entered, of_entered.sum_to_size(self._entered.shape))
        of_others, more = decay.weigh_pairs_backward(self._others, self._key, pairs, of_pairs)
        of_query += of_others[0]
        of_key += more
        if self._erase is not None:
            of_erasing = of_others[1] + of_erasing.sum_to_size(self._others[1].shape)
            if self._erases_by_channel:
                of_erase = of_erasing * self._key
                of_erasing = (of_erasing * self._erase).sum_to_size(self._key.shape)
            of_key += of_erasing
        of_strength = None
        if self._strength is not None:
            of_strength = (of_values * self._value).sum(-1, keepdim=True)
            of_values = of_values * self._strength
        if self._units:
            of_query, of_key = (x.backward(grad) for x, grad in zip(self._units, (of_query, of_key), strict=True))
        of_decay = decay.backward()
        found = Inputs(
            self._join(of_query), self._join(of_key), self._join(of_values),
            self._join(of_decay if isinstance(decay, DecayByChannel) else of_decay[..., 0]),
            None if of_strength is None else self._join(of_strength[..., 0]),
            None if of_erase is None else self._join(of_erase if self._erases_by_channel else of_erase[..., 0]),
        )  # fmt: skip
        return found, of_state.flatten(1, 2)

    def _divide(self, x: Tensor) -> Tensor:
        """[b, tokens, G r, ...] -> [n, b, G, r, C, ...], filled up with zeros: such tokens decay and write nothing."""
        missing = -x.shape[1] % self._size
        if missing:
            x = torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], dim=1)
        x = x.unflatten(1, (-1, self._size)).unflatten(3, (self._groups, -1))
        return x.movedim(2, 4).movedim(1, 0).contiguous()

    def _divide_rows(self, x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """The same; [..., C, 1] where there is one number for each token."""
        if x is None:
            return None
        divided = self._divide(x.to(dtype))
        return divided if x.dim() == 4 else divided[..., None]

    def _join(self, x: Tensor) -> Tensor:
        """[n, b, G, r, C, ...] -> [b, tokens, G r, ...]."""
        return x.movedim(0, 1).movedim(4, 2).flatten(3, 4).flatten(1, 2)[:, : self._shape[1]]


class _UnitVectors:
    """x scaled to one length, x / sqrt(|x|^2 + epsilon) * length."""

    def __init__(self, x: Tensor, epsilon: float, length: float) -> None:
        self._factor = x.square().sum(-1, keepdim=True).add_(epsilon).rsqrt_()
        self._unit, self._length = x * self._factor, length

    def forward(self) -> Tensor:
        return self._unit * self._length if self._length != 1.0 else self._unit

    def backward(self, grad: Tensor) -> Tensor:
        along = (grad * self._unit).sum(-1, keepdim=True)
        return torch.addcmul(grad, self._unit, along, value=-1.0).mul_(self._factor * self._length)


def invert(system: Tensor) -> Tensor:
    """(I + tril(system, -1))^{-1} of [..., C, C].

    Of two halves [[A, 0], [B, D]] it is [[A', 0], [-D' B A', D']]: blocks of 16 by substitution, then products.
    """
    size = system.shape[-1]
    block = min(SMALLEST, size)
    found = torch.zeros_like(system)
    ones = torch.eye(block, dtype=system.dtype, device=system.device)
    cells = view_cells(system, block).tril(-1)
    view_cells(found, block).copy_(
        torch.linalg.solve_triangular(cells, ones.expand_as(cells), upper=False, unitriangular=True)
    )
    while block < size:
        halves = view_cells(found, block).unflatten(-3, (-1, 2)).contiguous()
        below = halves[..., 1, :, :] @ view_halves(system, block) @ halves[..., 0, :, :]
        view_halves(found, block).copy_(below.neg_())
        block *= 2
    return found


def count_chunks_at_once(batch: int, heads: int, chunk_size: int, is_on_cpu: bool) -> int:
    """Chunks that are computed side by side: on a CPU as many as its caches hold, elsewhere as keep the device busy."""
    elements = 2**18 if is_on_cpu else PAIRS_AT_ONCE
    return max(1, elements // (batch * heads * chunk_size**2))


def list_slabs(tokens: int, at_once: int) -> Sequence[tuple[int, int]]:
    """First token and one past the last of each stretch of at most so many tokens."""
    return [(start, min(start + at_once, tokens)) for start in range(0, tokens, at_once)]
