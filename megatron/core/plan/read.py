# SPDX-License-Identifier: Apache-2.0
"""The plan of the model that a config describes, by flags (a GPT) or by letters (a hybrid): one reading for both."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from megatron.core.errors import ConfigError
from megatron.core.plan.heterogeneous import FLAG, HeterogeneousLayer, parse_blocks
from megatron.core.plan.letters import Letters, find_letters_problem, split_letters
from megatron.core.plan.model_plan import Branch, LayerPlan, ModelPlan
from megatron.core.plan.patterns import PlanSettings

_GATED_DELTA_NETS = {"gdn": "gated_delta_net", "gated_delta_net": "gated_delta_net", "gdn2": "gated_delta_net_2"}
"""--experimental-attention-variant -> kind of layers."""
SPARSE_RATIO, HEAVY_RATIO = 4, 128
"""Compression ratios of DeepSeek-V4, of layers that choose among entries, and of those that see all."""
_COMPRESSED = {"sliding_attention": 0, "compressed_sparse": SPARSE_RATIO, "compressed_heavy": HEAVY_RATIO}
"""Kinds of compressed attention, and their ratios where settings say no others."""


def _name_compressed(ratio: int) -> str:
    return next((kind for kind, usual in _COMPRESSED.items() if usual == ratio), "compressed_heavy")


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
    attention = "sparse_attention" if settings.experimental_attention_variant == "dsa" else attention
    attention = "parallel" if settings.mamba_beside_attention else attention
    linear = _GATED_DELTA_NETS.get(settings.experimental_attention_variant or "", attention)

    blocks = _read_blocks(settings)

    def plan(number: int, name: str) -> LayerPlan:
        if blocks is not None:
            return LayerPlan(number, name, tuple(_list_branches(settings, blocks, number)))
        compressed = settings.experimental_attention_variant == "dsv4_hybrid"
        own = _name_compressed(settings.read_ratio(number)) if compressed else attention
        kinds = (
            linear if settings.is_linear(number) else own,
            "experts" if settings.has_experts(number) else "mlp",
        )
        branches = tuple(_branch(settings, kind, number) for kind in kinds)
        return LayerPlan(number, name, branches, settings.parallel_residual)

    return ModelPlan(
        tuple(plan(index + 1, f"decoder.layers.{index}") for index in range(layers)),
        tuple(plan(layers + depth + 1, f"mtp.layers.{depth}.mtp_model_layer") for depth in range(with_weights)),
    )


def _read_blocks(settings: PlanSettings) -> tuple[HeterogeneousLayer, ...] | None:
    """The layers of different shapes; None where all have the model's. A number of layers that is not theirs is
    complained about elsewhere."""
    text = settings.heterogeneous_layers_config_encoded_json
    if text is None or not settings.hidden_size or not settings.num_attention_heads:
        return None
    blocks = parse_blocks(text, settings.hidden_size, settings.num_attention_heads)
    return blocks if len(blocks) == settings.num_layers else None


def _list_branches(settings: PlanSettings, blocks: tuple[HeterogeneousLayer, ...], number: int) -> Iterator[Branch]:
    block = blocks[number - 1]
    if block.attention != "none":
        branch = _branch(settings, "attention" if block.attention == "own" else "linear_for_attention", number)
        yield branch._replace(options=branch.options._replace(query_groups=block.query_groups))
    if block.mlp != "none":
        branch = _branch(settings, "mlp" if block.mlp == "own" else "linear_for_mlp", number)
        yield branch._replace(options=branch.options._replace(ffn_hidden_size=block.ffn_hidden_size))


def block_problems(config: Any) -> Iterator[str]:
    """Yield what is wrong with layers of different shapes, and with settings that contradict them. Raises ConfigError
    where their text cannot be read."""
    text, flag = config.heterogeneous_layers_config_encoded_json, FLAG
    blocks = parse_blocks(text, config.hidden_size or 1, config.num_attention_heads or 1)
    if config.num_layers and len(blocks) != config.num_layers:
        found = f"{flag} has block_configs of {len(blocks)} layers"
        yield f"{found}, and {config.say('num_layers')}; give one for each layer"
    for name, neutral in {
        "hybrid_layer_pattern": None, "multi_latent_attention": False, "num_moe_experts": None, "mtp_num_layers": None,
        "parallel_residual": False, "linear_attention_freq": None, "mamba_beside_attention": False,
    }.items():  # fmt: skip
        if getattr(config, name) != neutral:
            yield f"{config.say(name)} says what layers are, as {flag} does; leave one of the two out"
    ranks = config.tensor_model_parallel_size
    for index, block in enumerate(blocks):
        groups, width = block.query_groups, block.ffn_hidden_size
        if groups is not None and groups % ranks and ranks % groups:
            yield (
                f"{flag}: block_configs[{index}] has {groups} key-value heads, which "
                f"{config.say('tensor_model_parallel_size')} cannot share; use a multiple or a divisor of {ranks}"
            )
        if width is not None and width % ranks:
            yield (
                f"{flag}: block_configs[{index}] has an inner width of {width}, which "
                f"{config.say('tensor_model_parallel_size')} does not divide; use a multiple of {ranks}"
            )


def _build_from_letters(settings: PlanSettings, pattern: str) -> ModelPlan:
    from megatron.core.plan.kinds import list_letters

    letters, kinds = read_letters(pattern), list_letters()
    count, depths = len(letters.decoder), letters.predictions[: 1 if settings.mtp_use_repeated_layer else None]

    # The letter says that it is a gated delta net, the flag which form.
    kinds["G"] = _GATED_DELTA_NETS.get(settings.experimental_attention_variant or "gdn", kinds["G"])

    def plan(letter: str, number: int, name: str, place: int) -> LayerPlan:
        branch = _branch(settings, kinds[letter], place, is_prediction=number > count)
        return LayerPlan(number, name, (branch,))

    return ModelPlan(
        tuple(
            plan(letter, index + 1, f"decoder.layers.{index}", index + 1)
            for index, letter in enumerate(letters.decoder)
        ),
        tuple(
            # Settings for single layers count the layers of multi-token prediction from 1, as upstream does.
            plan(
                letter,
                count + depth * len(part) + index + 1,
                f"mtp.layers.{depth}.mtp_model_layer.layers.{index}",
                index + 1,
            )
            for depth, part in enumerate(depths)
            for index, letter in enumerate(part)
        ),
    )


def _branch(settings: PlanSettings, kind: str, number: int, *, is_prediction: bool = False) -> Branch:
    options = settings.read_options(number)
    if kind == "sparse_attention" and not is_prediction:
        options = options._replace(chooser=settings.find_chooser(number))
    if kind in _COMPRESSED:
        listed = settings.hybrid_layer_pattern is None
        options = options._replace(
            window=settings.csa_window_size - 1,
            rotary="global" if _COMPRESSED[kind] else "local",
            compress_ratio=settings.read_ratio(number) if listed else _COMPRESSED[kind],
            chooses=_COMPRESSED[kind] == SPARSE_RATIO,
        )
    if kind in ("mlp", "experts", "linear_for_mlp"):
        options = options._replace(multiplier=settings.mlp_output_multiplier)
        if settings.parallel_residual_shares_norm:
            options = options._replace(norm="shared")
    return Branch(kind, options, settings.is_low_precision(number))


def read_letters(pattern: str) -> Letters:
    """Take the pattern of a hybrid apart. Raises ConfigError where it is none."""
    # Loaded for letters alone: --help and most runs start without.
    from megatron.core.plan.kinds import list_letters

    problem = find_letters_problem(pattern, list_letters())
    if problem is not None:
        raise ConfigError(f"--hybrid-layer-pattern {pattern} {problem}")
    return split_letters(pattern)


def follow_letters(config: Any) -> None:
    """Fill in what the letters of a TransformerConfig say, whose values may be of any type yet: the number of layers
    and of MTP depths, latent attention, and the earlier names of the pattern's flags."""
    if config.hybrid_layer_pattern is None:
        config.hybrid_layer_pattern, config.hybrid_override_pattern = config.hybrid_override_pattern, None
    pattern, depths = config.hybrid_layer_pattern, config.mtp_num_layers
    if not isinstance(pattern, str):
        return
    inner = config.mtp_hybrid_override_pattern
    if isinstance(inner, str) and isinstance(depths, int) and depths > 0 and "/" not in pattern:
        config.hybrid_layer_pattern = pattern = pattern + f"/{inner}" * min(depths, 1024)
        config.mtp_hybrid_override_pattern = None
    letters = split_letters(pattern)
    if config.num_layers is None:
        config.num_layers = max(1, len(letters.decoder))
    if config.mtp_num_layers is None:
        config.mtp_num_layers = len(letters.predictions) or None
    config.is_hybrid_model = True
    if set("+DCHW") & set(pattern):
        config.multi_latent_attention = True


def letter_problems(config: Any) -> Iterator[str]:
    """Yield what is wrong with the letters of a TransformerConfig, and with settings that contradict them."""
    from megatron.core.plan.kinds import find_kind, list_letters

    pattern: str = config.hybrid_layer_pattern
    letters, asked = read_letters(pattern), config.say("hybrid_layer_pattern")
    everything = letters.decoder + "".join(letters.predictions)
    if not letters.decoder:
        yield f"{asked} has no layer; write a letter for each layer of the decoder"
        return
    if len(letters.decoder) != config.num_layers:
        yield f"{config.say('num_layers')} contradicts {asked}, which has {len(letters.decoder)} layers; leave it out"
    if len(letters.predictions) != (config.mtp_num_layers or 0):
        yield (
            f"{config.say('mtp_num_layers')} contradicts {asked}, which has {len(letters.predictions)} parts of "
            "multi-token prediction (behind /); leave it out"
        )
    for letter, kind in list_letters().items():
        missing = find_kind(kind).missing
        if letter in everything and missing is not None:
            yield f"{asked} has the letter {letter}: {missing}"
    if ("E" in everything) != bool(config.num_moe_experts):
        yield f"{asked} contradicts {config.flag('num_moe_experts')}: the letter E and that flag go together"
    if "*" in everything and config.multi_latent_attention:
        yield f"{asked} has attention with latent vectors and without; write + for * with --multi-latent-attention"
    elif config.multi_latent_attention and not set("+DCHW") & set(everything):
        yield f"{asked} contradicts --multi-latent-attention: the letter + and that flag go together"
    neutrals = {"parallel_residual": False, "mamba_beside_attention": False, "moe_layer_freq": 1}
    for name, neutral in (neutrals | {"linear_attention_freq": None}).items():
        if getattr(config, name) != neutral:
            yield f"{config.say(name)} is for layers of two branches, and {asked} has one in each; leave it out"
