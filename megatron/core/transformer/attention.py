# SPDX-License-Identifier: Apache-2.0
"""Attention as a part of a layer: projections to queries, keys and values, positions, the core, one projection back.

    Attention         what every kind shares: key-value cache, the core and its recomputation, gate, output projection
    SelfAttention     one packed projection of the hidden states to queries, keys and values
    CrossAttention    queries of the hidden states; keys and values of another sequence
    MLASelfAttention  queries, keys and values of narrow latent vectors (multi_latent_attention.py)

A further kind of attention is a subclass that says how wide its values are and writes `get_query_key_value_tensors`.

The packed projection is group-interleaved, as upstream stores it: each query group's query heads, its key, its value.

    linear_qkv.weight rows:  | q0 q1 .. k v | q q .. k v | ...      g groups of (n / g + 2) heads of d channels

With an output gate a group's queries are followed by as many gates: | q0 q1 .. gate0 gate1 .. k v | ...

Tensor-parallel ranks share the groups; where they are more than the groups, several of them share a group's queries and
each holds its key and value (Placement.replicated_parts), whose gradients are summed over them before the update.

b: batch, s: sequence, t: keys, n: query heads, g: query groups (key-value heads), d: channels of a query or key head,
dv: of a value head; n and g per rank.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megatron.core.enums import AttnMaskType
from megatron.core.errors import ConfigError
from megatron.core.inference_context import InferenceContext
from megatron.core.operation_table import OperationWay
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.placement import Part, get_placement, make_grouped_parts, place
from megatron.core.plan.read import read_plan
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.taken_arguments import take_arguments
from megatron.core.tensor_parallel.layers import LayerOutput
from megatron.core.tensor_parallel.offloaded_activations import offload
from megatron.core.tensor_parallel.products import at_least_float32
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.compiled_regions import Compile, choose_form
from megatron.core.transformer.initialisers import input_initialiser, output_initialiser
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.norms import AllHeadsRMSNorm, HeadL2Norm
from megatron.core.transformer.rotary import (
    Rotation,
    rotate_by_kernel,
    rotate_queries_and_keys,
    split_qkv,
)
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


@dataclass
class CrossAttentionSubmodules:
    """The parts of cross-attention: specs or classes."""

    linear_q: Any
    linear_kv: Any
    core_attention: Any
    linear_proj: Any


def choose_rotary(config: TransformerConfig, device: torch.device | None = None) -> OperationWay:
    """Choose a way of splitting the packed projection and rotating; norms of queries and keys come in between."""
    has_more = config.qk_layernorm or config.qk_l2_norm or config.attention_output_gate
    # The norms of latent attention are before its projections to heads.
    has_more = has_more and not config.multi_latent_attention
    name = "latent rotary positions" if config.multi_latent_attention else "rotary positions"
    is_fused = config.apply_rope_fusion and not has_more
    return choose_form(config, name, is_fused=is_fused, region="rotary positions", device=device).way


class Attention(MegatronModule):
    """[s, b, h] -> [s, b, h] and the bias that is still to be added; what all kinds of attention share."""

    recomputable: ClassVar[Mapping[str, tuple[str, ...]]] = {"core_attn": ()}

    @take_arguments("* pp_layer_offset=0 name=...", "layer_number counts in the whole model")
    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        attention_type: str = "self",
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        value_width: int | None = None,
    ) -> None:
        """Upstream's signature. submodules: with core_attention and linear_proj. layer_number: counted from 1.
        attention_type: self or cross. cp_comm_type: the config's when None. value_width: channels of a value head, the
        config's when None.

        Calls `build_projections` before the core and the output projection are built: parameters lie in memory in the
        order in which modules are built.
        """
        super().__init__(config)
        self.groups = pg_collection if pg_collection is not None else ProcessGroupCollection.current()
        heads, query_groups = config.num_attention_heads, config.num_query_groups
        self.layer_number, self.attention_type = layer_number, attention_type
        self.head_width = config.query_width
        tp_size = self.groups.tp.size()
        problems = list(config.head_problems(tp_size))
        if problems:  # of real groups, whatever the config says
            raise ConfigError(problems)
        # On this rank: with fewer groups than ranks, a part of one group's queries, and its key and value whole.
        self.heads_per_group = heads // max(query_groups, tp_size)
        self.apply_gate = apply_gate
        # Before the core and the output projection, as the docstring promises.
        self.build_projections(submodules)
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type=attention_type,
            cp_comm_type=cp_comm_type,
            pg_collection=self.groups,
        )
        self.linear_proj = build_module(
            submodules.linear_proj,
            heads * (config.value_width if value_width is None else value_width),
            config.hidden_size,
            config=config,
            init_method=output_initialiser(config),
            bias=config.add_bias_linear or config.add_attention_output_bias,
            skip_bias_add=True,
            tp_group=self.groups.tp,
        )

    def compile_regions(self, compiled: Compile[Any]) -> None:
        """See compiled_regions.py."""
        self.apply_gate = compiled(self.apply_gate)

    @abstractmethod
    def build_projections(self, submodules: Any) -> None:
        """Build what `get_query_key_value_tensors` multiplies with; `groups`, `head_width` and `heads_per_group` are
        there already."""

    @abstractmethod
    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, ...]:
        """[s, b, h] -> query [s, b, n, d], key [t, b, g, d], value [t, b, g, dv], normalised as configured, and rotated
        where there is a rotation; with output_gate also the gate [s, b, n * dv], before its sigmoid.

        key_value_states: [t, b, h] of the other sequence, in cross-attention.
        """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotation: Rotation | None = None,
        inference_context: InferenceContext | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        key_value_states: Tensor | None = None,
    ) -> LayerOutput:
        """[s, b, h] -> ([s, b, h], bias [h] or None); attention_mask and packed_seq_params as in DotProductAttention,
        causal when None."""
        if inference_context is not None and attention_mask is None:
            attention_mask = inference_context.find_padding(self.layer_number)
        inputs = LayerInputs(attention_mask, rotation, inference_context, packed_seq_params)
        context = self._make_context(hidden_states, inputs, key_value_states)
        with self.offload("attn_proj"):
            output: LayerOutput = self.linear_proj(context)
        return output

    def _make_context(self, hidden_states: Tensor, inputs: LayerInputs, key_value_states: Tensor | None) -> Tensor:
        """[s, b, h] -> [s, b, n * dv], before the output projection."""
        rotation, cache = inputs.rotation, inputs.inference_context
        turns = rotation is not None and rotation.channels > 0
        query, key, value, *gate = self.get_query_key_value_tensors(
            hidden_states, key_value_states, self.config.attention_output_gate, rotation if turns else None
        )
        query = scale_queries(query, rotation)
        if cache is None:
            context = self._attend(query, key, value, inputs)
        else:
            # Each sequence separately with its keys: without padding or masks, and alike whatever is next to it. Keys
            # are kept rotated: their positions do not change any more.
            context = self._attend_to_held(query, cache.update(self.layer_number, key, value), cache, inputs)
        return self.apply_gate(context, gate[0]) if gate else context

    def _attend_to_held(
        self, query: Tensor, held: Sequence[tuple[slice, tuple[Tensor, ...]]], cache: InferenceContext,
        inputs: LayerInputs,
    ) -> Tensor:  # fmt: skip
        """The core in generation: query [s, b, n, d] or packed [t, 1, n, d], and what the cache holds for it, [t, b, g,
        d] and [t, b, g, dv] -> [s, b, n * dv] or [t, 1, n * dv]."""
        layout = cache.layout
        is_plain = layout.has_single_tokens and inputs.attention_mask is None and not self.training
        if is_plain and getattr(self.core_attention, "attends_last_tokens", False):
            pairs = [(key, value) for _, (key, value) in held]
            last: Tensor = self.core_attention.attend_last_tokens(query.flatten(0, 1), pairs)
            return last.unflatten(0, query.shape[:2])
        queries = layout.cut(query, [rows for rows, _ in held])
        return layout.join([self._attend(q, k, v, inputs) for q, (_, (k, v)) in zip(queries, held, strict=True)])

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, layer_inputs: LayerInputs, chosen: Tensor | None = None
    ) -> Tensor:
        """The core, of which selective recomputation keeps only the inputs: [s, b, n * dv]. chosen: see Visible."""
        # The module's mask type, no bias. Of upstream's arguments only, where they will do: a core may be a user's.
        mask, _, _, packed_seq_params = layer_inputs
        inputs = (query, key, value, mask, None, None, packed_seq_params, *(() if chosen is None else (chosen,)))
        # Scores and probabilities grow with s * t, their inputs with s + t: the core gives back the most memory.
        with offload("core_attn", only=(query, key, value)) if self.offload is offload else nullcontext():
            context: Tensor = (
                checkpoint(self.core_attention, False, *inputs)
                if "core_attn" in self.recomputed
                else self.core_attention(*inputs)
            )
        return context


def scale_queries(query: Tensor, rotation: Rotation | None) -> Tensor:
    """Queries [s, b, n, d] with the temperature of their positions, where there is one."""
    if rotation is None or rotation.query_scale is None:
        return query
    return (query * rotation.query_scale).to(query.dtype)


def apply_gate(context: Tensor, gate: Tensor) -> Tensor:
    """context * sigmoid(gate), both [s, b, n * dv]."""
    # In float32, as all softmaxes and norms are, and rounded once.
    return context * torch.sigmoid(at_least_float32(gate)).to(context.dtype)


class SelfAttention(Attention):
    """Attention of a sequence to itself: queries, keys and values come from one packed projection."""

    split: Callable[..., Any]
    is_rope_fused: bool

    @take_arguments("* pp_layer_offset=0 name=...", "layer_number counts in the whole model")
    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """See Attention."""
        if config.multi_latent_attention:
            raise ConfigError(
                "--multi-latent-attention needs a layer with MLASelfAttention, and the layer's spec has SelfAttention; "
                "make it by get_gpt_layer_local_spec(multi_latent_attention=True)"
            )
        super().__init__(config, submodules, layer_number, attn_mask_type, "self", cp_comm_type, pg_collection)
        self.rotate = rotate_by_kernel if config.apply_rope_fusion else rotate_queries_and_keys
        self.q_layernorm = self._build_head_norm(submodules.q_layernorm, config.num_attention_heads)
        self.k_layernorm = self._build_head_norm(submodules.k_layernorm, config.num_query_groups)

    def compile_regions(self, compiled: Compile[Any]) -> None:
        """See compiled_regions.py."""
        super().compile_regions(compiled)
        if not self.is_rope_fused:
            self.split, self.rotate = compiled(self.split), compiled(self.rotate)

    def build_projections(self, submodules: SelfAttentionSubmodules) -> None:
        """Build the packed projection to queries, keys and values."""
        config, tp_group = self.config, self.groups.tp
        heads, query_groups, width = config.num_attention_heads, config.num_query_groups, self.head_width
        # Fused: in the memory of the projection's output, which nothing else reads; a norm or a gate would.
        way = choose_rotary(config)
        self.is_rope_fused = way.is_fused
        self.split = way.load()
        self.gates = self.heads_per_group if config.attention_output_gate else 0
        # Widths are the full model's; make_grouped_parts knows what a rank holds of each.
        queries = Part(heads // query_groups * width, name="query")
        group_blocks = (
            queries,
            *([dataclasses.replace(queries, name="gate")] if self.gates else []),
            *_key_and_value(width),
        )
        self.linear_qkv = build_module(
            submodules.linear_qkv,
            config.hidden_size,
            ((2 if self.gates else 1) * heads + 2 * query_groups) * width,
            config=config,
            init_method=input_initialiser(config),
            # Qwen's models have a bias here and in no other linear layer.
            bias=config.add_bias_linear or config.add_qkv_bias,
            parts=make_grouped_parts(query_groups, group_blocks, tp_group.size()),
            tp_group=tp_group,
        )

    def _build_head_norm(self, norm: Any, heads: int) -> Any:
        """The norm of so many query or key heads of the whole model; None where there is none."""
        if self.config.qk_l2_norm:
            has_positions = read_plan(self.config).layer(self.layer_number).options.rotary != "none"
            return HeadL2Norm(self.config) if has_positions or self.config.qk_l2_norm_layers == "all" else None
        if not self.config.qk_layernorm or norm is None:
            return None
        if self.config.qk_norm_scope == "head":
            # Each rank normalises its heads.
            of_head = build_module(norm, self.config, self.head_width, partial_grad_axes=("tp",))
            mark_as_query_key_norm(of_head)
            return of_head
        tp_group = self.groups.tp
        assert heads % tp_group.size() == 0, f"{heads} heads cannot be normalised together on {tp_group.size()} ranks"
        return AllHeadsRMSNorm(self.config, heads, self.head_width, tp_group)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, ...]:
        """See Attention."""
        assert key_value_states is None, "self-attention has one sequence; use CrossAttention for two"
        with self.offload("qkv_linear"):
            projected = self.linear_qkv(hidden_states)[0]
        # [s, b, g, n/g + 2, d], and with an output gate n/g more
        packed = projected.unflatten(-1, (-1, self.heads_per_group + self.gates + 2, self.head_width))
        if self.q_layernorm is None and self.k_layernorm is None:
            query, key, value = self.split(packed, self.heads_per_group, rotation)
        else:
            query, key, value = split_qkv(packed, self.heads_per_group)
            rotates_first = self.config.qk_norm_after_rotation
            if rotation is not None and rotates_first:
                query, key = self.rotate(query, key, rotation)
            if self.q_layernorm is not None:
                query = self.q_layernorm(query)
            if self.k_layernorm is not None:
                key = self.k_layernorm(key)
            # After the norms: a rotation keeps lengths, so that scores depend only on distances.
            if rotation is not None and not rotates_first:
                query, key = self.rotate(query, key, rotation)
        if not output_gate:
            return query, key, value
        # The gate is neither normalised nor rotated: it scales outputs, and no position belongs to it.
        gate = packed[..., self.heads_per_group : 2 * self.heads_per_group, :].flatten(2)
        return query, key, value, gate


class CrossAttention(Attention):
    """Attention of a sequence to another one, of which it sees everything unless a mask hides it."""

    @take_arguments("* name=...")
    def __init__(
        self,
        config: TransformerConfig,
        submodules: CrossAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.no_mask,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """See Attention. Raises ConfigError for what only self-attention has."""
        # Refused instead of ignored: the weights of a model that asks for them would not mean what they say.
        for name in ("attention_output_gate", "qk_layernorm", "qk_l2_norm", "multi_latent_attention"):
            if getattr(config, name):
                raise ConfigError(f"cross-attention has no --{name.replace('_', '-')}; leave it out")
        super().__init__(config, submodules, layer_number, attn_mask_type, "cross", cp_comm_type, pg_collection)

    def build_projections(self, submodules: CrossAttentionSubmodules) -> None:
        """Build one projection to queries, and one to keys and values."""
        config, width = self.config, self.head_width
        options: dict[str, Any] = {
            "config": config,
            "init_method": input_initialiser(config),
            "bias": config.add_bias_linear,
            "tp_group": self.groups.tp,
        }
        self.linear_q = build_module(
            submodules.linear_q, config.hidden_size, config.num_attention_heads * width, **options
        )
        self.linear_kv = build_module(
            submodules.linear_kv,
            config.hidden_size,
            2 * config.num_query_groups * width,
            parts=make_grouped_parts(config.num_query_groups, _key_and_value(width), self.groups.tp.size()),
            **options,
        )

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, ...]:
        """See Attention; rows of linear_kv are | k v | k v | ..., each group's key and its value."""
        assert key_value_states is not None, "cross-attention needs key_value_states, the other sequence"
        assert rotation is None and not output_gate, "cross-attention has neither rotary positions nor a gate"
        # Queries come from the decoder's sequence; only keys and values are the other one's.
        with self.offload("qkv_linear"):
            query = self.linear_q(hidden_states)[0].unflatten(-1, (-1, self.head_width))
            packed = self.linear_kv(key_value_states)[0].unflatten(-1, (-1, 2, self.head_width))
        return query, packed[..., 0, :], packed[..., 1, :]


def mark_as_query_key_norm(norm: nn.Module) -> None:
    """Mark the parameters of a norm as another kind than the layers' norms, so that optimizers and checkpoints can tell
    them apart."""
    for param in norm.parameters():
        place(param, dataclasses.replace(get_placement(param, ""), kind="qk_norm"))


def _key_and_value(width: int) -> tuple[Part, Part]:
    """The key and value blocks of one query group in a packed weight; every rank that shares the group holds a copy."""
    return Part(width, replicated=True, name="key"), Part(width, replicated=True, name="value")
