# SPDX-License-Identifier: Apache-2.0
"""Rotary positions with a divisor for each frequency, and other divisors in long sequences (Ding et al., "LongRoPE",
2024; Phi-3 and 4).

frequency_i = base^(-2 i / d) / short_i     in sequences of up to the original length
              base^(-2 i / d) / long_i      at every position of longer ones
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.errors import ConfigError
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.process_groups_config import Group
from megatron.core.sequences.token_layout import TokenLayout
from megatron.core.transformer.rotary import Rotation


class LongRotaryEmbedding(RotaryEmbedding):
    """The angles of any range of positions; sequences that are longer than the original length get different ones."""

    def __init__(
        self,
        shape: tuple[int, float, bool],
        rotary_base: float,
        short_factors: Sequence[float],
        long_factors: Sequence[float],
        original_max_position_embeddings: int,
        magnitude: float = 1.0,
    ) -> None:
        """shape: kv_channels, rotary_percent, rotary_interleaved. magnitude: factor on the rotated channels. Raises
        ConfigError where there is not a factor for each pair of rotated channels."""
        super().__init__(*shape, rotary_base=rotary_base)
        pairs = len(self.inv_freq)
        for name, factors in (("short", short_factors), ("long", long_factors)):
            if len(factors) != pairs:
                raise ConfigError(
                    f"--longrope-{name}-factors has {len(factors)} factors for {pairs} pairs of rotated channels; give "
                    "one for each"
                )
        self.original_length = original_max_position_embeddings
        self.longer = RotaryEmbedding(*shape, rotary_base=rotary_base)
        for angles, factors in ((self, short_factors), (self.longer, long_factors)):
            angles.inv_freq = angles.inv_freq / torch.tensor(factors, dtype=torch.float32)
            angles.magnitude = magnitude

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        """See RotaryEmbedding."""
        chosen = self.longer.forward if offset + max_seq_len > self.original_length else super().forward
        return chosen(max_seq_len, offset, packed_seq, cp_group)

    def build_rotation(
        self,
        length: int,
        device: torch.device | None = None,
        cp_group: Group | None = None,
        layout: TokenLayout | None = None,
        longest: int = 0,
    ) -> Rotation:
        """See RotaryEmbedding. longest: how long a sequence may become; a cache that outgrew the original length would
        hold keys that were rotated otherwise."""
        is_long = max(length if layout is None else layout.longest, longest) > self.original_length
        chosen = self.longer.build_rotation if is_long else super().build_rotation
        return chosen(length, device, cp_group, layout)
