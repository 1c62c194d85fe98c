# SPDX-License-Identifier: Apache-2.0
"""A call in fixed shapes: the next token of each of several sequences, padded with rows that belong to none.

What layers read of a SequenceState depends on lengths and pages, which are others in every call; a CUDA graph always
reads the same addresses. So the numbers of a call are brought to one place, and on the device everything else follows
from them:

    numbers [rows, 3 + p]    for each row: where the first token that it sees lies in its first page, how many tokens it
                             sees, where its new token goes; its pages, the last one repeated
    places [rows, n]         where the tokens lie that it sees, the last one repeated: always n, of which what comes
                             after those it sees is hidden (`find_padding`)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.sequences.state import PAGE_TOKENS, HeldSequence, SequenceState
from megatron.core.sequences.token_layout import TokenLayout


class PaddedCall:
    """Implements megatron.core.inference_context.InferenceContext for layers that keep something of each token."""

    def __init__(self, state: SequenceState, rows: int, tokens: int, device: torch.device) -> None:
        """rows: sequences, padding included. tokens: of the longest of them, the new one included."""
        self._state, self.rows, self.max_tokens = state, rows, state.max_tokens
        self._seen = [reach.count_seen(tokens) for reach in state.groups]
        # Those that are seen begin anywhere in the first page.
        pages = [(seen + PAGE_TOKENS - 2) // PAGE_TOKENS + 1 for seen in self._seen]
        self._numbers = [torch.zeros(rows, 3 + count, dtype=torch.int64, device=device) for count in pages]
        self._found: dict[int, tuple[Tensor, Tensor]] = {}

    def fill(self, padding: HeldSequence) -> TokenLayout:
        """Take over what the state's call was begun with, one token of each row. padding: where the tokens of the other
        rows go. Returns the layout, which is kept as `layout`."""
        state = self._state
        missing = self.rows - len(state.rows)
        held, past = [*state.rows, *[padding] * missing], (*state.layout.past, *[0] * missing)
        for group, numbers in enumerate(self._numbers):
            lines = [self._describe(group, *each, numbers.shape[1] - 3) for each in zip(held, past, strict=True)]
            numbers.copy_(torch.tensor(lines), non_blocking=True)
        self.layout = TokenLayout((1,) * self.rows, past)
        return self.layout

    def _describe(self, group: int, row: HeldSequence, past: int, most: int) -> list[int]:
        first = self._state.groups[group].find_first(past)
        pages = [page for page in row.tables[group][first // PAGE_TOKENS : past // PAGE_TOKENS + 1] if page is not None]
        place = pages[-1] * PAGE_TOKENS + past % PAGE_TOKENS
        return [first % PAGE_TOKENS, past + 1 - first, place, *pages, *pages[-1:] * (most - len(pages))]

    def start(self) -> None:
        """Begin a pass through the layers; everything from here on may be recorded."""
        self._found = {}

    def _find(self, group: int) -> tuple[Tensor, Tensor]:
        """Places [n, rows] that are read, and which of them are padding, bool [rows, 1, 1, n]."""
        if group not in self._found:
            numbers, seen = self._numbers[group], self._seen[group]
            first, count, pages = numbers[:, :1], numbers[:, 1:2], numbers[:, 3:]
            order = torch.arange(seen, device=numbers.device)[None]
            inside = first + torch.minimum(order, count - 1)
            places = pages.gather(1, inside // PAGE_TOKENS) * PAGE_TOKENS + inside % PAGE_TOKENS
            self._found[group] = places.t(), (order >= count)[:, None, None]
        return self._found[group]

    def find_padding(self, layer_number: int) -> Tensor | None:
        """See InferenceContext."""
        return self._find(self._state.find_group(layer_number))[1]

    def update(self, layer_number: int, *new: Tensor) -> Sequence[tuple[slice, tuple[Tensor, ...]]]:
        """See InferenceContext: all rows at once, copied."""
        group = self._state.find_group(layer_number)
        places, _ = self._find(group)
        held = self._state.find_memory(layer_number, new)
        for memory, x in zip(held, new, strict=True):
            memory.index_copy_(0, self._numbers[group][:, 2], x.flatten(0, 1))
        return [(slice(0, self.rows), tuple(memory[places] for memory in held))]

    def read_recurrent(self, layer_number: int, *initial: Tensor) -> tuple[Tensor, ...]:
        """See InferenceContext; not of such a call."""
        raise AssertionError(f"layer {layer_number} keeps a recurrent state, and is not for calls in fixed shapes")

    def write_recurrent(self, layer_number: int, *state: Tensor) -> None:
        """See InferenceContext; not of such a call."""
        raise AssertionError(f"layer {layer_number} keeps a recurrent state, and is not for calls in fixed shapes")
