# SPDX-License-Identifier: Apache-2.0
"""GPT options around the transformer: positions, vocabulary, output layer, and switches that imply layer settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config_base import CheckedConfig, flag
from megatron.core.flag_texts import whole_or_decimal
from megatron.core.setting import Needs
from megatron.core.transformer.config_fields.positions import ROTARY

# `run` is every setting of the run by name, whatever group declares it.
ACTIVATION_SWITCHES = ("swiglu", "geglu", "quick_geglu", "squared_relu", "relu", "openai_gelu")
"""Fields that choose the MLP's activation."""


@dataclass(kw_only=True)
class GPTModelFlags(CheckedConfig):
    """Positions, vocabulary, output layer, activation.

    What the GPT model needs in addition to TransformerConfig, and the switches of the command line that stand for
    values of TransformerConfig; only the command line reads those.
    """

    usual_kind = "shape"

    max_position_embeddings: int | None = flag(None, minimum=1, unit="tokens")
    """Longest sequence the model has positions for."""
    # Switches from here on stand for values of TransformerConfig; flags/derive.py puts those in.
    use_rotary_position_embeddings: bool = flag(False, kind="shorthand")
    """Earlier spelling of --position-embedding-type rope."""
    add_position_embedding: bool = flag(
        True, names=("--position-embedding",), off_names=("--no-position-embedding",), kind="shorthand"
    )
    """Learned positions; switched off, the model has none, or rotary ones when those are asked for."""
    rotary_base: int = flag(10000, minimum=1, parse=whole_or_decimal, kind="function", needs=ROTARY)
    """Base of the rotary frequencies."""
    rotary_percent: float = flag(1.0, above=0, maximum=1, kind="function", needs=ROTARY)
    """Share of each head's channels that is rotated."""
    rotary_seq_len_interpolation_factor: int | None = flag(None, minimum=1, kind="function", needs=ROTARY)
    """Divide positions by this before rotating (Chen et al., 2023)."""
    use_rope_scaling: bool = flag(
        False,
        kind="function",
        needs=Needs(
            "--position-embedding-type rope", lambda run: ROTARY.met(run) and run.position_embedding_type != "yarn"
        ),
    )
    """Stretch slow rotary frequencies as Llama 3.1 does, for sequences longer than its first 8192 tokens."""
    rope_scaling_factor: float = flag(
        8.0, minimum=1, kind="function", needs=Needs("--use-rope-scaling", lambda run: run.use_rope_scaling)
    )
    """By how much --use-rope-scaling stretches them."""
    untie_embeddings_and_output_weights: bool = False
    """Separate weights for the token embedding and the output layer."""
    make_vocab_size_divisible_by: int = flag(128, minimum=1)
    """Pad the vocabulary to a multiple of this times the tensor-parallel size."""
    transformer_impl: str = flag(
        "local",
        choices=("local", "transformer_engine", "auto", "inference_optimized"),
        unsupported_choices=("inference_optimized",),
        kind="kernel",
    )
    """Library that layers compute with. transformer_engine: NVIDIA's Transformer Engine on a GPU, plain torch on a CPU.
    auto: Transformer Engine where it can be imported, else plain torch; the log says which. local: plain torch."""
    spec: list[str] | None = flag(None, nargs="*", metavar="WORD", kind="function")
    """A custom layer: a Python module and the name of a function in it that returns a ModuleSpec, or of a ModuleSpec;
    `local` is the usual layer. See docs/models.md."""
    group_query_attention: bool = flag(False, kind="shorthand")
    """Share key-value heads between query heads; --num-query-groups says how many there are."""
    swiglu: bool = flag(False, kind="shorthand")
    """MLP with silu(gate) * up (Shazeer, 2020)."""
    openai_gelu: bool = flag(False, kind="shorthand")
    """MLP with the tanh form of GELU; with --geglu for the gate (Gemma)."""
    geglu: bool = flag(False, kind="shorthand")
    """MLP with gelu(gate) * up (Shazeer, 2020)."""
    squared_relu: bool = flag(False, kind="shorthand")
    """MLP with relu(x)^2 (So et al., 2021)."""
    relu: bool = flag(False, kind="shorthand")
    """MLP with relu(x) (OPT)."""
    quick_geglu: bool = flag(False, kind="shorthand")
    """MLP with quick_gelu(gate) * up, quick_gelu(x) = x * sigmoid(1.702 x)."""
    bias_gelu_fusion: bool = flag(True, off_names=("--no-bias-gelu-fusion",), kind="kernel")
    """GELU with its bias as one differentiable operation that keeps only its inputs."""
    bias_swiglu_fusion: bool = flag(True, off_names=("--no-bias-swiglu-fusion",), kind="kernel")
    """Gated activations as one differentiable operation that keeps only its inputs."""

    def rules(self) -> Iterator[str]:
        """Check that there is one activation, and that a custom layer is named completely."""
        # --openai-gelu may be combined with --geglu, where it means the gate's form.
        exclusive = ["swiglu", "quick_geglu", "squared_relu", "relu"] + ["geglu" if self.geglu else "openai_gelu"]
        chosen = [self.say(name) for name in exclusive if getattr(self, name)]
        if len(chosen) > 1:
            yield f"{' and '.join(chosen)} contradict each other; keep one activation"
        if self.spec is not None and self.spec != ["local"]:
            names = [part for word in self.spec[:1] for part in word.split(".")] + self.spec[1:]
            if len(self.spec) != 2 or not all(map(str.isidentifier, names)):
                yield (
                    f"{self.say('spec').strip()} is not a module and the name of a function in it, such as my_layers "
                    "layer_spec; write a module as in an import, without a path"
                )
