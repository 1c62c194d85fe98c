# SPDX-License-Identifier: Apache-2.0
"""Rotary positions for sequences longer than in the training before (Peng et al., "YaRN", 2023, section 3).

turns_i   = original length * frequency_i / 2 pi          of channel pair i, within the original length
kept_i    = 1 above beta_fast turns, 0 below beta_slow turns, and in between linear in i
scaled_i  = kept_i * frequency_i + (1 - kept_i) * frequency_i / factor

Queries and keys are multiplied by m = 0.1 ln(factor) + 1, so that scores grow with m^2 and the softmax stays as sharp.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.taken_arguments import take_arguments
from megatron.core.transformer.config_fields.positions import compute_yarn_magnitude

# Put here by a table of upstream's names; declared for type checkers.
_yarn_get_concentration_factor_from_config: Any


class YarnRotaryEmbedding(RotaryEmbedding):
    """The angles of any stretch of positions, with scaled frequencies, and `mscale`, the factor on rotated channels."""

    @take_arguments(
        "kv_channels rotary_percent rotary_interleaved seq_len_interpolation_factor rotary_base "
        "use_cpu_initialization=... scaling_factor original_max_position_embeddings beta_fast beta_slow mscale "
        "mscale_all_dim correction_range_round_to_int cp_group=..."
    )
    def __init__(
        self,
        kv_channels: int,
        rotary_percent: float = 1.0,
        rotary_interleaved: bool = False,
        seq_len_interpolation_factor: float | None = None,
        rotary_base: float = 10000.0,
        scaling_factor: float = 1.0,
        original_max_position_embeddings: int = 4096,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        mscale: float = 1.0,
        mscale_all_dim: float = 0.0,
        correction_range_round_to_int: bool = True,
    ) -> None:
        """Upstream's signature. correction_range_round_to_int: the blend begins and ends at whole channel pairs."""
        super().__init__(kv_channels, rotary_percent, rotary_interleaved, seq_len_interpolation_factor, rotary_base)
        pairs = self.inv_freq.shape[0]

        def find_pair(turns: float) -> float:
            """The (fractional) pair with this many turns in the original length; frequency = base^(-pair / pairs)."""
            wanted = 2 * math.pi * turns / original_max_position_embeddings
            return -pairs * math.log(wanted) / math.log(rotary_base)

        # Fast channels know relative places within a few tokens and stay; slow ones are stretched to the new length.
        first, last = find_pair(beta_fast), find_pair(beta_slow)
        if correction_range_round_to_int:
            first, last = math.floor(first), math.ceil(last)
        self.plain_inv_freq = self.inv_freq
        kept = 1 - _ramp(max(first, 0), min(last, 2 * pairs - 1), pairs, self.inv_freq)
        self.inv_freq = self.plain_inv_freq * (kept + (1 - kept) / scaling_factor)
        # Upstream's name in addition to the base class's: the same factor.
        magnitude, divisor = (compute_yarn_magnitude(scaling_factor, share) for share in (mscale, mscale_all_dim))
        self.mscale = self.magnitude = magnitude / divisor


def _ramp(first: float, last: float, count: int, like: Tensor) -> Tensor:
    """0 up to index `first`, 1 from index `last` on, linear in between: [count]."""
    # Equal ends, which rounding may give, would divide by zero.
    width = max(last - first, 0.001)
    return ((torch.arange(count, dtype=like.dtype, device=like.device) - first) / width).clamp(0, 1)
