# SPDX-License-Identifier: Apache-2.0
"""Memory of a model's layers for the tokens of several sequences, so that each new token costs one position.

| kind        | example                                        | memory                                              |
|-------------|------------------------------------------------|-----------------------------------------------------|
| per token   | keys and values, latent vectors                | [max_tokens, sequences, ...], taken at the first use |
| recurrent   | a state space's state, a convolution's tail    | [sequences, ...], the same for any number of tokens |
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron.core.sequences.token_layout import TokenLayout


class SequenceState:
    """Implements megatron.core.inference_context.InferenceContext; sequences have lengths of their own.

    `begin` says what the next call of the model reads. Memory is taken when a layer first writes, in the layer's shapes
    and dtype: keys and values of one layer take 2 * max_tokens * sequences * num_query_groups_per_rank * kv_channels
    elements; latent attention keeps max_tokens * sequences * (kv_lora_rank + qk_pos_emb_head_dim) on each rank.
    """

    def __init__(self, sequences: int, max_tokens: int) -> None:
        """max_tokens: of the longest sequence."""
        self.max_tokens = max_tokens
        self.lengths = [0] * sequences
        """Tokens of each sequence, those of the call that was begun last included."""
        self._layers: dict[int, tuple[Tensor, ...]] = {}
        self._recurrent: dict[int, tuple[Tensor, ...]] = {}

    def begin(self, new: Sequence[int]) -> TokenLayout:
        """Describe the next call, of so many tokens of each sequence, at least one; returned and kept as `layout`."""
        past = tuple(self.lengths)
        is_packed = len(set(zip(past, new, strict=True))) > 1
        self.layout = TokenLayout(tuple(new), past, is_packed)
        longest = self.layout.longest
        assert longest <= self.max_tokens, f"{longest} tokens do not fit into a state of {self.max_tokens}"
        self.lengths = [held + more for held, more in zip(past, new, strict=True)]
        return self.layout

    def update(self, layer_number: int, *new: Tensor) -> tuple[Tensor, ...]:
        """See InferenceContext; returns views."""
        layout = self.layout
        # At once for the longest sequence: appending by concatenation would copy all tokens for each new one. Zeros,
        # since attention multiplies what it hides, beyond the end of a shorter sequence, by 0.
        if layer_number not in self._layers:
            shape = (self.max_tokens, len(self.lengths))
            self._layers[layer_number] = tuple(x.new_zeros((*shape, *x.shape[2:])) for x in new)
        held = self._layers[layer_number]
        for memory, x in zip(held, new, strict=True):
            if layout.is_packed:
                memory[layout.move_places(memory.device)] = x[:, 0]
            else:
                memory[layout.past[0] : layout.longest] = x
        return tuple(memory[: layout.longest] for memory in held)

    @property
    def is_recurrent(self) -> bool:
        """True where a layer has written a recurrent state."""
        return bool(self._recurrent)

    def read_recurrent(self, layer_number: int, *initial: Tensor) -> tuple[Tensor, ...]:
        """See InferenceContext."""
        state = tuple(x.expand(len(self.lengths), *x.shape).clone() for x in initial)
        rows = [row for row, past in enumerate(self.layout.past) if past]
        for x, held in zip(state, self._recurrent[layer_number], strict=True) if rows else ():
            x[rows] = held[rows]
        return state

    def write_recurrent(self, layer_number: int, *state: Tensor) -> None:
        """See InferenceContext."""
        self._recurrent[layer_number] = state

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget all but the first tokens of each sequence, as many as `lengths` says; the next ones are written over
        them. Recurrent states cannot be rewound."""
        pairs = list(zip(lengths, self.lengths, strict=True))
        assert all(length <= held for length, held in pairs), f"(length, tokens held): {pairs}"
        assert not self.is_recurrent or list(lengths) == self.lengths, "a recurrent state cannot be rewound"
        self.lengths = list(lengths)

    def select(self, sequences: Sequence[int]) -> None:
        """Go on with these sequences only, in this order."""
        rows = list(sequences)
        if rows == list(range(len(self.lengths))):
            return
        self.lengths = [self.lengths[row] for row in rows]
        # Layer by layer, so that no more than one of them is in memory twice.
        for number, held in self._layers.items():
            self._layers[number] = tuple(x[:, rows] for x in held)
        for number, held in self._recurrent.items():
            self._recurrent[number] = tuple(x[rows] for x in held)
