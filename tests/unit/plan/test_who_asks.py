# SPDX-License-Identifier: Apache-2.0
"""What the n-th layer is, only the plan says: settings that make mixtures of layers are read nowhere else."""

from __future__ import annotations

import ast
import dataclasses
import re

from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.source_code import sources

MIXTURES = {
    "moe_layer_freq", "linear_attention_freq", "window_attn_skip_freq", "no_rope_freq",
    "heterogeneous_layers_config_encoded_json", "output_norm_freq", "mamba_beside_attention",
}  # fmt: skip
# The plan; the rules of settings; flags, from which the fields are made; upstream's own functions.
AT_HOME = (
    "megatron/core/plan/", "megatron/core/transformer/config_fields/", "megatron/training/flags/",
    "megatron/core/upstream/", "megatron/core/transformer/transformer_config.py", "megatron/training/config/",
)  # fmt: skip
# Reads about no single layer. --hybrid-layer-pattern itself is asked for in many places: it says the kind of model.
EXEMPT = {
    "megatron/training/checkpoint/save_for_upstream.py": "whether upstream would stack the layers",
    "megatron/core/models/common/embeddings/attention_temperature.py": "whether there are layers without positions",
}
OLD_WAYS = re.compile(
    r"has_experts\(|find_(window|chunk)_of_layer|choose_rotary_kind|is_fp8_layer\(|num_layers ?//|num_layers \+"
)


def test_settings_that_make_mixtures_are_read_by_the_plan_alone() -> None:
    assert {field.name for field in dataclasses.fields(TransformerConfig)} >= MIXTURES
    found = {
        source.relative: sorted(
            {node.attr for node in ast.walk(source.tree) if isinstance(node, ast.Attribute) and node.attr in MIXTURES}
        )
        for source in sources("megatron")
        if not source.relative.startswith(AT_HOME)
    }
    readers = {name: fields for name, fields in found.items() if fields}
    assert {name: fields for name, fields in readers.items() if name not in EXEMPT} == {}
    assert set(EXEMPT) == set(readers), "exempt for nothing"


def test_the_kind_of_a_layer_is_computed_from_no_number_elsewhere() -> None:
    found = [
        f"{source.relative}: {line.strip()}"
        for source in sources("megatron")
        if not source.relative.startswith(AT_HOME)
        for line in source.text.splitlines()
        if OLD_WAYS.search(line)
    ]
    assert found == []
