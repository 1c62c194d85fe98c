# SPDX-License-Identifier: Apache-2.0
"""Tokens, and learned positions, to hidden states."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.process_groups_config import Group, ProcessGroupCollection
from megatron.core.taken_arguments import take_arguments
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.tensor_parallel.parameters import declare_parameter, parameter_dtype
from megatron.core.tensor_parallel.products import choose_lookup, multiply
from megatron.core.tensor_parallel.random import model_parallel_stream
from megatron.core.transformer.initialisers import embedding_initialiser
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.norms import build_norm
from megatron.core.transformer.transformer_config import TransformerConfig


class PositionEmbedding(MegatronModule):
    """A learned vector for each position, the same on every rank."""

    def __init__(self, config: TransformerConfig, max_sequence_length: int) -> None:
        super().__init__(config)
        assert config.hidden_size is not None
        self.offset = config.learned_position_offset
        self.weight = declare_parameter(
            (max_sequence_length + self.offset, config.hidden_size),
            kind="positions",
            init=embedding_initialiser(config),
            dtype=parameter_dtype(config),
        )
        self.product = choose_lookup(config)

    def forward(self, position_ids: Tensor) -> Tensor:
        """Look up the vectors of positions [s, b] int64 -> [s, b, h]."""
        return multiply(self.product, position_ids + self.offset if self.offset else position_ids, self.weight)


class LanguageModelEmbedding(MegatronModule):
    """Token vector plus, with learned positions, position vector; times embedding_multiplier; normalised where
    add_embedding_norm says so; then dropout."""

    @take_arguments(
        "config vocab_size max_sequence_length position_embedding_type num_tokentypes=0 "
        "scatter_to_sequence_parallel=True tp_group pg_collection=...",
        "an embedding is of tokens, divided as the layers divide them",
    )
    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        max_sequence_length: int,
        position_embedding_type: str = "learned_absolute",
        tp_group: Group | None = None,
    ) -> None:
        super().__init__(config)
        assert config.hidden_size is not None
        tp_group = tp_group if tp_group is not None else ProcessGroupCollection.current().tp
        add_position_embedding = position_embedding_type == "learned_absolute"
        self.tp_group, self.add_position_embedding = tp_group, add_position_embedding
        self.max_sequence_length, self.scale = max_sequence_length, config.embedding_scale
        # Without positions to add first, the sum over ranks and the split of the sequence are one reduce-scatter.
        scatter_at_once = config.sequence_parallel and not add_position_embedding
        self.scatter_late = config.sequence_parallel and add_position_embedding
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size,
            config.hidden_size,
            init_method=embedding_initialiser(config),
            config=config,
            reduce_scatter_embeddings=scatter_at_once,
            tp_group=tp_group,
        )
        self.position_embeddings: nn.Module | None = (
            PositionEmbedding(config, max_sequence_length) if add_position_embedding else None
        )

        self.norm = build_norm(config, config.hidden_size) if config.add_embedding_norm else None

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Embed input_ids and position_ids, [b, s] int64 -> [s, b, h], with SP [s/tp, b, h]."""
        hidden_states = self.word_embeddings(input_ids.t())  # looked up as [s, b], so that nothing is transposed later
        if self.position_embeddings is not None:
            hidden_states = hidden_states + self.position_embeddings(position_ids.t())
        if self.scatter_late:
            hidden_states = scatter_to_sequence_parallel_region(hidden_states, self.tp_group)
            if self.config.clone_scatter_output_in_embedding:
                hidden_states = hidden_states.clone()  # a view would keep the whole sequence in memory
        if self.config.fp32_residual_connection:
            # After the split of the sequence: widening the whole of it first would cost tp times the memory.
            hidden_states = hidden_states.float()
        # After positions are added and before dropout, as Gemma and Granite scale.
        if self.scale != 1.0:
            hidden_states = hidden_states * self.scale
        if self.norm is not None:
            hidden_states = self.norm(hidden_states).to(hidden_states.dtype)
        dropout = self.config.hidden_dropout if self.training else 0.0
        if dropout == 0.0:
            return hidden_states
        # With sequence parallelism ranks hold different tokens, else the same ones.
        with model_parallel_stream(self.tp_group.size() if self.config.sequence_parallel else 1):
            return F.dropout(hidden_states, p=dropout)
