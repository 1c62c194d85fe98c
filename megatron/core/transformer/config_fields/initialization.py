# SPDX-License-Identifier: Apache-2.0
"""Initial values of weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.config_base import derived, flag
from megatron.core.setting import Needs
from megatron.core.transformer.config_fields.architecture import ArchitectureFields

# Only FSDP fills one layer after the other; without it the whole model would get its memory at once.
_DIVIDED_PARAMETERS = Needs("--use-torch-fsdp2 or --use-megatron-fsdp", lambda run: run.use_torch_fsdp2)


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class InitializationFields(ArchitectureFields):
    """Distribution of initial weights."""

    init_method_std: float = flag(0.02, minimum=0, kind="numerics")
    """Standard deviation of the normal distribution weights are drawn from; output projections of attention and MLP
    use it divided by sqrt(2 x layers)."""
    embedding_init_method_std: float | None = flag(None, minimum=0, kind="numerics")
    """Standard deviation of the token and position embeddings; --init-method-std when not given."""
    init_method_xavier_uniform: bool = flag(False, kind="numerics")
    """Draw the projections of attention and MLP from Glorot and Bengio's uniform distribution (2010, equation 16);
    embeddings and the output layer keep the normal one."""
    perform_initialization: bool = flag(
        True, names=("--initialization",), off_names=("--no-initialization",), kind="numerics"
    )
    """Draw initial weights. Without it only norms and biases are set, for a run that loads its weights."""
    init_model_with_meta_device: bool = flag(False, kind="layout", needs=_DIVIDED_PARAMETERS)
    """With --use-torch-fsdp2, build the model without memory and give it to one layer after the other, each of which is
    divided before the next one is filled: no process ever holds the whole model."""
    # Callables cannot be written on a command line: these three are for models that are built in Python.
    init_method: Callable[..., Any] | None = derived(kind="numerics")
    """Initialiser of input projections, `f(tensor, generator)`; the normal distribution when None."""
    output_layer_init_method: Callable[..., Any] | None = derived(kind="numerics")
    """Initialiser of output projections; the scaled normal distribution when None."""
    embedding_init_method: Callable[..., Any] | None = derived(kind="numerics")
    """Initialiser of embeddings; the normal distribution when None."""
    seed: int = flag(1234, minimum=1, maximum=2**31 - 1, kind="numerics")
    """Seed of weights, dropout and data order. Each initial weight is a function of (seed, parameter name, index)."""
    te_rng_tracker: bool = flag(False, kind="kernel")
    """Upstream's random streams for CUDA graphs. Not needed here, as a note says."""
