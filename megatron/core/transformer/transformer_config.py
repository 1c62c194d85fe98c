"""TransformerConfig: everything the layers of a transformer need to know, flat for users, grouped by concern inside."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config_base import divisors_near, flag
from megatron.core.errors import ConfigError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.transformer.config_fields.architecture import ArchitectureFields
from megatron.core.transformer.config_fields.attention import AttentionFields
from megatron.core.transformer.config_fields.initialization import InitializationFields
from megatron.core.transformer.config_fields.moe import MoEFields
from megatron.core.transformer.config_fields.mup import MuPFields
from megatron.core.transformer.config_fields.pipeline import PipelineFields
from megatron.core.transformer.config_fields.positions import PositionFields
from megatron.core.transformer.config_fields.recompute import RecomputeFields
from megatron.core.transformer.layer_patterns import pattern_problems


@dataclass(kw_only=True)
class TransformerConfig(
    ArchitectureFields,
    AttentionFields,
    PositionFields,
    InitializationFields,
    MuPFields,
    MoEFields,
    PipelineFields,
    RecomputeFields,
    ModelParallelConfig,
):
    """Shape, number formats and kernels of a transformer.

    Fields left None that have a derived value (ffn_hidden_size, kv_channels, num_query_groups) are filled in on
    construction. Raises ConfigError with every problem when the fields contradict each other.
    """

    compile: bool = flag(False, names=("--compile", "--use-transformer-engine-op-fuser"))
    """Compile each transformer layer with torch.compile, which fuses its operations: slower start, faster steps. The
    second name is upstream's for the fused operations of Transformer Engine."""

    @property
    def embedding_scale(self) -> float:
        """Factor on the output of the embedding."""
        return self.embedding_multiplier * (self.mup_embedding_mult if self.use_mup else 1.0)

    @property
    def attention_scale(self) -> float:
        """Factor on attention scores: softmax_scale, muP's, or 1 / sqrt(width of a head)."""
        assert self.kv_channels is not None
        if self.softmax_scale is not None:
            return self.softmax_scale
        return self.mup_attention_scale(self.kv_channels) if self.use_mup else self.kv_channels**-0.5

    @property
    def logit_scale(self) -> float:
        """Factor on the logits."""
        return self.logit_multiplier * (self.mup_output_mult / self.width_multiplier if self.use_mup else 1.0)

    def __post_init__(self) -> None:
        problems = self._missing()
        if not problems:
            self._derive()
            problems = self._contradictions()
        if problems:
            raise ConfigError(problems)

    def _missing(self) -> list[str]:
        needed = ("num_layers", "hidden_size", "num_attention_heads")
        return [
            f"--{name.replace('_', '-')} is missing; give the number, for example --{name.replace('_', '-')} {example}"
            for name, example in zip(needed, (12, 768, 12), strict=True)
            if getattr(self, name) is None
        ]

    def _derive(self) -> None:
        if self.ffn_hidden_size is None:
            width = self.hidden_size
            # SwiGLU: two thirds, so that three matrices hold what two did; a multiple of 64 for the hardware.
            is_swiglu = self.gated_linear_unit and self.activation_func == "silu"
            self.ffn_hidden_size = int(4 * width * 2 / 3 / 64) * 64 if is_swiglu else 4 * width
        self.derive_experts(self.ffn_hidden_size)
        if self.window_size is not None:
            self.window_size = (self.window_size[0], self.window_size[1])
        if self.num_query_groups in (None, 0):
            self.num_query_groups = self.num_attention_heads
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads == 0:
            self.kv_channels = self.hidden_size // self.num_attention_heads

    def _contradictions(self) -> list[str]:
        problems = []
        heads, groups, width = self.num_attention_heads, self.num_query_groups, self.hidden_size
        if self.kv_channels is None:
            problems.append(
                f"--hidden-size {width} is not divisible by --num-attention-heads {heads}; "
                f"use a multiple of {heads}, or give --kv-channels"
            )
        if heads % groups:
            problems.append(
                f"--num-query-groups {groups} does not divide --num-attention-heads {heads}; "
                f"use {divisors_near(heads, groups)}"
            )
        if self.ffn_hidden_size < 1:
            problems.append(f"--hidden-size {width} is too small for a default MLP width; give --ffn-hidden-size")
        if self.fp16 and self.bf16:
            problems.append("--fp16 and --bf16 contradict each other; keep one")
        if self.apply_residual_connection_post_layernorm and self.norm_placement == "output":
            problems.append(
                "--apply-residual-connection-post-layernorm needs a norm before attention and MLP; "
                "use --norm-placement input or both"
            )
        if self.apply_residual_connection_post_layernorm and self.parallel_residual:
            problems.append(
                "--apply-residual-connection-post-layernorm and --parallel-residual contradict each other; keep one"
            )
        if self.qk_norm_scope == "all" and self.normalization != "RMSNorm":
            problems.append(f"--qk-norm-scope all is an RMSNorm, not {self.normalization}; add --normalization RMSNorm")
        return [*problems, *pattern_problems(self), *self.expert_problems()]
