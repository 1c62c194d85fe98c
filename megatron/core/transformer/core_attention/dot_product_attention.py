# SPDX-License-Identifier: Apache-2.0
"""The core of attention as a module: upstream's signature outside, AttentionInputs inside."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron.core.compiling import outside_of_graphs
from megatron.core.device import current_device
from megatron.core.enums import AttnMaskType
from megatron.core.errors import ConfigError
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import tensor_parallel_split
from megatron.core.tensor_parallel.parameters import declare_parameter, parameter_dtype
from megatron.core.tensor_parallel.products import at_least_float32, wide_dtype
from megatron.core.tensor_parallel.random import model_parallel_stream
from megatron.core.transformer.core_attention.interface import (
    AttentionInputs,
    AttentionOptions,
    CoreAttention,
    Visible,
)
from megatron.core.transformer.core_attention.query_blocks import CPUAttention
from megatron.core.transformer.core_attention.select import build_core_attention
from megatron.core.transformer.initialisers import sink_initialiser
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class DotProductAttention(MegatronModule):
    """softmax(scale * Q K^T) V over this rank's heads, and with context parallelism for this rank's tokens.

    It holds what the implementation does not: the sinks' scores, and the random stream of its dropout.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """Upstream's signature; attention_dropout, softmax_scale and cp_comm_type are the config's when None.

        layer_number: counted from 1. attn_mask_type: what is visible where forward is not told (`Visible.build`).
        attention_type: self or cross; cross-attention has neither window nor chunks.
        """
        super().__init__(config)
        groups = pg_collection if pg_collection is not None else ProcessGroupCollection.current()
        self.tp_size, self.cp_group = groups.tp.size(), groups.cp
        self.num_heads_per_rank = config.num_attention_heads // self.tp_size
        self.attn_mask_type = attn_mask_type
        options = AttentionOptions.from_config(config, layer_number)
        self.options = dataclasses.replace(
            options,
            scale=options.scale if softmax_scale is None else softmax_scale,
            dropout=options.dropout if attention_dropout is None else attention_dropout,
            # Positions in two sequences are not comparable.
            window=options.window if attention_type == "self" else None,
            chunk=options.chunk if attention_type == "self" else None,
        )
        # Upstream's name, under which checkpoints hold the sinks.
        self.softmax_offset: nn.Parameter | None = None  # scores of the sinks, [n]
        if config.softmax_type == "learnable":
            splits = tensor_parallel_split(0, groups.tp)
            self.softmax_offset = declare_parameter(
                (config.num_attention_heads,),
                init=sink_initialiser(config),
                dtype=parameter_dtype(config),
                splits=splits,
            )
        # The device modules are being built on, which GPTModel sets; or ours, where they are built without memory.
        building_on = torch.get_default_device()
        device = current_device() if building_on.type == "meta" else building_on

        def build(groups: ProcessGroupCollection) -> CoreAttention:
            return build_core_attention(config, self.options, groups, device, cp_comm_type)

        self.backend = build(groups)
        """The implementation, with an exchange around it where ranks share sequences."""
        # One for each size, chosen in each call: consecutive samples may be shared by different numbers of ranks.
        self.backend_by_cp_size = {
            group.size(): build(dataclasses.replace(groups, cp=group, hcp=())) for group in groups.hybrid_cp
        }
        """Implementation by the number of ranks that share a sequence, where it differs from sequence to sequence."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """query [s, b, n, d], key [t, b, g, d], value [t, b, g, dv] -> [s, b, n * dv]. Upstream's signature, with
        `Visible.chosen` after it.

        attention_mask: bool [b or 1, 1, s, t], True where a position may not be seen; causal when None, the queries
        being the last of the positions. attn_mask_type: this module's when None. packed_seq_params: documents of a
        packed sequence (b = 1) in place of a mask, and the ranks that share it, of a size in the collection's
        hybrid_cp. With context parallelism s and t are this rank's tokens, and a mask has all keys: [b or 1, 1, s,
        s * cp]. Raises ConfigError for an attention_bias.
        """
        if attention_bias is not None:
            raise ConfigError("attention_bias is not supported: no backend adds to scores; use attention_mask")
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        visible = Visible.build(attention_mask, mask_type, self.options.window, self.options.chunk)
        visible = visible if chosen is None else dataclasses.replace(visible, chosen=chosen)
        inputs = AttentionInputs(query, key, value, visible, self._sinks(query), self.training)
        # Documents decide what is visible, whatever mask type the layer was built with.
        if packed_seq_params is not None:
            return self._attend_within_documents(inputs, packed_seq_params)
        return self._attend(self.backend, inputs)

    @property
    def attends_last_tokens(self) -> bool:
        """Return True where `attend_last_tokens` is the short way of what `forward` computes of single tokens."""
        is_own = type(self).forward is DotProductAttention.forward  # a program's subclass may have another one
        return is_own and isinstance(self.backend, CPUAttention)

    def attend_last_tokens(self, query: Tensor, held: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """See CPUAttention."""
        assert isinstance(self.backend, CPUAttention)
        return self.backend.attend_last_tokens(query, held)

    @outside_of_graphs  # a graph would be made for these bounds, and again for every other batch's
    def _attend_within_documents(self, inputs: AttentionInputs, packed_seq_params: PackedSeqParams) -> Tensor:
        assert inputs.visible.mask is None, "packed_seq_params say what may be seen; leave out attention_mask"
        group = packed_seq_params.cp_group
        backend = self.backend if group is None else self.backend_by_cp_size[group.size()]
        ranks = (self.cp_group if group is None else group).size()
        # Bounds of documents count tokens of the whole sequence; a rank's keys are only its share.
        documents = packed_seq_params.layout(inputs.key.shape[0] * ranks)
        visible = dataclasses.replace(inputs.visible, causal=True, documents=documents)
        return self._attend(backend, dataclasses.replace(inputs, visible=visible))

    def _attend(self, backend: CoreAttention, inputs: AttentionInputs) -> Tensor:
        """By the backend, on the random stream of its dropout."""
        # With sequence parallelism the whole block draws from the rank's stream already.
        is_drawn_alike = self.tp_size > 1 and not self.config.sequence_parallel
        if not self.training or self.options.dropout == 0.0 or not is_drawn_alike:
            return backend(inputs)
        with model_parallel_stream(self.tp_size):  # each rank's heads drop other elements
            return backend(inputs)

    def _sinks(self, query: Tensor) -> Tensor | None:
        """The score of each head's further key, float32 [n]; None without one."""
        if self.config.softmax_type == "off-by-one":
            # exp(0) = 1: the softmax's sum grows by one, which is what "off by one" means.
            return query.new_zeros(self.num_heads_per_rank, dtype=wide_dtype(query))
        return None if self.softmax_offset is None else at_least_float32(self.softmax_offset)

    def extra_repr(self) -> str:
        """Return the name of the implementation, for print(model)."""
        return self.backend.name
