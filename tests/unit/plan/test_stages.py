# SPDX-License-Identifier: Apache-2.0
"""Rules that count the layers of a stage, on stages of unequal length."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.core.errors import ConfigError
from megatron.core.transformer.transformer_config import TransformerConfig

SIX_AND_TWO: dict[str, dict[str, Any]] = {
    "first stage": {"decoder_first_pipeline_num_layers": 6},
    "layout": {"pipeline_model_parallel_layout": "Etttttt|ttL"},
    "chunks": {"pipeline_model_parallel_layout": "Ettt|t|ttt|tL"},
    "letters": {"hybrid_layer_pattern": "*-*-*-|*-"},
}
COUNTS: dict[str, dict[str, Any]] = {
    "recompute_num_layers": {"recompute_granularity": "full", "recompute_method": "block"},
    "cpu_offloading_num_layers": {},
}


@pytest.mark.parametrize("stages", SIX_AND_TWO)
@pytest.mark.parametrize("name", COUNTS)
def test_the_longest_stage_bounds_a_number_of_its_layers(stages: str, name: str) -> None:
    def build(number: int) -> TransformerConfig:
        return TransformerConfig(
            num_layers=8, hidden_size=64, num_attention_heads=4, pipeline_model_parallel_size=2,
            **SIX_AND_TWO[stages], **COUNTS[name], **{name: number},
        )  # fmt: skip

    assert getattr(build(5), name) == 5 and getattr(build(6), name) == 6
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} 7 is not from . to 6, the layers of a pipeline"):
        build(7)
