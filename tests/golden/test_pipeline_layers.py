# SPDX-License-Identifier: Apache-2.0
"""Which layers lie on which stage, compared with the reference; and written layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.core.errors import ConfigError
from megatron.core.plan.stages import build_pipeline_layout, build_virtual_stages, parse_layout
from megatron.core.transformer.transformer_config import TransformerConfig

CASES = json.loads((Path(__file__).parent / "data" / "pipeline_layers.json").read_text())
OUR_NAMES = {"num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers"}


def config(layers: int, stages: int, chunks: int | None = None, settings: dict[str, Any] | None = None) -> Any:
    return TransformerConfig(
        num_layers=layers,
        hidden_size=16,
        num_attention_heads=2,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks,
        **{OUR_NAMES.get(name, name): value for name, value in (settings or {}).items()},
    )


def layers(*args: Any, **settings: Any) -> list[list[int]]:
    """Global layer numbers of every virtual stage in order."""
    found = config(*args, settings=settings)
    return [list(stage.layers) for stage in build_pipeline_layout(found, build_virtual_stages(found))]


@pytest.mark.parametrize("name", CASES)
def test_layers_are_those_of_the_reference(name: str) -> None:
    expected = CASES[name]["result"]
    if "error" in expected:
        with pytest.raises(ConfigError, match="--num-layers 9 does not divide over --pipeline-model-parallel-size 2"):
            config(*CASES[name]["args"])
        return
    found = config(*CASES[name]["args"])
    shape = build_virtual_stages(found)
    layout = build_pipeline_layout(found, shape)
    for row in expected:
        stage = layout[shape.index(row["pp_rank"], row["vp_stage"] or 0)].layers
        assert (len(stage), stage.start if stage else row["offset"]) == (row["num_layers"], row["offset"])


def test_uneven_stages_with_chunks() -> None:
    """First and last process are divided over their chunks like the others."""
    uneven = {"decoder_first_pipeline_num_layers": 2, "decoder_last_pipeline_num_layers": 4}
    assert [len(stage) for stage in layers(12, 3, 2, **uneven)] == [1, 3, 2, 1, 3, 2]
    with pytest.raises(ConfigError, match="a stage of 3 layers cannot be divided into 2 chunks"):
        layers(12, 2, 2, decoder_first_pipeline_num_layers=3)
    with pytest.raises(ConfigError, match="leaves 7 layers, which do not divide over the 2 other stages"):
        layers(12, 3, decoder_first_pipeline_num_layers=5)


def test_ends_counted_as_layers() -> None:
    counts = {"account_for_embedding_in_pipeline_split": True}
    assert layers(7, 4, **counts) == [[0], [1, 2], [3, 4], [5, 6]]
    counts = {"account_for_loss_in_pipeline_split": True}
    assert layers(7, 2, 2, **counts) == [[0, 1], [2, 3], [4, 5], [6]]


def test_a_folded_pipeline_keeps_the_layers_in_order() -> None:
    found = config(8, 2, 2, {"pipeline_schedule": "zb-v"})
    shape = build_virtual_stages(found)
    layout = build_pipeline_layout(found, shape)
    assert [list(layout[shape.index(0, chunk)].layers) for chunk in (0, 1)] == [[0, 1], [6, 7]]
    assert [list(layout[shape.index(1, chunk)].layers) for chunk in (0, 1)] == [[2, 3], [4, 5]]
    assert layout[shape.index(0, 0)].has_embedding and layout[shape.index(0, 1)].has_loss


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("Et*3|(tt|)*2L", ["Ettt", "tt", "tt", "L"]),
        ("E|t*2|(t|)*3,tL", ["E", "tt", "t", "t", "t", "tL"]),
        ("Ett|(tt|)*2t t,L", ["Ett", "tt", "tt", "ttL"]),
        ("E||L", ["E", "", "L"]),
        ("Et|(t|", []),
        ("Et|x|L", []),
        ("t*9999999", []),
    ],
)
def test_repetitions_are_written_out(text: str, stages: list[str]) -> None:
    assert parse_layout(text) == stages


def test_written_layouts() -> None:
    text = "pipeline_model_parallel_layout"
    assert layers(3, 4, **{text: "E|t|tt|L"}) == [[], [0], [1, 2], []]
    for layout, problem in {
        "t|EtL": "must begin with the one embedding",
        "Et|tLL": "must begin with the one embedding",
        "Et|tmL": "multi-token prediction",
        "Et|t|tL": "has 3 stages, which is not a multiple of --pipeline-model-parallel-size 2",
        "Et|tL": "has 2 layers .t., but --num-layers 4",
        "E(t|L": "is not a layout",
        "|EttttL": "leaves the first or the last stage empty",
    }.items():
        with pytest.raises(ConfigError, match=problem):
            layers(4, 2, **{text: layout})
