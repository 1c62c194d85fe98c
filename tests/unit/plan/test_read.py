# SPDX-License-Identifier: Apache-2.0
"""The plan of a model: 300 random configs against their definition, letters, and values that change."""

from __future__ import annotations

import random
from typing import Any

import pytest

from megatron.core.errors import ConfigError
from megatron.core.plan.model_plan import BranchOptions
from megatron.core.plan.read import read_plan
from megatron.core.transformer.transformer_config import TransformerConfig

SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4}


def draw_fields(rng: random.Random) -> dict[str, Any]:
    layers = rng.choice([1, 4, 6, 8])

    def draw_pattern(*periods: int) -> int | list[int]:
        return rng.choice([*periods, [rng.randint(0, 1) for _ in range(layers)]])

    fields: dict[str, Any] = {"num_layers": layers, "position_embedding_type": "rope"}
    sight = rng.choice(["window", "no end", "chunk", "all"])
    fields |= {"window": {"window_size": (15, 0)}, "no end": {"window_size": (-1, 0)}, "all": {}}.get(
        sight, {"attention_chunk_size": 32}
    )
    if rng.random() < 0.7:
        fields["window_attn_skip_freq"] = draw_pattern(1, 2, 3)
    if rng.random() < 0.5:
        fields["no_rope_freq"] = draw_pattern(1)
    if rng.random() < 0.5:
        fields["rotary_base_local"] = 500
    if rng.random() < 0.5:
        fields |= {"num_moe_experts": 4, "moe_layer_freq": draw_pattern(1, 2, 3)}
    if rng.random() < 0.5:
        fields |= {"mtp_num_layers": 2, "mtp_use_repeated_layer": rng.random() < 0.5}
    if rng.random() < 0.5:
        fields |= {"fp8": "e4m3", "fp8_recipe": "tensorwise", "first_last_layers_bf16": rng.random() < 0.7}
        fields |= {"num_layers_at_start_in_bf16": rng.randint(0, 1), "num_layers_at_end_in_bf16": rng.randint(0, 1)}
    if rng.random() < 0.3:
        fields["cp_comm_type"] = [rng.choice(["p2p", "a2a", "all_gather"]) for _ in range(layers)]
    return fields | {"multi_latent_attention": rng.random() < 0.2, "parallel_residual": rng.random() < 0.2}


def names_layer(pattern: int | list[int] | None, place: int, default: bool) -> bool:
    """The definition: every n-th layer of places counted from 1, or the entry of a list."""
    if pattern is None:
        return default
    return place % pattern == 0 if isinstance(pattern, int) else pattern[place - 1] == 1


@pytest.mark.parametrize("seed", range(300))
def test_random_configs_are_what_the_settings_mean(seed: int) -> None:
    fields = draw_fields(random.Random(seed))
    plan, config = read_plan(TransformerConfig(**SIZES, **fields)), fields
    decoder = config["num_layers"]
    depths = config.get("mtp_num_layers", 0)
    assert len(plan.decoder) == decoder
    assert len(plan.prediction) == (1 if depths and config["mtp_use_repeated_layer"] else depths)
    for number, layer in enumerate(plan.layers, start=1):
        # What follows the decoder is as its last layer is.
        place, further = min(number, decoder), number - decoder
        skips = config.get("window_attn_skip_freq")
        # A number counts the full layers, a list has 1 for those with a window.
        is_full = names_layer(skips, place, False) != isinstance(skips, list)
        window = 15 if config.get("window_size", (-1, 0))[0] > 0 and not is_full else None
        rotary = "local" if window is not None and "rotary_base_local" in config else "global"
        every = config.get("moe_layer_freq")
        # Experts are counted from the first layer.
        has_experts = names_layer(every, place - 1 if isinstance(every, int) else place, False)
        first = config.get("num_layers_at_start_in_bf16", 0)
        last = decoder - config.get("num_layers_at_end_in_bf16", 0)
        rounds = "fp8" in config and (not config["first_last_layers_bf16"] or first < number <= last or further > 0)
        assert layer.options == BranchOptions(
            window=window,
            chunk=None if is_full else config.get("attention_chunk_size"),
            rotary="none" if names_layer(config.get("no_rope_freq"), place, False) else rotary,
            context_exchange=config.get("cp_comm_type", ["p2p"] * decoder)[place - 1],
        )
        attention = "latent_attention" if config["multi_latent_attention"] else "attention"
        assert [branch.kind for branch in layer.branches] == [attention, "experts" if has_experts else "mlp"]
        assert (layer.number, layer.low_precision, layer.parallel) == (number, rounds, config["parallel_residual"])
        name = f"decoder.layers.{number - 1}" if further < 1 else f"mtp.layers.{further - 1}.mtp_model_layer"
        assert layer.name == name and plan.layer(number) == layer


def test_a_changed_config_has_another_plan() -> None:
    config = TransformerConfig(num_layers=4, **SIZES, window_size=(7, 0))
    assert read_plan(config) is read_plan(config), "read once"
    assert [layer.options.window for layer in read_plan(config).decoder] == [7, 7, 7, 7]
    config.window_attn_skip_freq = [1, 0, 1, 0]
    assert [layer.options.window for layer in read_plan(config).decoder] == [7, None, 7, None]
    config.window_attn_skip_freq[1] = 1
    assert [layer.options.window for layer in read_plan(config).decoder] == [7, 7, 7, None]
    config.num_layers = 2
    assert len(read_plan(config).decoder) == 2


def test_a_layer_beyond_the_plan_is_like_the_last_one() -> None:
    plan = read_plan(TransformerConfig(num_layers=2, **SIZES, num_moe_experts=4, moe_layer_freq=[0, 1]))
    assert plan.layer(9).number == 9 and plan.layer(9).branches == plan.decoder[1].branches


def test_counting_branches() -> None:
    plan = read_plan(TransformerConfig(num_layers=4, **SIZES, num_moe_experts=4, moe_layer_freq=2))
    assert [len(list(plan.branches(kind))) for kind in (None, "experts", "mlp", "attention")] == [8, 2, 2, 4]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"attention_backend": "fused", "window_size": (7, 0), "window_attn_skip_freq": [1, 0]}, "lists 2 layers"),
        ({"num_moe_experts": 4, "moe_layer_freq": 0}, "--moe-layer-freq 0 is not every n-th layer"),
    ],
)
def test_rules_that_read_the_plan_stand_patterns_that_are_wrong(fields: dict[str, Any], kept: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TransformerConfig(num_layers=4, **SIZES, **fields)
    assert any(kept in problem for problem in caught.value.problems), caught.value.problems
