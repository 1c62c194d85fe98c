"""What attention and positions need from a key-value cache, so that the layers need not import inference.

    context.sequence_len_offset        tokens the cache held before this forward call
    context.update(layer, key, value)  append this call's keys and values; get back all of them

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

    def update(self, layer_number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append, and return everything so far.

        layer_number: global, from 1. key, value: [s, b, num_query_groups_per_rank, kv_channels] of the new tokens,
        already rotated. Returns both as [sequence_len_offset + s, b, num_query_groups_per_rank, kv_channels].
        """
        ...
