"""Which distribution each kind of weight starts from."""

from __future__ import annotations

import math

from megatron.core.tensor_parallel.parameters import Initialiser, normal
from megatron.core.transformer.transformer_config import TransformerConfig


def input_initialiser(config: TransformerConfig) -> Initialiser:
    """Input projections, embeddings and the output layer: config.init_method, or normal(0, init_method_std)."""
    return config.init_method or normal(config.init_method_std)


def output_initialiser(config: TransformerConfig) -> Initialiser:
    """Output projections of attention and MLP: config.output_layer_init_method, or a normal distribution whose standard
    deviation is divided by sqrt(2 x layers), so that the residual stream keeps its size (GPT-2, section 2.3)."""
    assert config.num_layers is not None
    return config.output_layer_init_method or normal(config.init_method_std / math.sqrt(2.0 * config.num_layers))
