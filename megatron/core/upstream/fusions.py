# SPDX-License-Identifier: Apache-2.0
"""Upstream's functions and norms that it fuses; here they are formulas, which compilers may fuse."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core import activations
from megatron.core.errors import ConfigError, UnsupportedError
from megatron.core.tensor_parallel.parameters import fill_alone
from megatron.core.transformer.norms import LayerNorm, RMSNorm, build_norm, normalise_length
from megatron.core.transformer.transformer_config import TransformerConfig

BiasDropoutAdd = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


def get_bias_dropout_add(training: bool, fused: bool) -> BiasDropoutAdd:
    """(output and its bias or None, residual, probability) -> residual + dropout(output + bias). fused: no other
    result."""

    def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
        x, bias = x_with_bias
        return residual + F.dropout(x if bias is None else x + bias, prob, training)

    return add


def bias_dropout_add_fused_train(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
    """The same in training."""
    return get_bias_dropout_add(True, True)(x_with_bias, residual, prob)


def quick_gelu(y: Tensor) -> Tensor:
    """y * sigmoid(1.702 y)."""
    return activations.quick_gelu(y)


def bias_gelu(bias: Tensor, y: Tensor) -> Tensor:
    """GELU of y + bias, by its approximation with tanh."""
    return F.gelu(y + bias, approximate="tanh")


def bias_swiglu(y: Tensor, bias: Tensor) -> Tensor:
    """SwiGLU of y + bias: [..., 2 f] -> [..., f], silu of the first half times the second."""
    gate, up = (y + bias).chunk(2, dim=-1)
    return F.silu(gate) * up


class FusedLayerNorm(LayerNorm):
    """A LayerNorm with upstream's constructor."""

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = True,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
    ) -> None:
        """persist_layer_norm: no other result. zero_centered_gamma: the config says it. Raises ConfigError for another
        normalization than LayerNorm, and a centre that is not the config's."""
        if (normalization, config.normalization) != ("LayerNorm", "LayerNorm"):
            raise ConfigError(f"FusedLayerNorm is a LayerNorm; found {normalization}, {config.normalization}")
        if zero_centered_gamma and not config.layernorm_zero_centered_gamma:
            raise ConfigError("zero_centered_gamma=True: set layernorm_zero_centered_gamma in the config")
        super().__init__(config, hidden_size, eps)
        fill_alone(self)


class WrappedTorchNorm:
    """A factory of the norm that config.normalization names."""

    def __new__(  # type: ignore[misc]
        cls,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str | None = None,
        memory_efficient_ln: bool = False,
    ) -> LayerNorm | RMSNorm:
        """persist_layer_norm, memory_efficient_ln: no other result. Raises ConfigError where zero_centered_gamma or
        normalization are not the config's."""
        if normalization not in (None, config.normalization):
            raise ConfigError(f"normalization={normalization!r}: the config says {config.normalization}")
        if zero_centered_gamma and not config.layernorm_zero_centered_gamma:
            raise ConfigError("zero_centered_gamma=True: set layernorm_zero_centered_gamma in the config")
        norm = build_norm(config, hidden_size, eps)
        fill_alone(norm)
        return norm


class L2Norm(nn.Module):
    """x / sqrt(mean(x^2) + eps) over the last dimension; it has no weight."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, config: TransformerConfig | None = None) -> None:
        """hidden_size, config: of upstream's signature; the last dimension is what it is."""
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h] in x's dtype, computed in float32."""
        return normalise_length(x, self.eps)


def get_fp8_context(config: Any, layer_no: int = -1, is_init: bool = False) -> AbstractContextManager[None]:
    """A block around a layer that does nothing without --fp8. Raises UnsupportedError with it: layers of ours multiply
    in 8 bits by themselves, and others would not."""
    if getattr(config, "fp8", None):
        raise UnsupportedError("get_fp8_context() has no 8-bit numbers for layers of others; take TransformerLayer")
    return nullcontext()


def correct_amax_history_if_needed(model: Any) -> None:
    """Nothing: maxima of 8-bit numbers are kept by our layers, which need no correction."""


def split_along_dim(mixed_x_layer: Tensor, split_dim: int, split_size_or_sections: Any) -> tuple[Tensor, ...]:
    """torch.split with the dimension first."""
    return torch.split(mixed_x_layer, split_size_or_sections, split_dim)
