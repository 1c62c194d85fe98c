"""The core of attention as a module: a backend, the sinks' scores where it has sinks, and the random stream for its
dropout."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from megatron.core.device import current_device
from megatron.core.packed_seq_params import Documents
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import tensor_parallel_split
from megatron.core.tensor_parallel.parameters import declare_parameter, parameter_dtype
from megatron.core.tensor_parallel.random import model_parallel_stream
from megatron.core.transformer.core_attention.base import AttentionBackend, SequenceAttention
from megatron.core.transformer.core_attention.documents import ByDocument
from megatron.core.transformer.core_attention.select_exchange import build_sequence_attention
from megatron.core.transformer.initialisers import input_initialiser
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class DotProductAttention(MegatronModule):
    """softmax(Q K^T / sqrt(d)) V over this rank's heads, and with context parallelism for this rank's tokens."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, pg_collection: ProcessGroupCollection | None = None
    ) -> None:
        super().__init__(config)
        groups = pg_collection if pg_collection is not None else ProcessGroupCollection.current()
        self.tp_size = groups.tp.size()
        heads = config.num_attention_heads
        assert heads is not None
        self.num_heads_per_rank = heads // self.tp_size
        self.softmax_offset: nn.Parameter | None = None  # scores of the sinks, [n]
        if config.softmax_type == "learnable":
            splits = tensor_parallel_split(0, groups.tp)
            self.softmax_offset = declare_parameter(
                (heads,), init=input_initialiser(config), dtype=parameter_dtype(config), splits=splits
            )
        # The device modules are being built on, which GPTModel sets; or ours, where they are built without memory.
        building_on = torch.get_default_device()
        device = current_device() if building_on.type == "meta" else building_on
        self.attention = build_sequence_attention(config, layer_number, groups, device)
        self.attention_of_sharers = {
            group.size(): build_sequence_attention(
                config, layer_number, dataclasses.replace(groups, cp=group, hcp=()), device
            )
            for group in groups.hybrid_cp
        }
        """Number of ranks that share a sequence, where each has its own number -> the implementation."""

    @property
    def backend(self) -> AttentionBackend | SequenceAttention:
        """The implementation."""
        return self.attention.backend if isinstance(self.attention, ByDocument) else self.attention

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | Documents | None = None
    ) -> Tensor:
        """query [s, b, n, d], key and value [t, b, g, d] -> [s, b, n * d]; attention_mask as in AttentionBackend, or
        the documents of a packed sequence (b = 1).

        With context parallelism s and t are this rank's tokens, and a mask has all keys: [b or 1, 1, s, s * cp].
        Documents may name other ranks that share their sequence, of a size in the collection's hybrid_cp.
        """
        # With sequence parallelism the whole block draws from the rank's own stream already.
        is_drawn_alike = self.tp_size > 1 and not self.config.sequence_parallel
        sinks = self._sinks(query)
        attention = self.attention
        if isinstance(attention_mask, Documents) and attention_mask.cp_group is not None:
            attention = self.attention_of_sharers[attention_mask.cp_group.size()]
        if not self.training or self.config.attention_dropout == 0.0 or not is_drawn_alike:
            return attention(query, key, value, attention_mask, self.training, sinks)
        with model_parallel_stream(self.tp_size):  # each rank's heads drop other elements
            return attention(query, key, value, attention_mask, self.training, sinks)

    def _sinks(self, query: Tensor) -> Tensor | None:
        """The score of each head's further key, float32 [n]; None without one."""
        if self.config.softmax_type == "off-by-one":
            return query.new_zeros(self.num_heads_per_rank, dtype=torch.float32)
        return None if self.softmax_offset is None else self.softmax_offset.float()

    def extra_repr(self) -> str:
        """The implementation, for print(model)."""
        return self.attention.name
