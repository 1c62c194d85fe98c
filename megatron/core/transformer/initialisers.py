# SPDX-License-Identifier: Apache-2.0
"""Initial distribution of each kind of weight.

| weights                              | standard deviation of the normal distribution       |
|--------------------------------------|-----------------------------------------------------|
| input projections of attention, MLP  | init_method_std                                     |
| output projections of attention, MLP | init_method_std / sqrt(2 x layers), hybrids: layers |
| router, gate of the shared expert    | init_method_std                                     |
| token and position embeddings        | embedding_init_method_std, else init_method_std     |
| output layer that is not tied        | init_method_std                                     |
| scores of attention sinks            | init_method_std                                     |

Each expert is initialised like an MLP. With muP (config_fields/mup.py) the first two are divided by the root of the
width multiplier, the third by the multiplier itself.
"""

from __future__ import annotations

import math

from megatron.core.tensor_parallel.parameters import Initialiser, normal, xavier_uniform
from megatron.core.transformer.transformer_config import TransformerConfig


def input_initialiser(config: TransformerConfig) -> Initialiser:
    """Input projections: config.init_method, or the distribution that the config describes."""
    if config.init_method_xavier_uniform:
        return config.init_method or xavier_uniform
    return sink_initialiser(config)


def sink_initialiser(config: TransformerConfig) -> Initialiser:
    """Scores of the attention sinks: as input projections, except for --init-method-xavier-uniform, which is defined by
    the inputs and outputs of a matrix; these are one number for each head."""
    # Divided by the root of the width multiplier, so that outputs of a wider model have the base model's variance.
    return config.init_method or normal(config.init_method_std / math.sqrt(config.width_multiplier))


def output_initialiser(config: TransformerConfig) -> Initialiser:
    """Output projections of attention and MLP: config.output_layer_init_method, or a normal distribution whose standard
    deviation is divided by sqrt(branches of all layers), so that the residual stream keeps its size (GPT-2, 2.3). A
    branch that a layer of a GPT does not have counts all the same, as in the reference system."""
    if config.init_method_xavier_uniform:
        return config.output_layer_init_method or xavier_uniform
    # Each branch adds an output to the residual stream; the variance of the sum equals one output's.
    branches = (1 if config.is_hybrid_model else 2) * config.num_layers
    narrowing = math.sqrt(float(branches) * config.width_multiplier)
    return config.output_layer_init_method or normal(config.init_method_std / narrowing)


def few_outputs_initialiser(config: TransformerConfig) -> Initialiser:
    """Router and gate of the shared expert: as input projections, except for muP, to which a matrix whose outputs stay
    as many when the model becomes wider is an output layer. Its initial outputs vanish in the limit of infinite width,
    so that backward through it does not outweigh the main path (Yang et al., 2022, table 3)."""
    if config.init_method_xavier_uniform:
        return input_initialiser(config)
    return config.init_method or normal(config.init_method_std / config.width_multiplier)


def embedding_initialiser(config: TransformerConfig) -> Initialiser:
    """Embeddings: config.embedding_init_method, or a normal distribution with a separate standard deviation."""
    if config.embedding_init_method_std is not None:
        return config.embedding_init_method or normal(config.embedding_init_method_std)
    return config.embedding_init_method or config.init_method or normal(config.init_method_std)


def output_layer_initialiser(config: TransformerConfig) -> Initialiser:
    """An output layer with a separate weight: config.init_method, or the normal distribution."""
    return config.init_method or normal(config.init_method_std)
