"""Shape of the transformer: sizes, norms, activation, biases, dropout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.config_base import derived, flag


@dataclass(kw_only=True)
class ArchitectureFields:
    """Sizes, norms, activation, biases, dropout."""

    num_layers: int = flag(None, minimum=1, maximum=65536)
    """Transformer layers."""
    hidden_size: int = flag(None, minimum=1, maximum=2**24)
    """Width of the residual stream."""
    ffn_hidden_size: int = flag(None, minimum=1, maximum=2**26)
    """Inner width of the MLP; 4 x hidden size when not given, and with --swiglu 8/3 x hidden size rounded down to a
    multiple of 64."""
    normalization: str = flag("LayerNorm", choices=("LayerNorm", "RMSNorm"))
    """Norm before attention, before the MLP and after the last layer."""
    layernorm_epsilon: float = flag(1e-5, above=0, names=("--norm-epsilon",))
    """Added to the variance in norms."""
    layernorm_zero_centered_gamma: bool = flag(False, names=("--apply-layernorm-1p",))
    """Norm weights are stored as (weight - 1), so that weight decay pulls them to one."""
    persist_layer_norm: bool = flag(True, off_names=("--no-persist-layer-norm",))
    """Norms use torch's fused operator; without it they are computed from elementary operations."""
    add_bias_linear: bool = flag(True, off_names=("--disable-bias-linear",))
    """Biases in the linear layers."""
    add_qkv_bias: bool = False
    """A bias in the query-key-value projection even when the other linear layers have none."""
    gated_linear_unit: bool = derived(False)
    """Two input projections in the MLP, activation(gate) * up."""
    activation_func: str | Callable[..., Any] = derived("gelu")
    """Activation of the MLP: gelu, gelu_tanh, silu, squared_relu, quick_gelu, or a callable on tensors."""
    hidden_dropout: float = flag(0.1, minimum=0, maximum=1)
    """Dropout after the embedding, the attention and the MLP."""
    bias_activation_fusion: bool = derived(True)
    """The MLP's activation (with its bias or gate) as one differentiable operation that keeps only its inputs."""
    bias_dropout_fusion: bool = flag(True)
    """Bias, dropout and residual as one operation."""
