# SPDX-License-Identifier: Apache-2.0
"""Upstream's config classes that are one class here."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(kw_only=True)
class MLATransformerConfig(TransformerConfig):
    """A TransformerConfig of latent attention."""

    multi_latent_attention: bool = True
