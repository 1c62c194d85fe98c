# SPDX-License-Identifier: Apache-2.0
"""The contiguous pieces of a sequence that a rank holds, and what passes from each to the next.

A mixer with a state goes over tokens in their order. Under context parallelism a rank holds two pieces of each sequence
(context_parallel/sharding.py), which it computes side by side, as if they were different sequences; what a piece needs
of those before it is handed over:

    convolution   the last tokens of the piece before
    state         each piece maps the state before it, S, to M S + T; ranks gather M and T [K, K + V] of all pieces,
                  small compared with the tokens, and find the states before their pieces: exact, whatever the decay

Where pieces are short compared with the states, ranks exchange tokens for heads instead (`moves_heads`): each then has
some heads of the whole sequence, whose states need not be handed over.

Documents that are packed into a sequence are kept apart: nothing passes from one to the next.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from megatron.core.context_parallel.sharding import list_pieces_of_rank
from megatron.core.errors import ConfigError
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.plan.state_exchange import Exchange, StateInput
from megatron.core.process_groups_config import Group
from megatron.core.sequences.token_layout import TokenLayout
from megatron.core.ssm.chunks import Inputs
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.core_attention.exchanges import exchange_heads_for_tokens, exchange_tokens_for_heads


class Pieces:
    """A rank's pieces of sequences of `length` tokens: one without context parallelism, else two.

    layout: of the documents that are packed into the whole sequence; None where every sequence is one document.
    """

    def __init__(self, group: Group, length: int, layout: TokenLayout | None, device: torch.device) -> None:
        self.group = group
        count = 1 if group.size() == 1 else 2 * group.size()
        self._numbers = list_pieces_of_rank(group.rank(), group.size()) if count > 1 else (0,)
        self._size, self._count = length // count, count
        self._layout, self._device = layout, device
        self._documents: Tensor | None = None
        self._continues = [piece > 0 for piece in range(count)]
        """For every piece of the sequence: whether its first token goes on with the document before it."""
        if layout is not None:
            counts, bounds = torch.tensor(layout.new), layout.bounds
            numbers = torch.arange(len(counts)).repeat_interleave(counts)
            self._documents = layout.keep(("numbers of documents", device), lambda: numbers.to(device))
            self._continues = [piece > 0 and piece * self._size not in bounds for piece in range(count)]

    def split(self, x: Tensor) -> Tensor:
        """[pieces x tokens, b, ...] -> [tokens, pieces x b, ...]."""
        return x if self._count == 1 else torch.cat(x.chunk(2), dim=1)

    def join(self, x: Tensor) -> Tensor:
        """[tokens, pieces x b, ...] -> [pieces x tokens, b, ...]."""
        return x if self._count == 1 else torch.cat(x.chunk(2, dim=1))

    def list_documents(self, before: int = 0) -> Tensor | None:
        """The number of each token's document, int [pieces, before + tokens], with so many tokens before each piece;
        -1 before the sequence. None where there is one document."""
        if self._documents is None:
            return None
        padded = torch.cat([self._documents.new_full((before,), -1), self._documents])
        starts = [piece * self._size for piece in self._numbers]
        return torch.stack([padded[start : start + before + self._size] for start in starts])

    def moves_heads(self, inputs: Inputs) -> bool:
        """Return True where ranks exchange tokens for heads. inputs: [pieces x b, tokens, heads, ...]
        of this rank."""
        return self.is_divided and weigh_exchange(inputs, self.group.size()).moves_heads

    def take_heads(self, inputs: Inputs) -> Inputs:
        """Exchange [pieces x b, tokens, heads, ...] for [b, s, heads / cp, ...] of the whole sequence."""
        tensors = {name: x for name, x in inputs._asdict().items() if x is not None}
        whole: dict[str, Tensor] = {}
        # One exchange for the tensors of each dtype: they travel in one piece of memory.
        for dtype in {x.dtype for x in tensors.values()}:
            names = [name for name, x in tensors.items() if x.dtype == dtype]
            own = [self.join(tensors[name].transpose(0, 1)) for name in names]
            whole |= zip(names, exchange_tokens_for_heads(own, self.group), strict=True)
        return inputs._replace(**{name: x.transpose(0, 1) for name, x in whole.items()})

    def return_heads(self, output: Tensor) -> Tensor:
        """Exchange [b, s, heads / cp, V] for [pieces x b, tokens, heads, V]."""
        own = exchange_heads_for_tokens(output.transpose(0, 1).flatten(2), self.group)
        return self.split(own.unflatten(2, (-1, output.shape[-1]))).transpose(0, 1)

    def take_own(self, of_heads: Tensor) -> Tensor:
        """[heads, ...] -> [heads / cp, ...], those that `take_heads` gives this rank."""
        return of_heads.chunk(self.group.size())[self.group.rank()]

    @property
    def has_documents(self) -> bool:
        """True for packed documents."""
        return self._layout is not None

    def find_bounds(self) -> Tensor | None:
        """Return the bounds of documents in the whole sequence, int64 [documents + 1], one tensor for all layers; None
        where there is one document."""
        layout, device = self._layout, self._device
        if layout is None:
            return None
        return layout.keep(("bounds of documents", device), lambda: torch.tensor(layout.bounds).to(device))

    def list_all_documents(self) -> Tensor | None:
        """The number of each token's document in the whole sequence, int [1, s]; None where there is one document."""
        return None if self._documents is None else self._documents[None]

    def fetch_before(self, x: Tensor, tokens: int) -> Tensor | None:
        """The last tokens of the piece before each of ours, [tokens, pieces x b, c], of x [.., pieces x b, c]; zeros
        before the sequence. None without context parallelism: there is nothing before. Raises ConfigError for pieces of
        fewer tokens."""
        if self._count == 1:
            return None
        if self._size < tokens:
            raise ConfigError(
                f"--context-parallel-size {self.group.size()} leaves pieces of {self._size} tokens, and a convolution "
                f"reads the {tokens} tokens before each; use sequences of at least {tokens * self._count} tokens"
            )
        ends = self._gather(x[-tokens:].movedim(1, 0).unflatten(0, (2, -1)))  # [pieces of all, b, tokens, c]
        before = [ends[piece - 1] if piece else torch.zeros_like(ends[0]) for piece in self._numbers]
        return torch.cat(before).movedim(0, 1)

    def hand_over(self, final: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The state before each of our pieces, [pieces x b, H, K, V], and after the sequence, [b, H, K, V], from the
        states that all pieces end with.

        final: [pieces x b, H, K, V + K], T and M side by side; width: V.
        """
        of_pieces = self._gather(final.unflatten(0, (2, -1)))  # [pieces of all, b, H, K, V + K]
        state = torch.zeros_like(of_pieces[0, ..., :width])
        before = []
        for piece in range(self._count):
            if not self._continues[piece]:
                # Not new zeros: backward reaches the gathering on all ranks, also on one whose pieces all start a
                # document.
                state = state.masked_fill(state.new_ones((), dtype=torch.bool), 0.0)
            before.append(state)
            change, transition = of_pieces[piece].split([width, final.shape[-1] - width], dim=-1)
            state = transition @ state + change
        return torch.cat([before[piece] for piece in self._numbers]), state

    def _gather(self, x: Tensor) -> Tensor:
        """[2, ...] of each rank -> [pieces, ...] in the order of the sequence."""
        gathered = gather_from_sequence_parallel_region(x.contiguous(), group=self.group)
        size = self.group.size()
        order = [piece for rank in range(size) for piece in list_pieces_of_rank(rank, size)]
        return torch.stack([gathered[order.index(piece)] for piece in range(self._count)])

    @property
    def is_divided(self) -> bool:
        """True under context parallelism, where states are handed over."""
        return self._count > 1


def weigh_exchange(inputs: Inputs, ranks: int) -> Exchange:
    """Return what ranks would send. inputs: [pieces x b, tokens, heads, ...] of one rank, on any device."""
    pieces, tokens = inputs.value.shape[:2]
    found = [StateInput(x.shape[2], prod(x.shape[3:]), x.element_size()) for x in inputs if x is not None]
    return Exchange.weigh(found, pieces * tokens, pieces, ranks)


def describe_pieces(group: Group, x: Tensor, packed: PackedSeqParams | None) -> Pieces:
    """Describe the pieces of a rank's tokens x [s, b, ...]. group: the ranks that share the sequence, except for packed
    documents that have a separate group."""
    group = group if packed is None or packed.cp_group is None else packed.cp_group
    length = x.shape[0] * group.size()
    return Pieces(group, length, None if packed is None else packed.layout(length), x.device)
