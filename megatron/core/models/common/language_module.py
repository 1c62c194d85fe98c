# SPDX-License-Identifier: Apache-2.0
"""End of every language model: an output layer, possibly tied to the embedding, and the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron.core.placement import get_placement, place
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.cross_entropy import fused_vocab_parallel_cross_entropy, vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.parameters import by_blocks_of_rows
from megatron.core.tensor_parallel.products import choose_product
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.execution.fp8_layers import multiply_in_fp8
from megatron.core.transformer.initialisers import embedding_initialiser, output_layer_initialiser
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"


class LanguageModule(MegatronModule):
    """The end of every language model: the output layer, [s, b, h] -> logits, and the loss of every token."""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        super().__init__(config)
        self.pg_collection = pg_collection if pg_collection is not None else ProcessGroupCollection.current()

    def build_output_layer(
        self, vocab_size: int, *, is_tied: bool, has_embedding: bool, parallel_output: bool
    ) -> ColumnParallelLinear:
        """Hidden states to logits.

        is_tied: the weight is the embedding's; on a stage that has no embedding it is a copy of it, which the engine
        keeps equal by summing both gradients. parallel_output: each rank keeps its slice of the vocabulary.
        """
        assert self.config.hidden_size is not None
        # A copy of the embedding must start from the embedding's numbers.
        initialiser = embedding_initialiser if is_tied else output_layer_initialiser
        layer = ColumnParallelLinear(
            self.config.hidden_size,
            vocab_size,
            config=self.config,
            init_method=by_blocks_of_rows(initialiser(self.config)),
            bias=self.config.add_output_layer_bias,
            gather_output=not parallel_output,
            # Where the embedding lies on the same stage, its weight is handed over in each call.
            skip_weight_param_allocation=is_tied and has_embedding,
            tp_group=self.pg_collection.tp,
        )
        # Only the result is wider: operands and gradients have the format of the parameters.
        if self.config.logit_dtype == "fp32":
            layer.product = choose_product(self.config, out_dtype=torch.float32)
        if self.config.fp8 is not None and self.config.fp8_output_proj:
            layer.fp8_products = multiply_in_fp8(layer, self.config, self.pg_collection, "output_layer")
        if layer.weight is not None:
            placement = dataclasses.replace(get_placement(layer.weight), kind="head")
            if is_tied:
                placement = dataclasses.replace(
                    placement, name=WORD_EMBEDDINGS, is_copy=True, partial_grad_axes=("embd",)
                )
            place(layer.weight, placement)
        if layer.bias is not None:
            place(layer.bias, dataclasses.replace(get_placement(layer.bias), kind="head_bias"))
        return layer

    @staticmethod
    def share_gradient(word_embeddings: nn.Parameter, *, is_copy: bool) -> None:
        """Mark an embedding of which several stages hold a copy: their gradients are to be summed. is_copy: this is
        not the first stage's."""
        placement = get_placement(word_embeddings)
        place(word_embeddings, dataclasses.replace(placement, is_copy=is_copy, partial_grad_axes=("embd",)))

    def compute_loss_of_states(
        self, labels: Tensor, hidden_states: Tensor, compute_logits: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Loss of every token, [b, s] float32, of labels [b, s] and hidden states [s, b, h], with sequence parallelism
        [s/tp, b, h]; in chunks of loss_chunk_size positions, if it is set.

        compute_logits: [s, b, h] -> [s, b, v / tp], all of the group's tokens.
        """
        size = self.config.loss_chunk_size
        if size is None:
            return self.compute_language_model_loss(labels, compute_logits(hidden_states))

        def compute(states: Tensor, targets: Tensor) -> Tensor:
            return self.compute_language_model_loss(targets.flatten(1), compute_logits(states)).view(targets.shape)

        # With sequence parallelism a chunk is the same stretch of every rank's tokens.
        ranks = self.pg_collection.tp.size() if self.config.sequence_parallel else 1
        chunks = zip(hidden_states.split(size), labels.unflatten(1, (ranks, -1)).split(size, dim=2), strict=True)
        losses = [checkpoint(compute, False, states, targets) for states, targets in chunks]  # [b, ranks, size] each
        return torch.cat(losses, dim=2).flatten(1)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Loss of every token, [b, s] float32. labels [b, s]; logits [s, b, v / tp], overwritten if float32, with
        cross_entropy_loss_fusion, or where the loss is a kernel."""
        is_fused = self.config.cross_entropy_loss_fusion
        compute = fused_vocab_parallel_cross_entropy if is_fused else vocab_parallel_cross_entropy
        loss = compute(logits, labels.t(), tp_group=self.pg_collection.tp)  # [s, b]
        return loss.t().contiguous()  # [s, b] -> [b, s]
