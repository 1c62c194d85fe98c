# SPDX-License-Identifier: Apache-2.0
"""HybridModel: GPTModel with layers of one branch each, which a pattern of letters names."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal

from megatron.core.errors import ConfigError
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_layer_allocation import (
    PatternError,
    get_hybrid_total_layer_count,
    pattern_from_ratios,
)
from megatron.core.models.hybrid.hybrid_layer_specs import get_hybrid_mtp_block_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig


class HybridModel(GPTModel):
    """Embedding, a HybridStack, multi-token prediction if the pattern has it, output layer, loss."""

    # Built from the stack's spec, which is what a hybrid has in place of a layer's.
    block_type: ClassVar[Callable[..., TransformerBlock]] = staticmethod(
        lambda config, spec, **named: build_module(spec, config=config, **named)
    )

    def __init__(
        self,
        config: TransformerConfig,
        hybrid_stack_spec: ModuleSpec,
        vocab_size: int,
        max_sequence_length: int,
        hybrid_layer_pattern: str | None = None,
        hybrid_attention_ratio: float | None = None,
        hybrid_mlp_ratio: float | None = None,
        hybrid_override_pattern: str | None = None,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        logit_dtype: Any = None,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: Literal["learned_absolute", "rope", "yarn", "none"] = "none",
        rotary_percent: float = 1.0,
        rotary_base: float = 10000,
        scatter_embedding_sequence_parallel: bool = True,
        seq_len_interpolation_factor: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        **named: Any,
    ) -> None:
        """Upstream's signature; further arguments are GPTModel's.

        hybrid_layer_pattern: the config's when None. hybrid_override_pattern, hybrid_attention_ratio,
        hybrid_mlp_ratio: earlier ways to give it, the ratios as shares of config.num_layers. logit_dtype,
        scatter_embedding_sequence_parallel: the config's to say. Raises ConfigError, for patterns PatternError.
        """
        pattern = _choose_pattern(
            config, hybrid_layer_pattern or hybrid_override_pattern, hybrid_attention_ratio, hybrid_mlp_ratio
        )
        if not scatter_embedding_sequence_parallel:
            raise ConfigError("the embedding is divided where sequence_parallel is on; leave its switch True")
        if pattern != config.hybrid_layer_pattern:
            depths = None if "/" in pattern else config.mtp_num_layers
            layers = get_hybrid_total_layer_count(pattern)
            config = replace(config, hybrid_layer_pattern=pattern, num_layers=layers, mtp_num_layers=depths)
        super().__init__(
            config,
            hybrid_stack_spec,
            vocab_size,
            max_sequence_length,
            pre_process,
            post_process,
            fp16_lm_cross_entropy,
            parallel_output=parallel_output,
            share_embeddings_and_output_weights=share_embeddings_and_output_weights,
            position_embedding_type=position_embedding_type,
            rotary_percent=rotary_percent,
            rotary_base=rotary_base,
            seq_len_interpolation_factor=seq_len_interpolation_factor,
            mtp_block_spec=get_hybrid_mtp_block_spec(config, hybrid_stack_spec),
            pg_collection=pg_collection,
            vp_stage=vp_stage,
            **named,
        )


def _choose_pattern(
    config: TransformerConfig, pattern: str | None, attention_ratio: float | None, mlp_ratio: float | None
) -> str:
    pattern = config.hybrid_layer_pattern if pattern is None else pattern
    ratios = attention_ratio or mlp_ratio
    if pattern is None and config.num_layers is not None and (attention_ratio, mlp_ratio) != (None, None):
        warnings.warn("ratios are an earlier way to write hybrid_layer_pattern", DeprecationWarning, stacklevel=4)
        return pattern_from_ratios(config.num_layers, attention_ratio or 0.0, mlp_ratio or 0.0)
    if pattern is None:
        raise PatternError("HybridModel needs the letters of its layers; give hybrid_layer_pattern, such as M-M*-")
    if ratios:
        raise PatternError(f"the ratios contradict the pattern {pattern}, which says all; leave them out")
    return pattern


class MambaModel(HybridModel):
    """Its name in earlier releases."""

    def __init__(self, *args: Any, mamba_stack_spec: ModuleSpec | None = None, **named: Any) -> None:
        """mamba_stack_spec: hybrid_stack_spec."""
        if mamba_stack_spec is not None:
            named["hybrid_stack_spec"] = mamba_stack_spec
        super().__init__(*args, **named)
