"""Self-attention: one projection to queries, keys and values, positions, the core, one projection back.

The packed projection is group-interleaved, as upstream stores it: each query group's query heads, its key, its value.

    linear_qkv.weight rows:  | q0 q1 .. k v | q q .. k v | ...      g groups of (n / g + 2) heads of d channels

With an output gate a group's queries are followed by as many gates: | q0 q1 .. gate0 gate1 .. k v | ...

Tensor-parallel ranks share the groups; where they are more than the groups, several of them share a group's queries and
each holds its key and value (Placement.replicated_parts), whose gradients are summed over them before the update.

b: batch, s: sequence, n: query heads, g: query groups (key-value heads), d: channels of a head; n and g per rank.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.errors import ConfigError
from megatron.core.fusions.rope import Rotation, apply_rotary, split_and_rotate, split_qkv
from megatron.core.inference_context import InferenceContext
from megatron.core.packed_seq_params import Documents
from megatron.core.placement import Part, grouped_parts
from megatron.core.process_groups_config import Group, ProcessGroupCollection
from megatron.core.tensor_parallel.layers import LayerOutput
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.initialisers import input_initialiser, output_initialiser
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.norms import AllHeadsRMSNorm, HeadL2Norm
from megatron.core.transformer.recompute import recomputes
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class SelfAttentionSubmodules:
    """The parts of self-attention: specs or classes. The norms of queries and keys may be None."""

    linear_qkv: Any
    core_attention: Any
    linear_proj: Any
    q_layernorm: Any = None
    k_layernorm: Any = None


def uses_fused_rope(config: TransformerConfig) -> bool:
    """Whether split and rotation run as one operation; norms of queries and keys come in between, and a compiler fuses
    the elementary ones itself."""
    has_more = config.qk_layernorm or config.qk_l2_norm or config.attention_output_gate
    return config.apply_rope_fusion and not has_more and not config.compile


class SelfAttention(MegatronModule):
    """[s, b, h] -> [s, b, h] and the bias that is still to be added."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        groups = pg_collection if pg_collection is not None else ProcessGroupCollection.current()
        heads, query_groups, width = config.num_attention_heads, config.num_query_groups, config.kv_channels
        assert config.hidden_size is not None and heads is not None and query_groups is not None and width is not None
        self.layer_number = layer_number
        _check_tensor_parallel_size(heads, query_groups, groups.tp.size())
        # On this rank: with fewer groups than ranks, a part of one group's queries, and its key and value whole.
        self.heads_per_group = heads // max(query_groups, groups.tp.size())
        self.head_width = width
        self.is_rope_fused = uses_fused_rope(config)
        self.recomputes_core = recomputes(config, "core_attn")
        queries = Part(heads // query_groups * width, name="query")
        self.gates = self.heads_per_group if config.attention_output_gate else 0
        group_blocks = (
            queries,
            *([dataclasses.replace(queries, name="gate")] if self.gates else []),
            Part(width, replicated=True, name="key"),
            Part(width, replicated=True, name="value"),
        )
        self.linear_qkv = build_module(
            submodules.linear_qkv,
            config.hidden_size,
            ((2 if self.gates else 1) * heads + 2 * query_groups) * width,
            config=config,
            init_method=input_initialiser(config),
            bias=config.add_bias_linear or config.add_qkv_bias,
            parts=grouped_parts(query_groups, group_blocks, groups.tp.size()),
            tp_group=groups.tp,
        )
        self.core_attention = build_module(
            submodules.core_attention, config=config, layer_number=layer_number, pg_collection=groups
        )
        self.linear_proj = build_module(
            submodules.linear_proj,
            heads * width,
            config.hidden_size,
            config=config,
            init_method=output_initialiser(config),
            bias=config.add_bias_linear,
            skip_bias_add=True,
            tp_group=groups.tp,
        )
        self.q_layernorm = self._norm_of_heads(submodules.q_layernorm, heads, groups.tp)
        self.k_layernorm = self._norm_of_heads(submodules.k_layernorm, query_groups, groups.tp)

    def _norm_of_heads(self, norm: Any, heads: int, tp_group: Group) -> Any:
        """The norm of so many query or key heads of the whole model; None where there is none."""
        if self.config.qk_l2_norm:
            return HeadL2Norm(self.config)
        if not self.config.qk_layernorm or norm is None:
            return None
        if self.config.qk_norm_scope == "head":
            # Each rank normalises its own heads.
            return build_module(norm, self.config, self.head_width, partial_grad_axes=("tp",))
        assert heads % tp_group.size() == 0, f"{heads} heads cannot be normalised together on {tp_group.size()} ranks"
        return AllHeadsRMSNorm(self.config, heads, self.head_width, tp_group)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | Documents | None = None,
        rotation: Rotation | None = None,
        inference_context: InferenceContext | None = None,
    ) -> LayerOutput:
        """[s, b, h] -> ([s, b, h], bias [h] or None); attention_mask as in DotProductAttention, causal when
        None."""
        packed = self._packed(hidden_states)
        query, key, value = self._split_and_rotate(packed, rotation)
        if inference_context is not None:
            key, value = inference_context.update(self.layer_number, key, value)  # [t, b, g, d]
        context = self._core(query, key, value, attention_mask)  # [s, b, n * d]
        if self.gates:
            gate = packed[..., self.heads_per_group : 2 * self.heads_per_group, :].flatten(2)  # [s, b, n * d]
            context = context * torch.sigmoid(gate.float()).to(context.dtype)
        output: LayerOutput = self.linear_proj(context)
        return output

    def _core(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | Documents | None) -> Tensor:
        inputs = (query, key, value, attention_mask)
        context: Tensor = (
            checkpoint(self.core_attention, False, *inputs) if self.recomputes_core else self.core_attention(*inputs)
        )
        return context

    def query_key_value(self, hidden_states: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """[s, b, h] -> query [s, b, n, d], key and value [s, b, g, d], normalised and rotated as configured."""
        return self._split_and_rotate(self._packed(hidden_states), rotation)

    def _packed(self, hidden_states: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, g, n/g + 2, d], and with an output gate n/g more."""
        packed: Tensor = self.linear_qkv(hidden_states)[0]
        return packed.unflatten(-1, (-1, self.heads_per_group + self.gates + 2, self.head_width))

    def _split_and_rotate(self, packed: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        if self.is_rope_fused:
            return split_and_rotate(packed, self.heads_per_group, rotation)
        query, key, value = split_qkv(packed, self.heads_per_group)
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        if rotation is not None:
            query, key = apply_rotary(query, rotation), apply_rotary(key, rotation)
        return query, key, value


def _check_tensor_parallel_size(heads: int, query_groups: int, tp_size: int) -> None:
    if heads % tp_size:
        raise ConfigError(
            f"--num-attention-heads {heads} cannot be split over --tensor-model-parallel-size {tp_size}; "
            f"use a multiple of {tp_size} heads"
        )
    if query_groups % tp_size and tp_size % query_groups:
        raise ConfigError(
            f"--num-query-groups {query_groups} cannot be shared by --tensor-model-parallel-size {tp_size}; "
            "use a multiple or a divisor of it"
        )
