# SPDX-License-Identifier: Apache-2.0
"""Kinds of attention beside self-attention: what they share, and what a new kind has to write."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.errors import ConfigError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.sequences.state import SequenceState
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.parameters import initialise_parameters
from megatron.core.transformer.attention import Attention, CrossAttention, CrossAttentionSubmodules
from megatron.core.transformer.core_attention.dot_product_attention import DotProductAttention
from megatron.core.transformer.initialisers import input_initialiser
from megatron.core.transformer.rotary import Rotation, apply_rotary
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.gpt_models import token_batch

VALUE_WIDTH, ROTATED = 4, 6


@dataclasses.dataclass(kw_only=True)
class PartlyRotatedConfig(TransformerConfig):
    """Of a kind of attention in which the first channels of a head alone have positions."""

    @property
    def rotary_width(self) -> int:
        return ROTATED


@dataclasses.dataclass
class NarrowValuesSubmodules:
    linear_q: Any = ColumnParallelLinear
    linear_kv: Any = ColumnParallelLinear
    core_attention: Any = DotProductAttention
    linear_proj: Any = RowParallelLinear


class NarrowValues(Attention):
    """Values of fewer channels than keys, as latent attention has them."""

    def __init__(self, config: TransformerConfig, submodules: NarrowValuesSubmodules, **options: Any) -> None:
        super().__init__(config, submodules, value_width=VALUE_WIDTH, **options)

    def build_projections(self, submodules: NarrowValuesSubmodules) -> None:
        config, heads = self.config, self.config.num_attention_heads
        common = {"config": config, "init_method": input_initialiser(config), "tp_group": self.groups.tp}
        self.linear_q = build_module(submodules.linear_q, config.hidden_size, heads * self.head_width, **common)
        kv_width = heads * (self.head_width + VALUE_WIDTH)
        self.linear_kv = build_module(submodules.linear_kv, config.hidden_size, kv_width, **common)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, ...]:
        assert rotation is not None and rotation.channels == ROTATED
        query = self.linear_q(hidden_states)[0].unflatten(-1, (-1, self.head_width))
        packed = self.linear_kv(hidden_states)[0].unflatten(-1, (-1, self.head_width + VALUE_WIDTH))
        key, value = packed.split([self.head_width, VALUE_WIDTH], dim=-1)
        return apply_rotary(query, rotation), apply_rotary(key, rotation), value


def model_of_narrow_values(**options: Any) -> GPTModel:
    config = PartlyRotatedConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, attention_dropout=0.0, hidden_dropout=0.0, **options
    )
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention = ModuleSpec(NarrowValues, submodules=NarrowValuesSubmodules())
    groups = ProcessGroupCollection.single()
    return GPTModel(config, spec, 64, 16, position_embedding_type="rope", pg_collection=groups)


def test_a_new_kind_shares_cache_core_and_projection() -> None:
    model = model_of_narrow_values().eval()
    attention = model.decoder.layers[0].self_attention
    assert attention.linear_proj.weight.shape == (32, 4 * VALUE_WIDTH)
    ids, positions, labels = token_batch()
    with torch.inference_mode():
        expected, cache, parts, done = model(ids, positions), SequenceState(len(ids), 16), [], 0
        for count in (5, 1, 10):
            part = slice(done, done + count)
            cache.begin([count] * len(ids))
            parts.append(model(ids[:, part], positions[:, part], inference_context=cache))
            done += count
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-5)


def test_a_new_kind_is_recomputed() -> None:
    grads = []
    for options in ({}, {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}):
        model = model_of_narrow_values(**options)
        ids, positions, labels = token_batch()
        model(ids, positions, labels=labels).mean().backward()
        named = model.named_parameters()
        grads.append({name: param.grad for name, param in named if param.grad is not None})
    assert grads[0].keys() == grads[1].keys() and any("linear_kv" in name for name in grads[0])
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad)


def cross_attention(query_groups: int = 4, **options: Any) -> CrossAttention:
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=query_groups, attention_dropout=0.0,
        **options,
    )  # fmt: skip
    parts = CrossAttentionSubmodules(ColumnParallelLinear, ColumnParallelLinear, DotProductAttention, RowParallelLinear)
    attention = CrossAttention(config, parts, 1, pg_collection=ProcessGroupCollection.single())
    initialise_parameters(attention, seed=3)
    return attention


@pytest.mark.parametrize("query_groups", [4, 2])
def test_cross_attention_sees_the_whole_other_sequence(query_groups: int) -> None:
    attention = cross_attention(query_groups)
    torch.manual_seed(0)
    x, other = torch.randn(5, 2, 32), torch.randn(7, 2, 32)
    query = attention.linear_q(x)[0].unflatten(-1, (4, 8))
    key, value = attention.linear_kv(other)[0].unflatten(-1, (query_groups, 2, 8)).unbind(-2)
    key, value = (y.repeat_interleave(4 // query_groups, dim=2) for y in (key, value))
    weights = (torch.einsum("sbnd,tbnd->bnst", query, key) * 8**-0.5).softmax(-1)
    expected, _ = attention.linear_proj(torch.einsum("bnst,tbnd->sbnd", weights, value).flatten(2))
    torch.testing.assert_close(attention(x, key_value_states=other)[0], expected)
    hidden = torch.zeros(2, 1, 1, 7, dtype=torch.bool)
    hidden[:, :, :, 4:] = True  # padding of the other sequence
    found, _ = attention(x, hidden, key_value_states=other)
    torch.testing.assert_close(found, attention(x, key_value_states=other[:4])[0])


def test_what_cross_attention_has_not() -> None:
    with pytest.raises(ConfigError, match="cross-attention has no --attention-output-gate"):
        cross_attention(attention_output_gate=True)
    with pytest.raises(AssertionError, match="needs key_value_states"):
        cross_attention()(torch.randn(3, 1, 32))
