"""How weights start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.config_base import derived, flag


@dataclass(kw_only=True)
class InitializationFields:
    """Distribution of initial weights."""

    init_method_std: float = flag(0.02, minimum=0)
    """Standard deviation of the normal distribution weights are drawn from; output projections of attention and MLP
    use it divided by sqrt(2 x layers)."""
    init_method: Callable[..., Any] | None = derived()
    """Initialiser of input projections, `f(tensor, generator)`; the normal distribution when None."""
    output_layer_init_method: Callable[..., Any] | None = derived()
    """Initialiser of output projections; the scaled normal distribution when None."""
    seed: int = derived(1234)
    """Seed of the initial weights: each weight is a function of (seed, parameter name, index)."""
