# SPDX-License-Identifier: Apache-2.0
"""What the n-th layer is, only the plan says: settings that make mixtures of layers are read nowhere else."""

from __future__ import annotations

import ast
import dataclasses
import re

import pytest

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
    r"|layer_(number|index|idx)( [-+] 1\)?)? ?%|hybrid_layer_pattern\["
)


def find_readers(text: str) -> set[str]:
    """The settings of mixtures that a module reads, as attributes or by getattr."""
    nodes = list(ast.walk(ast.parse(text)))
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    named = {
        argument.value
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr"
        for argument in node.args
        if isinstance(argument, ast.Constant)
    }
    return MIXTURES & (read | named)


def test_settings_that_make_mixtures_are_read_by_the_plan_alone() -> None:
    assert {field.name for field in dataclasses.fields(TransformerConfig)} >= MIXTURES
    found = {
        source.relative: find_readers(source.text)
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


@pytest.mark.parametrize(
    "line",
    [
        "has = config.moe_layer_freq[number]", 'kind = getattr(config, "linear_attention_freq", None)',
        "if self.config.window_attn_skip_freq: pass", "if layer_number % 4 == 0: pass", "x = (layer_number - 1) % 4",
        "letter = config.hybrid_layer_pattern[number]", "half = config.num_layers // 2",
    ],
)  # fmt: skip
def test_a_line_that_asks_elsewhere_is_seen(line: str) -> None:
    assert find_readers(line) or OLD_WAYS.search(line)
