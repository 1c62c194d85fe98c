# SPDX-License-Identifier: Apache-2.0
"""The plan of the model that a config describes, by flags (a GPT) or by letters (a hybrid): one reading for both."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from megatron.core.errors import ConfigError
from megatron.core.plan.letters import Letters, find_letters_problem, split_letters
from megatron.core.plan.model_plan import Branch, LayerPlan, ModelPlan
from megatron.core.plan.patterns import PlanSettings


def read_plan(config: Any) -> ModelPlan:
    """Return the plan of a TransformerConfig's model. It follows the config's values of this moment; reading equal
    values again costs next to nothing. Raises ConfigError for letters that describe no model."""
    return _build(PlanSettings.read(config))


# By values: a config is mutable, and its plan must not be one of yesterday.
@functools.lru_cache(maxsize=64)
def _build(settings: PlanSettings) -> ModelPlan:
    if settings.hybrid_layer_pattern is not None:
        return _build_from_letters(settings, settings.hybrid_layer_pattern)
    layers, depths = settings.num_layers or 0, settings.mtp_num_layers or 0
    with_weights = min(depths, 1) if settings.mtp_use_repeated_layer else depths
    attention = "latent_attention" if settings.multi_latent_attention else "attention"

    def plan(number: int, name: str) -> LayerPlan:
        kinds = (attention, "experts" if settings.has_experts(number) else "mlp")
        branches = tuple(_branch(settings, kind, number) for kind in kinds)
        return LayerPlan(number, name, branches, settings.parallel_residual)

    return ModelPlan(
        tuple(plan(index + 1, f"decoder.layers.{index}") for index in range(layers)),
        tuple(plan(layers + depth + 1, f"mtp.layers.{depth}.mtp_model_layer") for depth in range(with_weights)),
    )


def _build_from_letters(settings: PlanSettings, pattern: str) -> ModelPlan:
    from megatron.core.plan.kinds import list_letters

    letters, kinds = read_letters(pattern), list_letters()
    count, depths = len(letters.decoder), letters.predictions[: 1 if settings.mtp_use_repeated_layer else None]

    def plan(letter: str, number: int, name: str) -> LayerPlan:
        return LayerPlan(number, name, (_branch(settings, kinds[letter], number),))

    return ModelPlan(
        tuple(plan(letter, index + 1, f"decoder.layers.{index}") for index, letter in enumerate(letters.decoder)),
        tuple(
            plan(letter, count + depth * len(part) + index + 1, f"mtp.layers.{depth}.mtp_model_layer.layers.{index}")
            for depth, part in enumerate(depths)
            for index, letter in enumerate(part)
        ),
    )


def _branch(settings: PlanSettings, kind: str, number: int) -> Branch:
    return Branch(kind, settings.read_options(number), settings.is_low_precision(number))


def read_letters(pattern: str) -> Letters:
    """Take the pattern of a hybrid apart. Raises ConfigError where it is none."""
    # Loaded for letters alone: --help and most runs start without.
    from megatron.core.plan.kinds import list_letters

    problem = find_letters_problem(pattern, list_letters())
    if problem is not None:
        raise ConfigError(f"--hybrid-layer-pattern {pattern} {problem}")
    return split_letters(pattern)


def letter_problems(config: Any) -> Iterator[str]:
    """Yield what is wrong with the letters of a TransformerConfig, and with settings that contradict them."""
    pattern: str = config.hybrid_layer_pattern
    letters, asked = read_letters(pattern), config.say("hybrid_layer_pattern")
    if len(letters.decoder) != config.num_layers:
        yield f"{config.say('num_layers')} contradicts {asked}, which has {len(letters.decoder)} layers; leave it out"
    for letter, name in (("E", "num_moe_experts"), ("+", "multi_latent_attention")):
        if (letter in letters.decoder) != bool(getattr(config, name)):
            yield f"{asked} contradicts {config.flag(name)}: the letter {letter} and that flag go together"
    if "*" in letters.decoder and config.multi_latent_attention:
        yield f"{asked} has attention with latent vectors and without; write + for * with --multi-latent-attention"
    for name, neutral in (("parallel_residual", False), ("moe_layer_freq", 1), ("mtp_num_layers", None)):
        if getattr(config, name) != neutral:
            yield f"{config.say(name)} is for layers of two branches, and {asked} has one in each; leave it out"
    if letters.predictions:
        yield f"{asked} has layers of multi-token prediction (behind /), which letters cannot build yet; leave them out"
