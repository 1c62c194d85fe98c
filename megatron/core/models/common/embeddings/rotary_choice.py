# SPDX-License-Identifier: Apache-2.0
"""Choice of a model's rotary positions by its config."""

from __future__ import annotations

from typing import Any

from megatron.core.errors import ConfigError
from megatron.core.models.common.embeddings.longrope_rotary_pos_embedding import LongRotaryEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import (
    MultimodalRotaryEmbedding,
    RotaryEmbedding,
)
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.transformer.config_fields.positions import is_rotary
from megatron.core.transformer.transformer_config import TransformerConfig


def build_rotary_embeddings(
    config: TransformerConfig,
    position_embedding_type: str,
    rotary_percent: float,
    stretch: tuple[float | None, float],
    llama3_scaling: tuple[bool, float, float],
) -> tuple[RotaryEmbedding | None, RotaryEmbedding | None]:
    """The model's rotary positions, and the ones of its layers with only a sliding window; None where it has none.

    stretch: interpolation factor and base. llama3_scaling: True if used, its factor, and the factor of high
    frequencies.
    """
    # Latent attention rotates whatever else the model is told about positions.
    kind = config.position_embedding_type if config.multi_latent_attention else position_embedding_type
    if not is_rotary(kind, config.multi_latent_attention):
        return None, None
    interpolation, base = stretch
    base, rotary_percent = config.choose_rotary_base(base, rotary_percent)
    shape = (config.rotary_width, rotary_percent, config.rotates_neighbours)
    plain_base: float | None = config.rotary_base_local
    if config.is_compressed:
        # Layers without entries have the model's base, and no stretching.
        base, plain_base = config.csa_compress_rotary_base, base
    if config.mrope_section is not None:
        if config.uses_yarn(kind) or config.longrope_short_factors is not None or llama3_scaling[0] or plain_base:
            raise ConfigError("mrope_section divides plain rotary positions; leave out what stretches or changes them")
        return MultimodalRotaryEmbedding(*shape, interpolation, base), None
    if config.uses_yarn(kind):
        everywhere: RotaryEmbedding = YarnRotaryEmbedding(*shape, interpolation, base, **_yarn_options(config))
    elif config.longrope_short_factors is not None:
        everywhere = LongRotaryEmbedding(shape, base, *config.get_longrope_options())
    else:
        scales, factor, high = llama3_scaling
        everywhere = RotaryEmbedding(
            *shape, interpolation, base, scales, factor, rope_scaling_high_freq_factor=high
        )  # fmt: skip
    if plain_base is None:
        return everywhere, None
    # Plain angles: windows are short, so that no stretching for long sequences applies to them.
    return everywhere, RotaryEmbedding(*shape, rotary_base=plain_base)


def _yarn_options(config: TransformerConfig) -> dict[str, Any]:
    original = config.yarn_original_max_position_embeddings
    problems = list(config.position_problems("yarn"))
    if problems:  # the model was built with other positions than its config has
        raise ConfigError(problems)
    return {
        "scaling_factor": config.rotary_scaling_factor,
        "original_max_position_embeddings": original,
        "beta_fast": 32.0 if config.yarn_beta_fast is None else config.yarn_beta_fast,
        "beta_slow": 1.0 if config.yarn_beta_slow is None else config.yarn_beta_slow,
        # Compressed attention has no factor on angles.
        "mscale": 0.0 if config.is_compressed else config.mscale,
        "mscale_all_dim": 0.0 if config.is_compressed else config.mscale_all_dim,
        "correction_range_round_to_int": config.yarn_correction_range_round_to_int,
    }
