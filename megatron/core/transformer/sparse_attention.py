# SPDX-License-Identifier: Apache-2.0
"""Latent attention of each query to a few keys, which an indexer chooses for all heads (DeepSeek-V3.2, 2025).

    queries of the indexer   qI = R(Wq cq)                 [s, b, g, d]     x and cq without gradients
    its one key              kI = R(LayerNorm(Wk x))       [s, b, d]
    weights of its heads     w  = Ww x * (g d)^-0.5        [s, b, g]

R turns the first channels, as many as attention turns, in 16 bits followed by a Hadamard matrix on both sides, which
spreads large channels and changes no product. `core_attention/chosen_keys.py` says how keys are chosen, and what the
indexer learns: only its loss trains it, and that loss trains nothing else.

A layer without an indexer takes the choice of the layer that `BranchOptions.chooser` names, on the same pipeline stage.

Attention to the chosen keys has two forms of one function. For short sequences the heads of all keys are made, and
those that are not chosen are hidden, block by block; for long ones latent vectors are gathered for each query and
attended to as they are, as in generation (the absorbed form of `multi_latent_attention.py`).

s: sequence, b: batch, g: heads of the indexer, d: their channels.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.auxiliary_loss import AuxiliaryLossScale, attach_auxiliary_loss, is_recomputing
from megatron.core.context_parallel.sharding import to_sequence_order
from megatron.core.errors import ConfigError
from megatron.core.inference_context import InferenceContext
from megatron.core.plan.read import read_plan
from megatron.core.process_groups_config import Group, ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ReplicatedLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.products import at_least_float32, is_wide
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.attention import mark_as_query_key_norm
from megatron.core.transformer.core_attention.chosen_keys import (
    IndexVectors,
    LossCall,
    Places,
    attend_chosen,
    choose_keys,
    compute_index_loss,
)
from megatron.core.transformer.core_attention.dot_product_attention import DotProductAttention
from megatron.core.transformer.core_attention.exchanges import GatheredKeysAttention
from megatron.core.transformer.core_attention.interface import AttentionInputs, CoreAttention
from megatron.core.transformer.core_attention.local import LocalAttention
from megatron.core.transformer.core_attention.query_blocks import QueryBlocksAttention
from megatron.core.transformer.initialisers import input_initialiser
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.norms import LayerNorm
from megatron.core.transformer.rotary import Rotation, apply_rotary
from megatron.core.transformer.transformer_config import TransformerConfig


class Indexer(MegatronModule):
    """Scores the keys of a layer: whole on every tensor-parallel rank, with the same results."""

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        super().__init__(config)
        assert config.hidden_size is not None
        self.tp_group = groups.tp
        self.heads, width, _ = config.indexer_sizes
        common: dict[str, Any] = {
            "config": config, "init_method": input_initialiser(config), "tp_group": groups.tp,
        }  # fmt: skip
        # Of queries the narrow vectors are gathered; of what is narrow itself, the products.
        inputs = config.hidden_size if config.q_lora_rank is None else config.q_lora_rank
        self.linear_wq_b = ReplicatedLinear(inputs, self.heads * width, splits_tokens=False, **common)
        self.linear_wk = ReplicatedLinear(config.hidden_size, width, **common)
        self.k_norm = LayerNorm(config, width, config.dsa_indexer_k_norm_epsilon)
        self.linear_weights_proj = ReplicatedLinear(config.hidden_size, self.heads, **common)
        mark_as_query_key_norm(self.k_norm)
        if not config.dsa_indexer_loss_coeff:
            # Nothing trains it, so that weight decay must not shrink it either.
            self.requires_grad_(False)

    def forward(self, hidden_states: Tensor, query_latent: Tensor, rotation: Rotation | None) -> IndexVectors:
        """[s, b, h] and [s, b, rq], with sequence parallelism of this rank's tokens -> vectors of all s."""
        config = self.config
        weight = self.linear_weights_proj(hidden_states)[0]
        if config.dsa_indexer_k_norm_fp32:
            # A norm computes in float32 anyway: what counts is that its input was not rounded.
            key = F.linear(at_least_float32(hidden_states), at_least_float32(self.linear_wk.weight))
        else:
            key = self.linear_wk(hidden_states)[0]
        key = self.k_norm(key)
        if config.sequence_parallel:
            # Every rank does the same with the result, so that gradients are not summed.
            query_latent, both = (
                gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False, group=self.tp_group)
                for x in (query_latent, torch.cat((key, weight), dim=-1))
            )
            key, weight = both.split([key.shape[-1], weight.shape[-1]], dim=-1)
        query = self.linear_wq_b(query_latent)[0].unflatten(-1, (self.heads, -1))
        if rotation is not None:
            turned = rotation._replace(interleaved=config.dsa_indexer_rope_interleaved)
            query, key = apply_rotary(query, turned), apply_rotary(key, turned)
        if config.dsa_indexer_rotate_activation and not is_wide(query):
            matrix = build_hadamard(query)
            query, key = query @ matrix, key @ matrix
        return IndexVectors(query, key, at_least_float32(weight) * (self.heads * key.shape[-1]) ** -0.5)


def build_hadamard(like: Tensor) -> Tensor:
    """The Hadamard matrix of the last dimension of `like`, a power of two, orthogonal, in its dtype."""
    matrix = like.new_ones(1, 1)
    while matrix.shape[0] < like.shape[-1]:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix * like.shape[-1] ** -0.5


class IndexLossCore(MegatronModule):
    """Core of attention with an indexer, which its own loss trains."""

    indexer: Any
    """None where there is none."""
    cp_group: Group

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.auxiliary_loss_scale = AuxiliaryLossScale()
        self._loss: Tensor | None = None

    @property
    def learns(self) -> bool:
        """True if this forward trains the indexer."""
        has_loss = self.indexer is not None and self.config.dsa_indexer_loss_coeff
        return bool(has_loss) and self.training and torch.is_grad_enabled()

    def attach_loss(self, context: Tensor, vectors: IndexVectors, call: LossCall) -> Tensor:
        """The context [s, b, ...], whose backward also runs the backward of the indexer's loss."""
        rows = context.shape[0] * context.shape[1] * self.cp_group.size()
        share = compute_index_loss(vectors, call) * (self.config.dsa_indexer_loss_coeff or 0.0) / rows
        if not is_recomputing():
            self._loss = share.detach() if self._loss is None else self._loss + share.detach()
        # Where gradients are divided by all tokens in the end, a microbatch counts as much as it has tokens.
        counted = share * (rows if self.config.calculate_per_token_loss else 1)
        return attach_auxiliary_loss(context, counted, self.auxiliary_loss_scale)

    def take_loss(self) -> Tensor | None:
        """Return the sum over microbatches since the last call of this process's part of the loss; None for none."""
        taken, self._loss = self._loss, None
        return taken


class SparseCore(DotProductAttention, IndexLossCore):
    """Attention to chosen keys, with the indexer that chooses them, or another layer's choice."""

    def __init__(self, config: TransformerConfig, layer_number: int, **named: Any) -> None:
        """named: see DotProductAttention."""
        super().__init__(config, layer_number, **named)
        groups = named.get("pg_collection") or ProcessGroupCollection.current()
        self.layer_number = layer_number
        self.chooser = read_plan(config).layer(layer_number).options.chooser
        """The layer whose choice is taken; None where this one chooses."""
        self.indexer = Indexer(config, groups) if self.chooser is None else None
        plain: CoreAttention = LocalAttention(self.options)
        if config.attention_backend != "local":
            plain = QueryBlocksAttention(self.options)
        self.chosen_backend: CoreAttention = plain if groups.cp.size() == 1 else GatheredKeysAttention(plain, groups.cp)
        self.latest: Any = None
        """Choice of the last forward: int32 [s, b, k], None for all keys; in generation for each run."""
        self.source = [self]
        """The core whose choice is taken; in a list, so that it is no part of this one."""

    def choose(
        self, hidden_states: Tensor, query_latent: Tensor, rotation: Rotation | None, places: Places
    ) -> tuple[Tensor | None, IndexVectors | None]:
        """The choice of a training step or an evaluation, and the indexer's vectors where they learn."""
        if self.indexer is None:
            return get_cuda_rng_tracker().decide_once(lambda: self.source[0].latest), None
        chooses = places.most_seen > self.config.indexer_sizes[2]
        if not chooses and not self.learns:
            self.latest = None
            return None, None
        # No gradient reaches the model through the indexer.
        with nullcontext() if self.learns else torch.no_grad():
            query, key, weight = self.indexer(hidden_states.detach(), query_latent.detach(), rotation)
            whole = gather_from_sequence_parallel_region(key, group=self.cp_group)
            vectors = IndexVectors(query, to_sequence_order(whole, self.cp_group.size()), weight)
        # Backward must not choose others where it computes again, nor layers that take this choice.
        chosen = get_cuda_rng_tracker().decide_once(lambda: self.choose_by(vectors, places))
        if not is_recomputing():
            self.latest = chosen
        return chosen, vectors if self.learns else None

    def choose_by(self, vectors: IndexVectors, places: Places) -> Tensor | None:
        """See `choose_keys`."""
        return choose_keys(vectors, places, self.config.indexer_sizes[2], self.config.dsa_indexer_scoring_relu)

    def _attend(self, backend: CoreAttention, inputs: AttentionInputs) -> Tensor:
        return super()._attend(backend if inputs.visible.chosen is None else self.chosen_backend, inputs)


class SparseSelfAttention(MLASelfAttention):
    """Latent attention of a sequence to the keys that an indexer chooses: [s, b, h] -> [s, b, h]."""

    def _make_context(self, hidden_states: Tensor, inputs: LayerInputs, key_value_states: Tensor | None) -> Tensor:
        """See Attention. Raises ConfigError for a mask: what a token sees is causal, within its document."""
        core, rotation = self.core_attention, inputs.rotation
        if inputs.attention_mask is not None and inputs.attention_mask.dim() != 2:
            raise ConfigError(
                "sparse attention is given an attention_mask; it is causal, so leave that out, and say documents by "
                "packed_seq_params"
            )
        if inputs.inference_context is not None:
            return super()._make_context(hidden_states, inputs, key_value_states)
        with self.offload("qkv_linear"):
            latents = self._make_latents(hidden_states)
        query_latent, latent, positions = latents
        keys, packed = positions.shape[0] * self.groups.cp.size(), inputs.packed_seq_params
        documents = None if packed is None else packed.layout(keys)
        places = Places(
            positions.shape[0], keys, positions.device, sharers=self.groups.cp, documents=documents
        )  # fmt: skip
        chosen, vectors = core.choose(hidden_states, query_latent, rotation, places)
        if chosen is not None and self.config.gathers_chosen_keys(keys):
            query, turned = self._rotate(self._make_queries(query_latent, rotation), positions, rotation)
            wide = self._absorb(query), self._gather_keys(latent, turned)
            context = self._attend_wide(*wide, chosen)
        else:
            heads = self._make_heads(*latents, rotation)
            with self._keep_or_make_again(heads, latents, rotation):
                context = self._attend(*heads, inputs, chosen)
            if vectors is not None:
                turned = positions if rotation is None else apply_rotary(positions, rotation)
                wide = self._absorb(heads[0]), self._gather_keys(latent, turned)
        if vectors is None:
            return context
        among = chosen if self.config.dsa_indexer_use_sparse_loss else None
        query, key = (x.detach() for x in wide)
        rectifies, scale = self.config.dsa_indexer_scoring_relu, core.options.scale
        call = LossCall(query, key, scale, places, among, self.groups.tp, rectifies)
        attached: Tensor = core.attach_loss(context, vectors, call)
        return attached

    def _gather_keys(self, latent: Tensor, positions: Tensor) -> Tensor:
        """Latent vectors, with sequence parallelism of this rank's tokens, and rotated key channels [s, b, 1, p] -> of
        the whole sequence in its order, [t, b, rk + p]."""
        tp, cp = self.groups.tp, self.groups.cp
        if self.config.sequence_parallel:
            latent = gather_from_sequence_parallel_region(latent, group=tp)
        else:
            latent = copy_to_tensor_model_parallel_region(latent, tp)
        key = torch.cat((latent, positions.squeeze(2)), dim=-1)
        return to_sequence_order(gather_from_sequence_parallel_region(key, group=cp), cp.size())

    def _attend_wide(self, query: Tensor, key: Tensor, chosen: Tensor) -> Tensor:
        """query [s, b, n, rk + p], key [t, b, rk + p] -> [s, b, n * dv]."""
        options = self.core_attention.options
        dropout = options.dropout if self.training else 0.0
        narrow = attend_chosen(query, key, chosen, self.config.kv_lora_rank, options.scale, dropout)
        return self._make_values(narrow)

    # ---- generation

    def _attend_with_cache(self, hidden_states: Tensor, inputs: LayerInputs, cache: InferenceContext) -> Tensor:
        """See MLASelfAttention; the cache holds the indexer's keys as well."""
        query, query_latent, latent, positions = self._make_new(hidden_states, inputs)
        core, layout = self.core_attention, cache.layout
        if core.indexer is None:
            held = [(rows, kept) for rows, kept in cache.update(self.layer_number, latent, positions)]
            choices = core.source[0].latest
        else:
            vectors = core.indexer(hidden_states, query_latent, inputs.rotation)
            found = cache.update(self.layer_number, latent, positions, vectors.key)
            held = [(rows, kept[:2]) for rows, kept in found]
            of_runs = zip(
                *(layout.cut(x, [rows for rows, _ in held]) for x in (vectors.query, vectors.weight)), found,
                strict=True,
            )  # fmt: skip
            choices = core.latest = [
                core.choose_by(IndexVectors(q, key, w), Places(q.shape[0], key.shape[0], key.device))
                for q, w, (_, (_, _, key)) in of_runs
            ]
        queries = layout.cut(query, [rows for rows, _ in held])
        return layout.join(
            [
                self._attend_to_latents(q, c, p, inputs)
                if chosen is None
                else self._attend_wide(self._absorb(q), torch.cat((c, p.squeeze(2)), dim=-1), chosen)
                for q, (_, (c, p)), chosen in zip(queries, held, choices, strict=True)
            ]
        )


def link_choosers(layers: Iterable[nn.Module]) -> None:
    """Let layers of one stage that have no indexer find the choice of the layer that has it. Raises ConfigError where
    that is not among them."""
    attending = (getattr(getattr(layer, "self_attention", None), "core_attention", None) for layer in layers)
    cores = {core.layer_number: core for core in attending if isinstance(core, SparseCore)}
    for core in cores.values():
        if core.chooser is not None:
            if core.chooser not in cores:
                raise ConfigError(
                    f"layer {core.layer_number} takes the choice of keys of layer {core.chooser}, which is on another "
                    "pipeline stage; let each stage begin with a layer that has an indexer (--dsa-indexer-topk-freq)"
                )
            core.source = [cores[core.chooser]]
