# SPDX-License-Identifier: Apache-2.0
"""Interface that layers and positions need in generation, so that they need not import inference.

    context.layout                       which tokens of which sequences this call has
    context.max_tokens                   tokens that the longest sequence may have
    context.update(layer, key, value)    append what a layer keeps of each token; get back the sequences' values
    context.read_recurrent(layer, ...)   what a layer keeps of each sequence, whatever its length; write_recurrent

The owner (the generation loop) says before each call of the model what it reads; layers read and write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from megatron.core.sequences.token_layout import TokenLayout


class InferenceContext(Protocol):
    """The state of several sequences as the layers see it; layer numbers are global, from 1."""

    layout: TokenLayout
    """Of this call: hidden states are [t, 1, h] where it is packed, and [s, b, h] where all sequences are in step."""

    max_tokens: int
    """Tokens that the longest sequence may have."""

    def update(self, layer_number: int, *new: Tensor) -> Sequence[tuple[slice, tuple[Tensor, ...]]]:
        """Append what a layer keeps of its new tokens, and return for some sequences after the other which they are,
        and the same of all tokens so far that the new ones may see: from the first new one's window or chunk on, up to
        the last.

        new: [t, 1, ...] or [s, b, ...] each, as many tensors and of such shapes as the layer likes, the same in every
        call: keys, rotated already, and values, each of any width, or a compressed form of both. Returns each as
        [tokens, sequences, ...]: one sequence, or several of one length; `layout.cut` cuts queries in the same way.
        """
        ...

    def find_padding(self, layer_number: int) -> Tensor | None:
        """Return which of the tokens that `update` returns belong to no sequence, bool [sequences, 1, 1, tokens]; None
        where all belong to one."""
        ...

    def read_recurrent(self, layer_number: int, *initial: Tensor) -> tuple[Tensor, ...]:
        """Return what the layer wrote in the call before, [sequences, ...] each; for a sequence that begins in this
        call, `initial` [...], its state before the first token.

        No call has padding, and `TokenLayout.group` cuts a call into runs of sequences with equally many tokens, so
        that a mixer scans each run as an ordinary batch:

            (state,) = context.read_recurrent(number, initial)         # [sequences, ...]
            parts = []
            for rows, x in context.layout.group(hidden_states):        # [n, sequences of the run, h]
                output, state[rows] = scan(x, state[rows])
                parts.append(output)
            context.write_recurrent(number, state)
            return context.layout.join(parts)

        In training `PackedSeqParams.layout` describes documents in the same way; each document starts afresh.
        """
        ...

    def write_recurrent(self, layer_number: int, *state: Tensor) -> None:
        """Replace what the layer keeps of each sequence: [sequences, ...] each, in the same order as it is read."""
        ...
