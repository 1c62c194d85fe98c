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
    norm_placement: str = flag("input", choices=("input", "output", "both"))
    """Where a layer's norms stand: on the input of attention and MLP (pre-norm), on their output before it joins the
    residual stream (OLMo 2), or on both (Gemma 2 and 3). The norm after the last layer is there in any case."""
    apply_residual_connection_post_layernorm: bool = False
    """The residual path of attention and MLP starts behind the norm of their input instead of before it."""
    parallel_residual: bool = False
    """Attention and MLP both read the layer's input, x + attention(norm(x)) + mlp(norm'(x)), as GPT-NeoX does."""
    fp32_residual_connection: bool = False
    """Keep the residual stream in float32 where the model computes in a shorter format."""
    embedding_multiplier: float = flag(1.0, above=0)
    """Factor on the output of the embedding; Gemma has sqrt(hidden size)."""
    residual_multiplier: float = flag(1.0, above=0)
    """Factor on the output of attention and MLP before it joins the residual stream (Granite)."""
    logit_multiplier: float = flag(1.0, above=0)
    """Factor on the logits (Granite divides by a number, Cohere multiplies)."""
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
    activation_func_clamp_value: float | None = flag(None, above=0)
    """Bound c of a gated activation: act(min(gate, c)) * max(-c, min(up, c)); gpt-oss has 7."""
    glu_linear_offset: float = 0.0
    """Offset o of a gated activation: act(gate) * (up + o); gpt-oss has 1."""
    hidden_dropout: float = flag(0.1, minimum=0, maximum=1)
    """Dropout after the embedding, the attention and the MLP."""
    cross_entropy_loss_fusion: bool = False
    """Loss and its gradient straight from logits in the model's number format, a block of tokens at a time: no float32
    copy of the logits exists."""
    cross_entropy_fusion_impl: str = flag("native", choices=("native", "te"))
    """Whose fused cross entropy: native is this system's; Transformer Engine's, te, is refused."""
    logit_dtype: str | None = flag(None, choices=("bf16", "fp32"), names=("--output-logit-dtype",))
    """Number format of the logits: fp32 keeps what the output layer's product sums in float32, which --bf16 would
    round; the model's when not given."""
    bias_activation_fusion: bool = derived(True)
    """The MLP's activation (with its bias or gate) as one differentiable operation that keeps only its inputs."""
    bias_dropout_fusion: bool = flag(True)
    """Bias, dropout and residual as one operation."""
    final_logit_softcapping: float | None = flag(None, above=0)
    """Bound on the output layer's logits: logit -> bound x tanh(logit / bound) (Gemma 2)."""
