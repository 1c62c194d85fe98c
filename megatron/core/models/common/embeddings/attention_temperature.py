# SPDX-License-Identifier: Apache-2.0
"""Sharper attention far back in a sequence (Nakanishi, "Scalable-Softmax", 2025).

    query at position p *= 1 + scale * ln(1 + floor((p + first) / floor_tokens)),    p = 0, 1, ...

A softmax over more keys is flatter. Llama 4 has the factor in layers without rotary positions, which see all keys, and
counts from first = 1; Ministral 3 has it in all layers, from 0. Positions start again at each packed document.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.context_parallel.sharding import shard_sequence
from megatron.core.process_groups_config import Group
from megatron.core.sequences.token_layout import TokenLayout
from megatron.core.transformer.rotary import Rotation
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class AttentionTemperature:
    """The factor on the queries of any stretch of positions."""

    scale: float
    floor_tokens: int
    in_all_layers: bool = False

    @classmethod
    def from_config(cls, config: TransformerConfig) -> AttentionTemperature | None:
        """As the config has it; None where no layer has such a factor."""
        in_all_layers = config.attn_temperature_layers == "all"
        if config.attn_temperature_scale is None or (config.no_rope_freq is None and not in_all_layers):
            return None
        return cls(config.attn_temperature_scale, config.attn_temperature_floor, in_all_layers)

    def compute_scale(self, positions: Tensor) -> Tensor:
        """The factor of queries at these positions [s], counted from 0, float32."""
        counted = positions.float() + (0.0 if self.in_all_layers else 1.0)
        return torch.log1p(torch.floor(counted / self.floor_tokens)) * self.scale + 1.0

    def build_rotation(
        self, length: int, device: torch.device, sequence: Group, layout: TokenLayout | None = None
    ) -> Rotation:
        """The factor of positions [0, length), or of a layout's, and angles of no channels.

        Only of the positions that this rank holds, where the ranks of `sequence` share the sequence.
        """
        # A layout has its positions on the host; without one nothing has to travel to the device.
        positions = torch.arange(length, device=device) if layout is None else layout.positions
        scale = shard_sequence(self.compute_scale(positions), sequence.rank(), sequence.size())
        nothing = torch.empty(len(scale), 0, device=device)
        return Rotation(nothing, nothing, False, scale.to(device, non_blocking=True).view(-1, 1, 1, 1))
