# SPDX-License-Identifier: Apache-2.0
"""Shape of the transformer: sizes, norms, activation, biases, dropout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.config_base import derived, flag
from megatron.core.errors import ConfigError
from megatron.core.flag_texts import layer_pattern
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.plan.heterogeneous import read_encoded
from megatron.core.setting import Needs, PathText

_FUSED_LOSS = Needs("--cross-entropy-loss-fusion", lambda run: run.cross_entropy_loss_fusion)
_GATED = Needs("--swiglu, --geglu or --quick-geglu", lambda run: run.gated_linear_unit)


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class ArchitectureFields(ModelParallelConfig):
    """Sizes, norms, activation, biases, dropout."""

    num_layers: int = flag(None, minimum=1, maximum=65536, example=12, kind="shape")
    """Transformer layers."""
    hybrid_layer_pattern: str | None = flag(None, kind="shape")
    """A letter for each layer of the decoder, each with one branch: * attention, + latent attention, - MLP, E experts,
    M Mamba-2, G gated delta net, K Kimi delta attention, L short convolution, and letters of kinds that a program
    registers. | stands between pipeline stages, / before the layers of each depth of multi-token prediction;
    --num-layers and --mtp-num-layers follow."""
    hybrid_override_pattern: str | None = flag(None, kind="shorthand")
    """Earlier spelling of --hybrid-layer-pattern."""
    heterogeneous_layers_config_path: PathText | None = flag(None, kind="shorthand")
    """JSON in which layers of a GPT differ: number of key-value heads and inner width, no attention or no MLP, or one
    matrix in place of either (Llama-Nemotron). The other flags say the model, as its fields do."""
    heterogeneous_layers_config_encoded_json: str | None = flag(None, kind="shape")
    """The same as text, which counts where both are given; filled from the file, so that a run that goes on does not
    need it."""
    is_hybrid_model: bool = flag(False, kind="numerics")
    """Output projections start as in a decoder of one branch a layer: --init-method-std over the root of the number of
    layers, instead of twice as many. Follows from --hybrid-layer-pattern."""
    hidden_size: int = flag(None, minimum=1, maximum=2**24, example=768, kind="shape")
    """Width of the residual stream."""
    ffn_hidden_size: int = flag(None, minimum=1, maximum=2**26, kind="shape")
    """Inner width of the MLP; 4 x hidden size when not given, and with --swiglu 8/3 x hidden size rounded down to a
    multiple of 64."""
    normalization: str = flag("LayerNorm", choices=("LayerNorm", "RMSNorm"), kind="shape")
    """Norm before attention, before the MLP and after the last layer."""
    norm_parameters: str = flag("all", choices=("all", "weight", "none"), kind="shape")
    """Parameters of norms: all that their kind has, a weight without LayerNorm's bias (Cohere), or none (OLMo 1)."""
    layernorm_epsilon: float = flag(1e-5, above=0, names=("--norm-epsilon",), kind="function")
    """Added to the variance in norms."""
    layernorm_zero_centered_gamma: bool = flag(False, names=("--apply-layernorm-1p",), kind="function")
    """Norm weights are stored as (weight - 1), so that weight decay pulls them to one."""
    norm_placement: str = flag("input", choices=("input", "output", "both"), kind="shape")
    """Position of a layer's norms: on the input of attention and MLP (pre-norm), on their output before it joins the
    residual stream (OLMo 2), or on both (Gemma 2 and 3). The norm after the last layer is there in any case."""
    output_norm_freq: int | list[int] | None = flag(None, parse=layer_pattern, kind="shape")
    """Layers whose norms are on the output, whatever --norm-placement says of the others: a number means every n-th, a
    list has one entry per layer, 1 for these. Layers of --hybrid-layer-pattern are its letters (OLMo Hybrid)."""
    apply_residual_connection_post_layernorm: bool = flag(False, kind="function")
    """The residual path of attention and MLP starts after the norm of their input instead of before it."""
    parallel_residual: bool = flag(False, kind="function")
    """Attention and MLP both read the layer's input, x + attention(norm(x)) + mlp(norm'(x)), as GPT-NeoX does."""
    parallel_residual_shares_norm: bool = flag(
        False, kind="shape", needs=Needs("--parallel-residual", lambda run: run.parallel_residual)
    )
    """With --parallel-residual one norm for both, x + attention(norm(x)) + mlp(norm(x)), as Phi-2 and Cohere have."""
    fp32_residual_connection: bool = flag(False, kind="numerics")
    """Keep the residual stream in float32 where the model computes in a shorter format."""
    embedding_multiplier: float = flag(1.0, above=0, kind="function")
    """Factor on the output of the embedding; Gemma has sqrt(hidden size)."""
    add_embedding_norm: bool = flag(False, kind="shape")
    """Normalise the output of the embedding before the first layer (nanochat)."""
    residual_multiplier: float = flag(1.0, above=0, kind="function")
    """Factor on the output of attention and MLP before it joins the residual stream (Granite)."""
    mlp_output_multiplier: float = flag(1.0, above=0, kind="function")
    """Factor on the output of the MLP, and of experts, in addition to --residual-multiplier (Falcon-H1)."""
    activation_input_multiplier: float = flag(1.0, above=0, kind="function")
    """Factor on what the activation function reads, in an MLP and in experts (Falcon-H1)."""
    logit_multiplier: float = flag(1.0, above=0, kind="function")
    """Factor on the logits (Granite divides by a number, Cohere multiplies)."""
    persist_layer_norm: bool = flag(True, off_names=("--no-persist-layer-norm",), kind="kernel")
    """Norms use torch's fused operator; without it they are computed from elementary operations."""
    add_bias_linear: bool = flag(True, off_names=("--disable-bias-linear",), kind="shape")
    """Biases in the linear layers."""
    add_qkv_bias: bool = flag(False, kind="shape")
    """A bias in the query-key-value projection even when the other linear layers have none."""
    add_attention_output_bias: bool = flag(False, kind="shape")
    """A bias in attention's output projection even when the other linear layers have none."""
    add_mlp_bias: bool = flag(False, kind="shape")
    """Biases in dense MLPs and shared experts even when the other linear layers have none."""
    add_output_layer_bias: bool = flag(False, kind="shape")
    """A bias in the output layer, on the logits (Phi-2)."""
    gated_linear_unit: bool = derived(False, kind="shape")
    """Two input projections in the MLP, activation(gate) * up."""
    activation_func: str | Callable[..., Any] = derived("gelu", kind="function")
    """Activation of the MLP: gelu, gelu_tanh, silu, relu, squared_relu, quick_gelu, or a callable on tensors."""
    activation_func_clamp_value: float | None = flag(None, above=0, kind="function", needs=_GATED)
    """Bound c of a gated activation: act(min(gate, c)) * max(-c, min(up, c)); gpt-oss has 7."""
    glu_linear_offset: float = flag(0.0, kind="function", needs=_GATED)
    """Offset o of a gated activation: act(gate) * (up + o); gpt-oss has 1."""
    hidden_dropout: float = flag(0.1, minimum=0, maximum=1, kind="numerics")
    """Dropout after the embedding, the attention and the MLP."""
    cross_entropy_loss_fusion: bool = flag(False, kind="kernel")
    """Loss and its gradient straight from logits in the model's dtype, a block of tokens at a time: no float32 copy of
    the logits exists."""
    cross_entropy_fusion_impl: str = flag("native", choices=("native", "te"), kind="kernel", needs=_FUSED_LOSS)
    """Source of the fused cross entropy: native is this system's; te, Transformer Engine's, is refused, as upstream
    refuses it with --cross-entropy-loss-fusion."""
    logit_dtype: str | None = flag(None, choices=("bf16", "fp32"), names=("--output-logit-dtype",), kind="numerics")
    """Dtype of the logits: fp32 keeps what the output layer's product sums in float32, which --bf16 would round; the
    model's when not given."""
    loss_chunk_size: int | None = flag(None, minimum=1, unit="tokens", kind="kernel")
    """Compute logits and loss of so many positions of each sequence at a time, and the logits again in backward: the
    logits of a full microbatch are never in memory, for one more product of the output layer. All positions when not
    given."""
    bias_activation_fusion: bool = derived(True, kind="kernel")
    """The MLP's activation (with its bias or gate) as one differentiable operation that keeps only its inputs."""
    bias_dropout_fusion: bool = flag(True, kind="kernel")
    """Bias, dropout and residual as one operation."""
    final_logit_softcapping: float | None = flag(None, above=0, kind="function")
    """Bound on the output layer's logits: logit -> bound x tanh(logit / bound) (Gemma 2)."""

    def derive(self) -> None:
        super().derive()
        path = self.heterogeneous_layers_config_path
        if isinstance(path, str) and self.heterogeneous_layers_config_encoded_json is None:
            with contextlib.suppress(ConfigError):  # told by `rules`
                self.heterogeneous_layers_config_encoded_json = read_encoded(path)
        # Filled in before anything is checked, so that checks see the numbers the model is built with.
        if self.ffn_hidden_size is None and self.hidden_size is not None:
            width = self.hidden_size
            # SwiGLU: two thirds, so that three matrices hold what two did; a multiple of 64 for the hardware.
            is_swiglu = self.gated_linear_unit and self.activation_func == "silu"
            self.ffn_hidden_size = int(4 * width * 2 / 3 / 64) * 64 if is_swiglu else 4 * width

    def rules(self) -> Iterator[str]:
        if self.heterogeneous_layers_config_path is not None and self.heterogeneous_layers_config_encoded_json is None:
            try:
                read_encoded(self.heterogeneous_layers_config_path)
            except ConfigError as error:
                yield from error.problems
        if self.ffn_hidden_size is not None and self.ffn_hidden_size < 1:
            yield f"{self.say('hidden_size')} is too small for a default MLP width; give --ffn-hidden-size"
        # A flag without effect is a misunderstanding: it is refused rather than ignored.
        if self.fp32_residual_connection and not (self.fp16 or self.bf16):
            yield "--fp32-residual-connection says nothing in a float32 run; add --bf16 or --fp16, or leave it out"
        if self.logit_dtype == "bf16" and not self.bf16:
            yield f"{self.say('logit_dtype')} is the format of a --bf16 model; add --bf16, or leave it out"
        # Upstream refuses this pair, and scripts that rely on the refusal keep their meaning.
        if self.cross_entropy_loss_fusion and self.cross_entropy_fusion_impl == "te":
            yield (
                "--cross-entropy-fusion-impl te cannot be combined with --cross-entropy-loss-fusion, in Megatron-LM "
                "neither; use --cross-entropy-fusion-impl native, which computes the same loss"
            )
        # There would be no norm on the input for the residual path to start after.
        has_output_norms = self.norm_placement == "output" or self.output_norm_freq is not None
        if self.apply_residual_connection_post_layernorm and has_output_norms:
            yield (
                "--apply-residual-connection-post-layernorm needs a norm before attention and MLP; "
                "use --norm-placement input or both, and leave out --output-norm-freq"
            )
        if self.apply_residual_connection_post_layernorm and self.parallel_residual:
            yield "--apply-residual-connection-post-layernorm and --parallel-residual contradict each other; keep one"
        if self.parallel_residual_shares_norm and (has_output_norms or self.norm_placement == "both"):
            yield (
                "--parallel-residual-shares-norm has a norm before attention and MLP, and no others; use "
                "--norm-placement input, and leave out --output-norm-freq"
            )
        if self.norm_parameters == "none" and self.layernorm_zero_centered_gamma:
            yield "--norm-parameters none leaves no weight for --apply-layernorm-1p to store; leave one of the two out"
