# SPDX-License-Identifier: Apache-2.0
"""Angles of rotary positions (Su et al., "RoFormer", 2021), with linear interpolation and Llama 3's frequency scaling.

frequency_i = base^(-2 i / d),  i < d / 2          angle = position * frequency_i

Positions of images have three numbers, of time, height and width (M-RoPE; Wang et al., "Qwen2-VL", 2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.context_parallel.sharding import shard_sequence
from megatron.core.errors import ConfigError
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import Group
from megatron.core.sequences.token_layout import TokenLayout
from megatron.core.taken_arguments import take_arguments
from megatron.core.transformer.rotary import Rotation


@dataclass(frozen=True)
class Llama3Scaling:
    """Stretch slow frequencies by `factor`, keep fast ones, blend in between (Llama 3.1 report, section 3.4.2)."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def apply(self, inv_freq: Tensor) -> Tensor:
        """Scale the frequencies [channels / 2], in radians per token."""
        # In tokens: a pair of channels that turns within the original length has seen all its angles in training.
        wavelength = 2 * math.pi / inv_freq
        longest_kept = self.original_max_position_embeddings / self.high_freq_factor
        shortest_stretched = self.original_max_position_embeddings / self.low_freq_factor
        # Where both factors are the same there is nothing in between.
        width = self.high_freq_factor - self.low_freq_factor or 1.0
        smooth = (self.original_max_position_embeddings / wavelength - self.low_freq_factor) / width
        blended = (1 - smooth) * inv_freq / self.factor + smooth * inv_freq
        scaled = torch.where(wavelength > shortest_stretched, inv_freq / self.factor, blended)
        return torch.where(wavelength < longest_kept, inv_freq, scaled)


class RotaryEmbedding(nn.Module):
    """The angles of any stretch of positions; the table grows as longer sequences come."""

    # The caller of forward says which ranks share the sequence.
    @take_arguments(
        "kv_channels rotary_percent rotary_interleaved seq_len_interpolation_factor rotary_base rope_scaling "
        "rope_scaling_factor use_cpu_initialization=... cp_group=..."
    )
    def __init__(
        self,
        kv_channels: int,
        rotary_percent: float,
        rotary_interleaved: bool = False,
        seq_len_interpolation_factor: float | None = None,
        rotary_base: float = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        rope_scaling_high_freq_factor: float = 4.0,
    ) -> None:
        """kv_channels: width of a head; rotary_percent: share of it that is rotated. seq_len_interpolation_factor:
        divides positions (Chen et al., 2023). rope_scaling...: whether frequencies are `Llama3Scaling`'s."""
        super().__init__()
        channels = int(kv_channels * rotary_percent)
        self.rotary_interleaved = rotary_interleaved
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        # Upstream's order of operations: another one gives other last digits, which long sequences multiply.
        self.inv_freq = 1.0 / (rotary_base ** (torch.arange(0, channels, 2, dtype=torch.float32) / channels))
        self.magnitude = 1.0
        """Factor on the rotated channels."""
        if rope_scaling:
            scaling = Llama3Scaling(rope_scaling_factor, high_freq_factor=rope_scaling_high_freq_factor)
            self.inv_freq = scaling.apply(self.inv_freq)
        self._table: tuple[Tensor, ...] | None = None  # cos, sin [positions, channels / 2]

    def compute_angles(self, length: int, offset: int = 0) -> Tensor:
        """Position * frequency of positions [offset, offset + length), [length, channels / 2] float32."""
        positions = torch.arange(length, dtype=torch.float32, device=self.inv_freq.device) + offset
        if self.seq_len_interpolation_factor is not None:
            positions = positions * (1 / self.seq_len_interpolation_factor)
        return torch.outer(positions, self.inv_freq)

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        """Angles in upstream's form: one for every channel, [s, 1, 1, channels], whole with context parallelism.

        packed_seq: of upstream's signature. Raises ConfigError for a cp_group of several that share a whole sequence.
        """
        if cp_group is not None and cp_group.size() > 1 and not packed_seq:
            raise ConfigError(f"angles are not divided over a cp_group of {cp_group.size()}; take a rank's part")
        angles = self.compute_angles(max_seq_len, offset)
        # Both channels of a pair turn by the same angle; where they lie is what interleaved says.
        pairs = (angles, angles)
        every = torch.stack(pairs, dim=-1).flatten(-2) if self.rotary_interleaved else torch.cat(pairs, dim=-1)
        return every[:, None, None, :]

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Tensor | None,
        transformer_config: Any,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> int:
        """Return the number of positions that a model's forward needs angles for: the full sequence's, of which the
        stage's input [s, b, h] is this rank's part, or of the longest document. transformer: a block, whose
        `input_tensor` counts where it has one. Raises ConfigError for an inference_context, whose layout says it."""
        if inference_context is not None:
            raise ConfigError("in generation positions are those of inference_context.layout; leave it out")
        if packed_seq_params is not None:
            return max(int(packed_seq_params.max_seqlen_q or 0), int(packed_seq_params.max_seqlen_kv or 0))
        given = getattr(transformer, "input_tensor", None)
        hidden_states = transformer_input if given is None else given
        assert hidden_states is not None, "a stage without transformer.input_tensor has an input of its own"
        ranks = transformer_config.tensor_model_parallel_size if transformer_config.sequence_parallel else 1
        return int(hidden_states.shape[0] * ranks * transformer_config.context_parallel_size)

    def build_rotation(
        self,
        length: int,
        device: torch.device | None = None,
        cp_group: Group | None = None,
        layout: TokenLayout | None = None,
        longest: int = 0,
    ) -> Rotation:
        """Cosines and sines of positions [0, length), or in generation of a layout's, on `device`; only of the
        positions that this rank holds, where the ranks of `cp_group` share the sequence. longest: how long a sequence
        may become, which changes nothing here."""
        end = length if layout is None else layout.longest
        device = self.inv_freq.device if device is None else device
        if self._table is None or self._table[0].shape[0] < end or self._table[0].device != device:
            known = 0 if self._table is None else self._table[0].shape[0]
            # Generation makes positions grow by one: twice the table each time, instead of a new one for every token.
            with torch.inference_mode(False):  # training may read the table of an evaluation
                angles = self.compute_angles(max(end, 2 * known if known < end and layout is not None else end))
                self._table = tuple((x * self.magnitude).to(device) for x in (angles.cos(), angles.sin()))
        cos, sin = (x[end - length : end] for x in self._table)
        if layout is not None and layout.is_packed:
            cos, sin = (x[layout.move_places(device)[0]] for x in self._table)
        if cp_group is not None:
            cos, sin = (shard_sequence(x, cp_group.rank(), cp_group.size()) for x in (cos, sin))
        return Rotation(cos, sin, self.rotary_interleaved)


class MultimodalRotaryEmbedding(RotaryEmbedding):
    """Angles of positions of time, height and width, of which every pair of channels has one (M-RoPE). A token of text
    has three that are equal, and so the angles of RotaryEmbedding."""

    @take_arguments(
        "kv_channels rotary_percent rotary_interleaved seq_len_interpolation_factor rotary_base cp_group=..."
    )
    def __init__(
        self,
        kv_channels: int,
        rotary_percent: float,
        rotary_interleaved: bool = False,
        seq_len_interpolation_factor: float | None = None,
        rotary_base: float = 10000,
    ) -> None:
        """See RotaryEmbedding."""
        super().__init__(kv_channels, rotary_percent, rotary_interleaved, seq_len_interpolation_factor, rotary_base)

    def forward(self, position_ids: Tensor, mrope_section: list[int], cp_group: Any = None) -> Tensor:  # type: ignore[override]
        """Angles in upstream's form, [s, b, 1, channels], of positions [3, b, s]. mrope_section: see
        `compute_angles_at`. Raises ConfigError for a cp_group of several."""
        if cp_group is not None and cp_group.size() > 1:
            raise ConfigError(f"angles are not divided over a cp_group of {cp_group.size()}; take a rank's part")
        angles = self.compute_angles_at(position_ids, mrope_section)
        pairs = (angles, angles)
        every = torch.stack(pairs, dim=-1).flatten(-2) if self.rotary_interleaved else torch.cat(pairs, dim=-1)
        return every[:, :, None, :]

    def compute_angles_at(self, position_ids: Tensor, sections: list[int]) -> Tensor:
        """Position * frequency, [s, b, channels / 2] float32, of positions [3, b, s]. sections: how many pairs of
        channels turn by time, by height and by width, one after the other. Raises ConfigError where these are not
        all."""
        if sum(sections) != len(self.inv_freq):
            raise ConfigError(
                f"mrope_section {sections} adds up to {sum(sections)} pairs of channels, and {len(self.inv_freq)} are "
                "rotated; give as many"
            )
        scale = 1.0 if self.seq_len_interpolation_factor is None else 1 / self.seq_len_interpolation_factor
        positions = position_ids.transpose(1, 2).float() * scale
        parts = zip(positions, self.inv_freq.to(positions.device).split(sections), strict=True)
        return torch.cat([stream[..., None] * frequencies for stream, frequencies in parts], dim=-1)

    def build_rotation_at(self, position_ids: Tensor, sections: list[int]) -> Rotation:
        """Cosines and sines of positions [3, b, s]. sections: as above."""
        angles = self.compute_angles_at(position_ids, sections)
        return Rotation(angles.cos(), angles.sin(), self.rotary_interleaved)
