# SPDX-License-Identifier: Apache-2.0
"""Small enumerations that several layers share; names and numbers are upstream's."""

from __future__ import annotations

import enum


class ModelType(enum.Enum):
    """Kind of model that a provider builds. GPT is the one there is; programs compare with the others."""

    encoder_or_decoder = 1
    retro_encoder = 2
    retro_decoder = 3
    encoder_and_decoder = 4
    hybrid_cp = 5


class LayerType(enum.Enum):
    """Kinds of parts that a pipeline layout has on its stages."""

    embedding = 1
    loss = 2
    encoder = 3
    decoder = 4
    mtp = 5


class Fp8Recipe(enum.StrEnum):
    """Recipes for the scales of 8-bit numbers; see --fp8-recipe."""

    delayed = "delayed"
    tensorwise = "tensorwise"
    mxfp8 = "mxfp8"
    blockwise = "blockwise"
    custom = "custom"


class AttnMaskType(enum.Enum):
    """Masks: the positions that attention may look at."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5
    causal_bottom_right = 6


class AttnBackend(enum.Enum):
    """Implementations of attention; see --attention-backend."""

    flash = 1
    fused = 2
    unfused = 3
    local = 4
    auto = 5
