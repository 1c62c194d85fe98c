"""Random numbers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config_base import flag


@dataclass(kw_only=True)
class RNGConfig:
    """Seeds."""

    seed: int = flag(1234, minimum=1, maximum=2**31 - 1)
    """Seed of weights, dropout and data order."""
