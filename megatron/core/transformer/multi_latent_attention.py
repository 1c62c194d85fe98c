# SPDX-License-Identifier: Apache-2.0
"""Attention whose queries, keys and values are made of narrow latent vectors (DeepSeek-V2, 2024, section 2.1).

    latent of queries   cq = norm(Wdq x)              [s, b, rq]        or x itself, without --q-lora-rank
    latent of both      ck, kr = Wdkv x               [s, b, rk + p];   ck = norm(ck)
    a head's query      qc, qr = Wuq cq               [s, b, n, d + p]
    a head's key        kc, v  = Wukv ck              [s, b, n, d + dv]

    score  = (qc . kc + R(qr) . R(kr)) * scale        R: rotary positions; all heads have the same kr
    output = Wo [softmax(score) v]

The projections to latent vectors are unsharded on every tensor-parallel rank, the ones to heads are divided by heads.
With sequence parallelism the former work on a rank's tokens, and what is gathered is narrow.

Generation keeps ck and R(kr) of each token, rk + p numbers instead of n (d + p + dv). For few new tokens it moves the
projections from the keys and values of all tokens to the queries and outputs of the new ones (the absorbed form,
section 2.1.2), which is the same product in another order:

    qc . (Wuk ck) = (Wuk^T qc) . ck                   sum_t a_t (Wuv ck_t) = Wuv (sum_t a_t ck_t)

s: sequence, t: keys, b: batch, n: heads per rank, d: channels of a head without position, p: with position, dv: of a
value, rq, rk: widths of the latent vectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.enums import AttnMaskType
from megatron.core.errors import ConfigError
from megatron.core.inference_context import InferenceContext
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.taken_arguments import take_arguments
from megatron.core.tensor_parallel.kept_activations import RecomputedTogether, keep_as
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.adapters import get_merged_weight
from megatron.core.transformer.attention import Attention, choose_rotary, mark_as_query_key_norm, scale_queries
from megatron.core.transformer.compiled_regions import Compile
from megatron.core.transformer.initialisers import input_initialiser
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.rotary import (
    Rotation,
    apply_rotary,
    join_latent_heads,
)
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

# Put here by a table of upstream's names; declared for type checkers.
apply_rotary_pos_emb: Any
deprecate_inference_params: Any
gather_from_tensor_model_parallel_region: Any
scatter_to_sequence_parallel_region: Any


@dataclass
class MLASelfAttentionSubmodules:
    """The parts of latent attention: specs or classes. linear_q_proj serves without q_lora_rank, linear_q_down_proj and
    linear_q_up_proj with it. The norms of the latent vectors may be None."""

    linear_q_proj: Any
    linear_q_down_proj: Any
    linear_q_up_proj: Any
    linear_kv_down_proj: Any
    linear_kv_up_proj: Any
    core_attention: Any
    linear_proj: Any
    q_layernorm: Any = None
    kv_layernorm: Any = None


class MLASelfAttention(Attention):
    """Attention of a sequence to itself over latent vectors: [s, b, h] -> [s, b, h]."""

    recomputable: ClassVar[Mapping[str, tuple[str, ...]]] = {**Attention.recomputable, "mla_up_proj": ()}

    @take_arguments("* attention_type='self' pp_layer_offset=0 name=...", "layer_number counts in the whole model")
    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """See Attention. Raises ConfigError for a config without latent attention."""
        if not config.multi_latent_attention:
            raise ConfigError(
                "MLASelfAttention needs the widths of latent attention; give MLATransformerConfig, or "
                "--multi-latent-attention"
            )
        super().__init__(config, submodules, layer_number, attn_mask_type, "self", cp_comm_type, pg_collection)

    def build_projections(self, submodules: MLASelfAttentionSubmodules) -> None:
        """Build the projections to latent vectors and from them to heads, and the norms between."""
        config, heads = self.config, self.config.num_attention_heads
        way = choose_rotary(config)
        self.join_heads, self.is_rope_fused = way.load(), way.is_fused
        common = {"config": config, "init_method": input_initialiser(config), "tp_group": self.groups.tp}
        # Names, and what has no bias, as in upstream's models.
        queries = heads * config.query_width
        if config.q_lora_rank is None:
            self.linear_q_proj = build_module(
                submodules.linear_q_proj, config.hidden_size, queries, bias=False, **common
            )
        else:
            self.linear_q_down_proj = build_module(
                submodules.linear_q_down_proj, config.hidden_size, config.q_lora_rank, **common
            )
            self.linear_q_up_proj = build_module(
                submodules.linear_q_up_proj, config.q_lora_rank, queries, bias=False, **common
            )
        self.linear_kv_down_proj = build_module(
            submodules.linear_kv_down_proj,
            config.hidden_size,
            config.kv_lora_rank + config.qk_pos_emb_head_dim,
            **common,
        )
        self.linear_kv_up_proj = build_module(
            submodules.linear_kv_up_proj,
            config.kv_lora_rank,
            heads * (config.qk_head_dim + config.v_head_dim),
            bias=False,
            **common,
        )
        self.q_layernorm = self._build_latent_norm(submodules.q_layernorm, config.q_lora_rank)
        self.kv_layernorm = self._build_latent_norm(submodules.kv_layernorm, config.kv_lora_rank)

    def compile_regions(self, compiled: Compile[Any]) -> None:
        """See compiled_regions.py."""
        super().compile_regions(compiled)
        if not self.is_rope_fused:
            self.join_heads = compiled(self.join_heads)

    def _build_latent_norm(self, norm: Any, width: int | None) -> Any:
        """The norm of a latent vector of this width; None where there is no such vector, or no norm of it."""
        if not self.config.qk_layernorm or norm is None or width is None:
            return None
        eps = self.config.latent_norm_epsilon
        built = build_module(norm, self.config, width, **({} if eps is None else {"eps": eps}))
        mark_as_query_key_norm(built)
        return built

    def _make_context(self, hidden_states: Tensor, inputs: LayerInputs, key_value_states: Tensor | None) -> Tensor:
        """See Attention; a cache holds latent vectors [t, b, rk] and rotated key channels [t, b, 1, p]."""
        assert key_value_states is None, "latent attention has one sequence"
        if inputs.inference_context is not None:
            assert inputs.packed_seq_params is None, "packed sequences are for training, and have no cache"
            return self._attend_with_cache(hidden_states, inputs, inputs.inference_context)
        with self.offload("qkv_linear"):
            latents = self._make_latents(hidden_states)
        heads = self._make_heads(*latents, inputs.rotation)
        with self._keep_or_make_again(heads, latents, inputs.rotation):
            return self._attend(*heads, inputs)

    def _keep_or_make_again(
        self, heads: tuple[Tensor, ...], latents: tuple[Tensor, ...], rotation: Rotation | None
    ) -> ExitStack:
        """A context for core attention, which keeps queries, keys and values for backward, or has them made again of
        the latent vectors, which the projections keep anyway."""
        stack = ExitStack()
        if "mla_up_proj" in self.recomputed and torch.is_grad_enabled():
            narrow = [x.detach() for x in latents]
            together = RecomputedTogether(lambda: self._make_heads(narrow[0], narrow[1], narrow[2], rotation))
            for index, made in enumerate(heads):
                stack.enter_context(keep_as(made, together.way(index)))
        return stack

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, ...]:
        """See Attention; all n heads have different keys."""
        assert key_value_states is None, "latent attention has one sequence"
        assert not output_gate, "latent attention has no gate"
        return self._make_heads(*self._make_latents(hidden_states), rotation)

    def _make_latents(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[s, b, h] -> what queries are made of, [s, b, rq], and what keys and values are made of, [s, b, rk], both
        normalised as configured; and the key channels with position, [s, b, 1, p], not rotated.

        With sequence parallelism the first two are of this rank's tokens, the third of the whole sequence.
        """
        config, tp_group = self.config, self.groups.tp
        query_latent = hidden_states
        if config.q_lora_rank is not None:
            query_latent = self.linear_q_down_proj(hidden_states)[0]
            if self.q_layernorm is not None:
                query_latent = self.q_layernorm(query_latent)
        packed = self.linear_kv_down_proj(hidden_states)[0]
        latent, positions = packed.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        # Each rank's heads give a part of the gradient of what all heads share: it is summed over the ranks.
        if config.sequence_parallel:
            positions = gather_from_sequence_parallel_region(positions, group=tp_group)
        else:
            positions = copy_to_tensor_model_parallel_region(positions, group=tp_group)
        if self.kv_layernorm is not None:
            latent = self.kv_layernorm(latent)
        return query_latent, latent, positions.unsqueeze(2)

    def _make_heads(
        self, query_latent: Tensor, latent: Tensor, positions: Tensor, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Latent vectors -> query and key [s, b, n, d + p], value [s, b, n, dv]."""
        query = self._make_queries(query_latent, rotation)
        expanded = self.linear_kv_up_proj(latent)[0].unflatten(
            -1, (-1, self.config.qk_head_dim + self.config.v_head_dim)
        )
        return self.join_heads(query, expanded, positions, rotation)

    def _make_queries(self, query_latent: Tensor, rotation: Rotation | None) -> Tensor:
        """[s, b, rq] -> [s, b, n, d + p], not rotated, with the temperature of their positions."""
        project = self.linear_q_proj if self.config.q_lora_rank is None else self.linear_q_up_proj
        query: Tensor = project(query_latent)[0].unflatten(-1, (-1, self.head_width))
        return scale_queries(query, rotation)

    # ---- generation

    def _attend_with_cache(self, hidden_states: Tensor, inputs: LayerInputs, cache: InferenceContext) -> Tensor:
        """New tokens [s, b, h] -> [s, b, n * dv], over them and what the cache holds of those before."""
        query, _, latent, positions = self._make_new(hidden_states, inputs)
        held = cache.update(self.layer_number, latent, positions)
        queries = cache.layout.cut(query, [rows for rows, _ in held])
        pairs = zip(queries, held, strict=True)
        return cache.layout.join([self._attend_to_latents(q, c, p, inputs) for q, (_, (c, p)) in pairs])

    def _make_new(self, hidden_states: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of new tokens [s, b, h] the queries [s, b, n, d + p], what these are made of, and what a cache holds of them:
        latent vectors [s, b, rk] and key channels [s, b, 1, p]."""
        query_latent, latent, positions = self._make_latents(hidden_states)
        if self.config.sequence_parallel:
            latent = gather_from_sequence_parallel_region(latent, group=self.groups.tp)
        # Rotated before they are kept: their positions do not change any more.
        query, positions = self._rotate(self._make_queries(query_latent, inputs.rotation), positions, inputs.rotation)
        return query, query_latent, latent, positions

    def _rotate(self, query: Tensor, positions: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
        """query [s, b, n, d + p] and key channels [s, b, 1, p], both rotated where there is a rotation."""
        if rotation is None:
            return query, positions
        plain = self.config.qk_head_dim
        rotated = torch.cat((query[..., :plain], apply_rotary(query[..., plain:], rotation)), dim=-1)
        return rotated, apply_rotary(positions, rotation)

    def _attend_to_latents(self, query: Tensor, latent: Tensor, positions: Tensor, inputs: LayerInputs) -> Tensor:
        """query [s, b, n, d + p], latent [t, b, rk], positions [t, b, 1, p], all rotated -> [s, b, n * dv]."""
        if self._is_absorbed_cheaper(query.shape[0], latent.shape[0]):
            return self._attend_absorbed(query, latent, positions, inputs)
        expanded = F.linear(latent, get_merged_weight(self.linear_kv_up_proj)).unflatten(-1, (query.shape[2], -1))
        query, key, value = join_latent_heads(query, expanded, positions, None)
        return self._attend(query, key, value, inputs)

    def _is_absorbed_cheaper(self, queries: int, keys: int) -> bool:
        """Return True where scores and outputs in latent vectors take fewer multiplications than making the keys and
        values of all tokens: they do for few queries."""
        config = self.config
        rank, to_heads = config.kv_lora_rank, config.qk_head_dim + config.v_head_dim
        longer = (2 * rank - to_heads) * queries * keys  # a latent vector is wider than a key and a value
        return rank * to_heads * queries + longer < rank * to_heads * keys

    def _attend_absorbed(self, query: Tensor, latent: Tensor, positions: Tensor, inputs: LayerInputs) -> Tensor:
        """query [s, b, n, d + p], latent [t, b, rk], positions [t, b, 1, p] -> [s, b, n * dv]: attention of n heads to
        one key-value head, the latent vectors themselves."""
        value = latent.unsqueeze(2)  # [t, b, 1, rk]
        key = torch.cat((value, positions), dim=-1)
        return self._make_values(self._attend_to_one_head(self._absorb(query), key, value, inputs))

    def _absorb(self, query: Tensor) -> Tensor:
        """query [s, b, n, d + p] -> [s, b, n, rk + p], to be multiplied with latent vectors in place of keys."""
        plain = self.config.qk_head_dim
        weight = get_merged_weight(self.linear_kv_up_proj).unflatten(0, (query.shape[2], -1))  # [n, d + dv, rk]
        in_latents = torch.einsum("sbnd,ndr->sbnr", query[..., :plain], weight[:, :plain])
        return torch.cat((in_latents, query[..., plain:]), dim=-1)

    def _make_values(self, context: Tensor) -> Tensor:
        """Weighted sums of latent vectors [s, b, n, rk] -> of values, [s, b, n * dv]."""
        weight = get_merged_weight(self.linear_kv_up_proj).unflatten(0, (context.shape[2], -1))
        return torch.einsum("sbnr,nvr->sbnv", context, weight[:, self.config.qk_head_dim :]).flatten(2)

    def _attend_to_one_head(self, query: Tensor, key: Tensor, value: Tensor, inputs: LayerInputs) -> Tensor:
        """query [s, b, n, rk + p], key [t, b, 1, rk + p], value [t, b, 1, rk] -> [s, b, n, rk]."""
        config, heads = self.config, query.shape[2]
        sees_all = config.window_size is None and config.attention_chunk_size is None and inputs.attention_mask is None
        is_plain = config.softmax_type == "vanilla" and sees_all
        if query.shape[0] > 1 or not is_plain:
            return self._attend(query, key, value, inputs).unflatten(-1, (heads, -1))
        # One token sees every key, and so do its heads as so many queries of one head: kernels that would copy the
        # key-value head for each query head have nothing to copy.
        every = AttnMaskType.no_mask
        context: Tensor = self.core_attention(query.transpose(0, 2), key, value, None, attn_mask_type=every)
        return context.unsqueeze(2).transpose(0, 2)  # [n, b, rk] -> [1, b, n, rk]


MultiLatentAttention = MLASelfAttention  # upstream's name of its base class
