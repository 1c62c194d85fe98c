"""GPT options around the transformer: positions, vocabulary, output layer, and switches that imply layer settings."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config_base import flag
from megatron.core.transformer.config_fields.moe import BALANCING
from megatron.training.config.flag_values import whole_or_decimal
from megatron.training.config.list_expressions import layer_pattern, window


@dataclass(kw_only=True)
class GPTModelFlags:
    """Positions, vocabulary, output layer, activation.

    What the GPT model needs beside TransformerConfig, and the switches from which TransformerConfig is derived.
    """

    max_position_embeddings: int | None = flag(None, minimum=1, unit="tokens")
    """Longest sequence the model has positions for."""
    position_embedding_type: str = flag(
        "learned_absolute",
        choices=("learned_absolute", "rope", "yarn", "mrope", "relative", "none"),
        unsupported_choices=("mrope", "relative"),
    )
    """How tokens know their position: a learned table, rotary (Su et al., 2021), rotary for sequences longer than
    before (YaRN; Peng et al., 2023), or not at all."""
    rope_type: str | None = flag(None, choices=("rope", "yarn"))
    """Which rotary positions, where --position-embedding-type rope asks for some."""
    use_rotary_position_embeddings: bool = False
    """Earlier spelling of --position-embedding-type rope."""
    add_position_embedding: bool = flag(True, names=("--position-embedding",), off_names=("--no-position-embedding",))
    """Learned positions; switched off, the model has none, or rotary ones when those are asked for."""
    rotary_base: int = flag(10000, minimum=1, parse=whole_or_decimal)
    """Base of the rotary frequencies."""
    rotary_percent: float = flag(1.0, above=0, maximum=1)
    """Share of each head's channels that is rotated."""
    rotary_seq_len_interpolation_factor: int | None = flag(None, minimum=1)
    """Divide positions by this before rotating (Chen et al., 2023)."""
    use_rope_scaling: bool = False
    """Stretch slow rotary frequencies as Llama 3.1 does, for sequences longer than its first 8192 tokens."""
    rope_scaling_factor: float = flag(8.0, minimum=1)
    """By how much --use-rope-scaling stretches them."""
    no_rope_freq: int | list[int] | None = flag(None, parse=layer_pattern)
    """Layers without rotary positions: every n-th, or one entry per layer such as ([0]*3+[1])*2, 1 for none."""
    window_size: tuple[int, int] | None = flag(None, parse=window)
    """Sliding window: 127,0 lets a token see itself and the 127 tokens before it. A causal model sees nothing after
    it."""
    window_attn_skip_freq: int | list[int] | None = flag(None, parse=layer_pattern)
    """Layers that see everything in spite of --window-size: every n-th, or one entry per layer, 0 for such a layer."""
    num_experts: int | None = None
    """Experts of a layer, over all processes; a dense MLP when not given or 0."""
    moe_layer_freq: int | list[int] = flag(1, parse=layer_pattern)
    """Layers with experts: every n-th beginning with the first, or one entry per layer such as ([0]*3+[1]*24), 1 for
    experts."""
    moe_router_load_balancing_type: list[str] = flag(
        default_factory=lambda: ["aux_loss"],
        choices=BALANCING,
        planned_choices=("quantile_balancing",),
        coming="quantile balancing of experts",
    )
    """What keeps experts busy alike: a loss over each microbatch (Fedus et al., 2021), over each sequence, or over the
    microbatches of a step so far; an even assignment by Sinkhorn's algorithm; or nothing. Several losses may be
    named."""
    moe_aux_loss_coeff: list[float] = flag(default_factory=lambda: [0.0], minimum=0)
    """Weight of each loss that --moe-router-load-balancing-type names."""
    untie_embeddings_and_output_weights: bool = False
    """Separate weights for the token embedding and the output layer."""
    make_vocab_size_divisible_by: int = flag(128, minimum=1)
    """Pad the vocabulary to a multiple of this times the tensor-parallel size."""
    transformer_impl: str = flag(
        "local",
        choices=("local", "transformer_engine", "inference_optimized"),
        unsupported_choices=("inference_optimized",),
    )
    """Where layers come from. Both choices run on plain torch; a note says so when Transformer Engine was asked for."""
    spec: list[str] | None = flag(None, nargs="*", metavar="WORD")
    """A layer of your own: a Python module and the name of a function in it that returns a ModuleSpec, or of a
    ModuleSpec; `local` is the usual layer. See docs/models.md."""
    group_query_attention: bool = False
    """Share key-value heads between query heads; --num-query-groups says how many there are."""
    swiglu: bool = False
    """MLP with silu(gate) * up (Shazeer, 2020)."""
    openai_gelu: bool = False
    """MLP with the tanh form of GELU; with --geglu for the gate (Gemma)."""
    geglu: bool = False
    """MLP with gelu(gate) * up (Shazeer, 2020)."""
    squared_relu: bool = False
    """MLP with relu(x)^2 (So et al., 2021)."""
    quick_geglu: bool = False
    """MLP with quick_gelu(gate) * up, quick_gelu(x) = x * sigmoid(1.702 x)."""
    bias_gelu_fusion: bool = flag(True, off_names=("--no-bias-gelu-fusion",))
    """GELU with its bias as one differentiable operation that keeps only its inputs."""
    bias_swiglu_fusion: bool = flag(True, off_names=("--no-bias-swiglu-fusion",))
    """Gated activations as one differentiable operation that keeps only its inputs."""

    def __post_init__(self) -> None:
        if self.window_size is not None:  # a list where the settings come from a checkpoint
            self.window_size = (self.window_size[0], self.window_size[1])
