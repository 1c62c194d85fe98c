# SPDX-License-Identifier: Apache-2.0
"""What attention and positions need from a key-value cache, so that the layers need not import inference.

    context.sequence_len_offset        tokens the cache held before this forward call
    context.update(layer, key, value)  append what a layer keeps of this call's tokens; get back that of all tokens

The owner of the cache (the generation loop) moves `sequence_len_offset` on after a forward call; the layers never do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class InferenceContext(Protocol):
    """A key-value cache as the layers see it."""

    @property
    def sequence_len_offset(self) -> int:
        """Tokens held before this forward call: the position of the first token of the call."""
        ...

    def update(self, layer_number: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Append what a layer keeps of its new tokens, and return the same of all tokens so far.

        layer_number: global, from 1. new: [s, b, ...] each, as many tensors and of such shapes as the layer likes, the
        same in every call: keys, rotated already, and values, of their own widths, or a compressed form of both.
        Returns each as [sequence_len_offset + s, b, ...].
        """
        ...
