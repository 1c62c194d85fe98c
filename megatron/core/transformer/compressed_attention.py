# SPDX-License-Identifier: Apache-2.0
"""Attention to the tokens of a sliding window and to compressed entries of earlier ones (DeepSeek-V4, 2026).

    latent of queries    cq = norm(Wqa x)                                     [s, b, rq]
    a head's query       q  = R(Wqb cq / root mean square)                    [s, b, n, d]
    one key, and value   k  = R(norm(Wkv x))                                  [s, b, d]
    entries              e  = R(compressed windows of tokens), compressor.py  [w, b, d]
    context              R'(softmax of q over the window's k, the entries, and a sink, times these)
    output               heads in groups, y = Wo1 context of each;  Wo2 y

R rotates the last channels by the position, R' the context by the opposite angle, so that what a key adds depends only
on its distance. Which entries a query sees is a matter of the layer's kind, of three (plan/kinds.py):

    sliding         none
    sparse          the best entries of complete windows, by an indexer with a separate, overlapping compressor
    heavy           all whose window is complete, of many more tokens each

The indexer and its loss come from sparse_attention.py; here its target are the probabilities of entries among all that
attention sees. Heads are divided over tensor-parallel ranks by groups of the output; keys and entries are whole on
each. Context-parallel ranks gather what keys and entries are made of.

s: sequence, b: batch, n: heads per rank, d: channels of a head, rq: width of the latent vector, w: windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from megatron.core.context_parallel.sharding import list_pieces_of_rank, to_sequence_order
from megatron.core.errors import ConfigError
from megatron.core.inference_context import InferenceContext
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.plan.read import read_plan
from megatron.core.process_groups_config import Group, ProcessGroupCollection
from megatron.core.sequences.token_layout import TokenLayout
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    LayerOutput,
    ReplicatedLinear,
    RowParallelLinear,
    tensor_parallel_split,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.parameters import declare_parameter, parameter_dtype
from megatron.core.tensor_parallel.products import at_least_float32, is_wide
from megatron.core.tensor_parallel.random import checkpoint, get_cuda_rng_tracker
from megatron.core.transformer.attention import mark_as_query_key_norm
from megatron.core.transformer.compressor import Compressor, Windows, rotate_last
from megatron.core.transformer.core_attention.chosen_keys import IndexVectors, LossCall, choose_keys
from megatron.core.transformer.core_attention.compressed_keys import (
    Attended,
    EntryKeys,
    EntryPlaces,
    Sight,
    attend_entries,
)
from megatron.core.transformer.initialisers import input_initialiser, output_initialiser, sink_initialiser
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.norms import RMSNorm, normalise_length
from megatron.core.transformer.rotary import Rotation
from megatron.core.transformer.sparse_attention import IndexLossCore, build_hadamard
from megatron.core.transformer.transformer_config import TransformerConfig


class EntryIndexer(MegatronModule):
    """Scores the entries of a layer: whole on every tensor-parallel rank, with the same results."""

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection, ratio: int) -> None:
        super().__init__(config)
        assert config.hidden_size is not None and config.q_lora_rank is not None
        self.tp_group = groups.tp
        self.heads, width, _ = config.indexer_sizes
        common: dict[str, Any] = {
            "config": config, "init_method": input_initialiser(config), "tp_group": groups.tp,
        }  # fmt: skip
        # Of queries the narrow vectors are gathered; of weights, which are narrow themselves, the products.
        self.linear_wq_b = ReplicatedLinear(config.q_lora_rank, self.heads * width, splits_tokens=False, **common)
        self.linear_weights_proj = ReplicatedLinear(config.hidden_size, self.heads, **common)
        self.compressor = Compressor(config, groups, width, ratio, overlaps=True)
        if not config.dsa_indexer_loss_coeff:
            # Nothing trains it, so that weight decay must not shrink it either.
            self.requires_grad_(False)

    def forward(self, hidden_states: Tensor, query_latent: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """[s, b, h] and [s, b, rq], with sequence parallelism of this rank's tokens -> queries [s, b, g, c] and weights
        [s, b, g] float32 of all s."""
        weight = self.linear_weights_proj(hidden_states)[0]
        if self.config.sequence_parallel:
            query_latent, weight = (
                gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False, group=self.tp_group)
                for x in (query_latent, weight)
            )
        query = rotate_last(self.linear_wq_b(query_latent)[0].unflatten(-1, (self.heads, -1)), rotation)
        return self.spread(query), at_least_float32(weight) * (self.heads * query.shape[-1]) ** -0.5

    def spread(self, x: Tensor) -> Tensor:
        """Queries or keys as they are multiplied: in 16 bits times a Hadamard matrix."""
        spreads = self.config.dsa_indexer_rotate_activation and not is_wide(x)
        return x @ build_hadamard(x) if spreads else x


class CompressedCore(IndexLossCore):
    """Attention to a window and to entries, with the compressor of these and the indexer that chooses among them."""

    def __init__(self, config: TransformerConfig, layer_number: int, groups: ProcessGroupCollection) -> None:
        super().__init__(config)
        self.groups, self.cp_group = groups, groups.cp
        self.options = options = read_plan(config).layer(layer_number).options
        self.ratio: int = options.compress_ratio
        self.attn_sink = declare_parameter(
            (config.num_attention_heads,), init=sink_initialiser(config), splits=tensor_parallel_split(0, groups.tp)
        )
        self.compressor = self.indexer = None
        if self.ratio:
            self.compressor = Compressor(config, groups, config.query_width, self.ratio, overlaps=options.chooses)
        if options.chooses and not config.csa_dense_mode:
            self.indexer = EntryIndexer(config, groups, self.ratio)

    def list_products(self, hidden_states: Tensor) -> list[Tensor]:
        """Inputs of entries, [s, b, ...] of all tokens: the compressor's products, and the indexer's."""
        found = [] if self.compressor is None else [self.compressor.project(hidden_states)]
        if self.indexer is not None:
            # No gradient reaches the model through the indexer.
            with nullcontext() if self.learns else torch.no_grad():
                found.append(self.indexer.compressor.project(hidden_states.detach()))
        return found

    def make_entries(self, products: list[Tensor], windows: Windows, rotation: Rotation) -> list[Tensor]:
        """Entries [w, b, d] of these products, and the indexer's keys [w, b, c]."""
        found = [] if self.compressor is None else [self.compressor(products[0], windows, rotation)]
        if self.indexer is not None:
            with nullcontext() if self.learns else torch.no_grad():
                found.append(self.indexer.spread(self.indexer.compressor(products[1], windows, rotation)))
        return found

    def begin_state(self, products: list[Tensor], longest: int) -> list[Tensor]:
        """State that generation keeps of a sequence before its first token: for each kind of entries room for so many
        tokens' entries, [w, d], and for the last tokens' inputs, with their angles, [t, ...]."""
        count, tail = longest // self.ratio, self.ratio * (2 if self.options.chooses else 1)
        made = [
            x for x in (self.compressor, None if self.indexer is None else self.indexer.compressor) if x is not None
        ]
        room = [products[0].new_zeros(count, each.norm.hidden_size) for each in made]
        return room + [x.new_zeros(tail, x.shape[-1]) for x in products]

    def extend_state(self, state: list[Tensor], new: list[Tensor], past: int) -> list[Tensor]:
        """Add what new tokens [n, 1, ...] complete to the entries of a sequence with `past` tokens, in place; returns
        its entries. state: as `begin_state` returns."""
        kinds = len(new) - 1
        entries, tails = state[:kinds], state[kinds:]
        if not new[:-1]:
            return []
        # An overlapping entry is made of the window before, too, whose own entry is there already.
        has_before = self.options.chooses and past >= self.ratio
        needed = past % self.ratio + self.ratio * has_before
        whole = [torch.cat((tail[len(tail) - needed :].unsqueeze(1), x)) for tail, x in zip(tails, new, strict=True)]
        cos, sin = whole.pop().squeeze(1).chunk(2, dim=-1)
        windows = Windows.build(len(cos), self.ratio)
        found = self.make_entries(whole, windows, Rotation(cos, sin, self.config.rotates_neighbours))
        first = past // self.ratio
        for held, more in zip(entries, found, strict=True):
            added = more[int(has_before) :].squeeze(1)
            held[first : first + len(added)] = added
        for tail, x in zip(tails, new, strict=True):
            tail.copy_(torch.cat((tail, x.squeeze(1)))[-len(tail) :])
        return entries

    def choose(self, vectors: IndexVectors, places: EntryPlaces) -> Tensor | None:
        """The entries that each query takes; None for all."""
        rectifies, count = self.config.dsa_indexer_scoring_relu, self.config.indexer_sizes[2]
        # Backward must not choose others where it computes again.
        return get_cuda_rng_tracker().decide_once(lambda: choose_keys(vectors, places, count, rectifies))

    def attend(self, query: Tensor, keys: EntryKeys, chosen: Tensor | None, places: EntryPlaces) -> Attended:
        """See `attend_entries`; selective recomputation keeps only the inputs."""
        inputs = (query, keys, chosen, places, self.config.attention_scale)
        if "core_attn" in self.recomputed:
            return Attended(*checkpoint(_attend_keys, False, query, *keys, *inputs[2:]))
        return attend_entries(*inputs)

    def list_keys(self, tokens: Tensor, entries: list[Tensor]) -> EntryKeys:
        """Keys of attention: tokens [t, b, d], and entries where there are any."""
        made = entries[0] if entries else tokens[:0]
        return EntryKeys(tokens, made, at_least_float32(self.attn_sink))


def _attend_keys(query: Tensor, tokens: Tensor, entries: Tensor, sinks: Tensor, *others: Any) -> Attended:
    return attend_entries(query, EntryKeys(tokens, entries, sinks), *others)


class CompressedSelfAttention(MegatronModule):
    """Attention of a sequence to itself: [s, b, h] -> [s, b, h]."""

    recomputable: ClassVar[Mapping[str, tuple[str, ...]]] = {"core_attn": ()}

    def __init__(
        self, config: TransformerConfig, layer_number: int, pg_collection: ProcessGroupCollection | None = None
    ) -> None:
        """layer_number: counted from 1."""
        super().__init__(config)
        self.groups = groups = pg_collection if pg_collection is not None else ProcessGroupCollection.current()
        self.layer_number, tp = layer_number, groups.tp
        assert config.hidden_size is not None and config.q_lora_rank is not None
        heads, width = config.num_attention_heads, config.query_width
        common: dict[str, Any] = {"config": config, "init_method": input_initialiser(config), "tp_group": tp}
        self.linear_q_down_proj = ReplicatedLinear(config.hidden_size, config.q_lora_rank, **common)
        self.q_layernorm = RMSNorm(config, config.q_lora_rank)
        self.linear_q_up_proj = ColumnParallelLinear(config.q_lora_rank, heads * width, bias=False, **common)
        self.linear_kv_proj = ReplicatedLinear(config.hidden_size, width, **common)
        self.kv_layernorm = RMSNorm(config, width)
        for norm in (self.q_layernorm, self.kv_layernorm):
            mark_as_query_key_norm(norm)
        self.core_attention = CompressedCore(config, layer_number, groups)
        outputs = config.o_groups * config.o_lora_rank
        self.linear_o_group_proj = declare_parameter(
            (outputs, heads * width // config.o_groups), init=input_initialiser(config), dtype=parameter_dtype(config),
            splits=tensor_parallel_split(0, tp),
        )  # fmt: skip
        self.linear_proj = RowParallelLinear(
            outputs, config.hidden_size, config=config, init_method=output_initialiser(config), bias=False,
            skip_bias_add=True, tp_group=tp,
        )  # fmt: skip

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotation: Rotation | None = None,
        inference_context: InferenceContext | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> LayerOutput:
        """[s, b, h] -> ([s, b, h], None). Raises ConfigError for a mask: what a token sees is causal, within its
        document."""
        assert rotation is not None, "rotary positions are checked by the config"
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ConfigError(
                "compressed attention is given an attention_mask; it is causal, so leave that out, and say documents "
                "by packed_seq_params"
            )
        with self.offload("qkv_linear"):
            query_latent = self.q_layernorm(self.linear_q_down_proj(hidden_states)[0])
            query = self.linear_q_up_proj(query_latent)[0].unflatten(-1, (-1, self.config.query_width))
            query = rotate_last(normalise_length(query, self.config.layernorm_epsilon), rotation)
            tokens = rotate_last(self._share(self.kv_layernorm(self.linear_kv_proj(hidden_states)[0])), rotation)
        inputs = hidden_states, query_latent, query, tokens
        if inference_context is None:
            context = self._attend_in_training(*inputs, rotation, packed_seq_params)
        else:
            context = self._attend_with_cache(*inputs, rotation, inference_context)
        turned_back = rotate_last(context, rotation._replace(sin=-rotation.sin))
        with self.offload("attn_proj"):
            output, _ = self.linear_proj(self._join_groups(turned_back))
        return output, None

    def _share(self, x: Tensor) -> Tensor:
        """Keys that all heads read, [s, b, d], with sequence parallelism of this rank's tokens -> of all tokens; each
        rank's heads give a part of its gradient."""
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(x, group=self.groups.tp)
        return copy_to_tensor_model_parallel_region(x, self.groups.tp)

    def _join_groups(self, context: Tensor) -> Tensor:
        """[s, b, n, d] -> [s, b, groups per rank * outputs of a group]."""
        rows = context.flatten(0, 1).unflatten(1, (self.config.o_groups // self.groups.tp.size(), -1)).flatten(2)
        weight = self.linear_o_group_proj.unflatten(0, (rows.shape[1], -1))  # [groups, outputs, inputs]
        joined = torch.bmm(rows.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)
        return joined.reshape(*context.shape[:2], -1)

    def _attend_in_training(
        self, hidden_states: Tensor, query_latent: Tensor, query: Tensor, tokens: Tensor, rotation: Rotation,
        packed_seq_params: PackedSeqParams | None,
    ) -> Tensor:  # fmt: skip
        """-> context [s, b, n, d]."""
        core, cp = self.core_attention, self.groups.cp
        length = tokens.shape[0] * cp.size()
        documents = None if packed_seq_params is None else packed_seq_params.layout(length)
        windows = Windows.build(length, core.ratio or length + 1, documents)
        tokens, *products = (_gather(x, cp) for x in (tokens, *core.list_products(hidden_states)))
        everywhere = rotation._replace(cos=_gather(rotation.cos, cp), sin=_gather(rotation.sin, cp))
        entries = core.make_entries(products, windows, everywhere)
        pieces = np.arange(length).reshape(2 * cp.size() if cp.size() > 1 else 1, -1)
        own = pieces[list(list_pieces_of_rank(cp.rank(), cp.size())) if cp.size() > 1 else [0]].reshape(-1)
        sight = find_sight(own, windows, core.ratio, core.options.window, documents)
        places = EntryPlaces(sight, len(windows.starts), query.device)
        chosen, vectors = None, None
        if core.indexer is not None and (core.learns or places.most_seen > self.config.indexer_sizes[2]):
            with nullcontext() if core.learns else torch.no_grad():
                found, weight = core.indexer(hidden_states.detach(), query_latent.detach(), rotation)
            vectors = IndexVectors(found, entries[1], weight)
            chosen = core.choose(vectors, places)
        if entries:
            entries[0] = copy_to_tensor_model_parallel_region(entries[0], self.groups.tp)
        keys = core.list_keys(tokens, entries)
        attended = core.attend(query, keys, chosen, places)
        if vectors is None or not core.learns:
            return attended.output
        call = LossCall(
            query.detach(), keys.entries.detach(), self.config.attention_scale, places,
            chosen if self.config.dsa_indexer_use_sparse_loss else None, self.groups.tp,
            self.config.dsa_indexer_scoring_relu, attended.log_sum,
        )  # fmt: skip
        attached: Tensor = core.attach_loss(attended.output, vectors, call)
        return attached

    # ---- generation

    def _attend_with_cache(
        self, hidden_states: Tensor, query_latent: Tensor, query: Tensor, tokens: Tensor, rotation: Rotation,
        cache: InferenceContext,
    ) -> Tensor:  # fmt: skip
        """-> context [s, b, n, d]. The cache holds the tokens of the window, and of each sequence its entries and the
        inputs of its last tokens' entries, with their angles."""
        core, layout = self.core_attention, cache.layout
        held = [x.squeeze(2) for _, (x,) in cache.update(self.layer_number, tokens.unsqueeze(2)) for x in x.split(1, 1)]
        angles = torch.cat((rotation.cos, rotation.sin), dim=-1).unsqueeze(1).expand(-1, tokens.shape[1], -1)
        made = [*core.list_products(hidden_states), angles] if core.ratio else []
        state = cache.read_recurrent(self.layer_number, *core.begin_state(made, cache.max_tokens)) if made else ()
        scoring = () if core.indexer is None else core.indexer(hidden_states, query_latent, rotation)
        cut = [layout.split(x) for x in (query, *scoring, *made)]
        parts = []
        for index, (past, of_window) in enumerate(zip(layout.past, held, strict=True)):
            own, *new = (x[index] for x in cut)
            entries = core.extend_state([x[index] for x in state], new[len(scoring) :], past)
            place = np.arange(len(of_window) - len(own), len(of_window))
            first = np.maximum(place - (core.options.window or 0), 0)
            end = (np.arange(past, past + len(own)) + 1) // max(1, core.ratio) * bool(core.ratio)
            count = int(end[-1])
            places = EntryPlaces(Sight(place, first, np.zeros_like(end), end), count, own.device)
            entries = [x[:count].unsqueeze(1) for x in entries]
            chosen = core.choose(IndexVectors(new[0], entries[1], new[1]), places) if scoring else None
            parts.append(core.attend(own, core.list_keys(of_window, entries), chosen, places).output)
        if made:
            cache.write_recurrent(self.layer_number, *state)
        return layout.join(parts)


def find_sight(
    own: np.ndarray, windows: Windows, ratio: int, window: int | None, documents: TokenLayout | None
) -> Sight:
    """Sight of tokens at the places `own` of the sequence: int64 [s], on the host. window: tokens before itself that
    one sees."""
    start = np.zeros_like(own) if documents is None else documents.starts.numpy()[own]
    first = start if window is None else np.maximum(start, own - window)
    if not ratio:
        return Sight(own, first, np.zeros_like(own), np.zeros_like(own))
    begin = np.searchsorted(windows.starts, start)
    return Sight(own, first, begin, begin + (own - start + 1) // ratio)


def _gather(x: Tensor, group: Group) -> Tensor:
    """[s, ...] of all context-parallel ranks, in the order of the sequence."""
    return to_sequence_order(gather_from_sequence_parallel_region(x, group=group), group.size())
