# SPDX-License-Identifier: Apache-2.0
"""Small enumerations that several layers share; names and numbers are upstream's."""

from __future__ import annotations

import enum


class ModelType(enum.Enum):
    """What kind of model a provider builds. GPT is the one there is."""

    encoder_or_decoder = 1


class AttnMaskType(enum.Enum):
    """Which positions attention may look at."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5
    causal_bottom_right = 6


class AttnBackend(enum.Enum):
    """Who computes attention; see --attention-backend."""

    flash = 1
    fused = 2
    unfused = 3
    local = 4
    auto = 5
