# SPDX-License-Identifier: Apache-2.0
"""Attention and Mamba-2 side by side on one normalised input, as in Falcon-H1.

    y = a_out attention(a_in x) + m_out mamba(m_in x)

with factors of the config. Source: Zuo et al., "Falcon-H1", 2025, section 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import LayerOutput
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class ParallelMixersSubmodules:
    """The two mixers: specs or classes."""

    attention: Any
    mamba: Any


class ParallelMixers(MegatronModule):
    """[s, b, h] -> [s, b, h], the sum of two mixers' outputs, and no bias."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: ParallelMixersSubmodules,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        common = {"config": config, "layer_number": layer_number, "pg_collection": pg_collection}
        self.attention = build_module(submodules.attention, **common)
        self.mamba = build_module(submodules.mamba, **common)

    def forward(self, hidden_states: Tensor, *inputs: Any) -> LayerOutput:
        """[s, b, h] -> ([s, b, h], None); inputs: the fields of LayerInputs."""
        config = self.config
        attended = self.attention(_scale(hidden_states, config.attention_input_multiplier), *inputs)
        mixed = self.mamba(_scale(hidden_states, config.mamba_input_multiplier), *inputs)
        attended = _scale(_add_bias(*attended), config.attention_output_multiplier)
        return attended + _scale(_add_bias(*mixed), config.mamba_output_multiplier), None


def _add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


def _scale(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor
