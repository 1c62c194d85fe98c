"""One transformer layer with the norm before each half (pre-norm):

x = x + dropout(attention(norm(x)))
x = x + dropout(mlp(norm(x)))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.core.fusions.bias_dropout import bias_dropout_add, bias_dropout_add_reference
from megatron.core.fusions.rope import Rotation
from megatron.core.inference_context import InferenceContext
from megatron.core.packed_seq_params import Documents
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class TransformerLayerSubmodules:
    """The parts of a layer: specs or classes."""

    input_layernorm: Any
    self_attention: Any
    pre_mlp_layernorm: Any
    mlp: Any


def uses_fused_bias_dropout(config: TransformerConfig) -> bool:
    """Whether bias, dropout and residual work in place; a compiler fuses the plain form itself."""
    return config.bias_dropout_fusion and not config.compile


class TransformerLayer(MegatronModule):
    """[s, b, h] -> [s, b, h]."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """layer_number: this layer in the whole model, counted from 1."""
        super().__init__(config)
        groups = pg_collection if pg_collection is not None else ProcessGroupCollection.current()
        self.layer_number = layer_number
        self.input_layernorm = build_module(submodules.input_layernorm, config, config.hidden_size)
        self.self_attention = build_module(
            submodules.self_attention, config=config, layer_number=layer_number, pg_collection=groups
        )
        self.pre_mlp_layernorm = build_module(submodules.pre_mlp_layernorm, config, config.hidden_size)
        self.mlp = build_module(submodules.mlp, config=config, pg_collection=groups)
        self.bias_dropout_add = bias_dropout_add if uses_fused_bias_dropout(config) else bias_dropout_add_reference

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | Documents | None = None,
        rotation: Rotation | None = None,
        inference_context: InferenceContext | None = None,
    ) -> Tensor:
        """[s, b, h] -> [s, b, h]; attention_mask as in DotProductAttention, causal when None."""
        dropout, training = self.config.hidden_dropout, self.training
        output, bias = self.self_attention(
            self.input_layernorm(hidden_states), attention_mask, rotation, inference_context
        )
        hidden_states = self.bias_dropout_add(output, bias, hidden_states, dropout, training)
        output, bias = self.mlp(self.pre_mlp_layernorm(hidden_states))
        return self.bias_dropout_add(output, bias, hidden_states, dropout, training)
