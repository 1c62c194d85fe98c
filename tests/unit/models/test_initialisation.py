# SPDX-License-Identifier: Apache-2.0
"""Initial weights are a function of (seed, name, index): the same whatever the layout."""

from __future__ import annotations

import pytest
import torch

from megatron.core.errors import ConfigError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.placement import get_placement
from megatron.core.tensor_parallel.parameters import by_blocks_of_rows, normal
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.pretend_groups import pretend

VOCAB_SIZE = 48


def config(**changed: object) -> TransformerConfig:
    return TransformerConfig(
        **{"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 48,
           "gated_linear_unit": True, "activation_func": "silu", **changed}
    )  # fmt: skip


def gpt(rank: int = 0, tp: int = 1, pp: int = 1, tied: bool = False, **changed: object) -> GPTModel:
    """A model, or the part of it on one rank of a layout."""
    groups = pretend(rank, tp=tp, pp=pp)
    return GPTModel(
        config(**changed),
        get_gpt_layer_local_spec(),
        VOCAB_SIZE,
        16,
        pre_process=groups.is_first_stage,
        post_process=groups.is_last_stage,
        share_embeddings_and_output_weights=tied,
        pg_collection=groups,
    )


@pytest.mark.parametrize("size", [2, 4])  # 4: more ranks than the two query groups
def test_tensor_parallel_shards_are_slices_of_the_whole(size: int) -> None:
    whole = {get_placement(p).name: p.detach() for p in gpt().parameters()}
    ranks = [gpt(rank, tp=size) for rank in range(size)]
    split = 0
    for name, full in whole.items():
        shards = [model.get_parameter(name).detach() for model in ranks]
        placement = get_placement(ranks[0].get_parameter(name))
        assert placement.name == name and placement.full_shape == tuple(full.shape)
        for rank, shard in enumerate(shards):
            assert torch.equal(shard, get_placement(ranks[rank].get_parameter(name)).take(full)), name
        if placement.splits:
            split += 1
            assert torch.equal(placement.join(shards), full), name
    # Embedding and output layer; in each of 4 layers qkv and fc1 with their biases, proj and fc2.
    assert split == 1 + 4 * 6 + 1


@pytest.mark.parametrize("chunk_of", [2, 4])
def test_pipeline_stages_hold_layers_under_their_global_names(chunk_of: int) -> None:
    whole = {get_placement(p).name: p.detach() for p in gpt().parameters()}
    found = {}
    for stage in range(chunk_of):
        for param in gpt(stage, pp=chunk_of).parameters():
            assert torch.equal(param, whole[get_placement(param).name])
            found[get_placement(param).name] = param
    assert found.keys() == whole.keys()


def test_layers_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ConfigError, match="--num-layers 4 does not divide over --pipeline-model-parallel-size 3"):
        gpt(pp=3)
    with pytest.raises(ConfigError, match="--num-attention-heads 4 cannot be split"):
        gpt(tp=3)
    with pytest.raises(ConfigError, match="--num-query-groups 2 must be a multiple or a divisor of --tensor-model"):
        gpt(tp=3, num_attention_heads=6, kv_channels=8)


def test_tied_embeddings_across_stages() -> None:
    """The last stage's copy starts equal under the owner's name, is no second parameter, and gradients are summed."""
    owner = gpt(pp=2, tied=True).embedding.word_embeddings.weight
    copy = gpt(1, pp=2, tied=True).output_layer.weight
    assert torch.equal(owner, copy)
    assert get_placement(copy).name == get_placement(owner).name == "embedding.word_embeddings.weight"
    assert get_placement(copy).is_copy and not get_placement(owner).is_copy
    assert get_placement(copy).partial_grad_axes == get_placement(owner).partial_grad_axes == ("embd",)


def test_custom_initialisers() -> None:
    model = gpt(
        init_method=lambda tensor, generator: tensor.fill_(2.0),
        output_layer_init_method=lambda tensor, generator: tensor.fill_(3.0),
    )
    layer = model.decoder.layers[1]
    assert (layer.mlp.linear_fc1.weight == 2).all() and (model.embedding.word_embeddings.weight == 2).all()
    assert (layer.mlp.linear_fc2.weight == 3).all() and (layer.self_attention.linear_proj.weight == 3).all()


def test_bfloat16_weights_are_the_rounded_float32_ones() -> None:
    for wide, narrow in zip(gpt().parameters(), gpt(bf16=True).parameters(), strict=True):
        assert torch.equal(wide.bfloat16(), narrow)


def test_padding_of_the_vocabulary_leaves_the_other_rows_alone() -> None:
    """Also where the rows that are added change how many numbers the generator is asked for at once."""
    initialise = by_blocks_of_rows(normal(1.0), rows=4)
    small, large = (torch.empty(rows, 3) for rows in (6, 9))
    for table in (small, large):
        initialise(table, torch.Generator().manual_seed(1))
    assert torch.equal(small, large[:6])
    assert large.std() > 0.5 and not torch.equal(large[:4], large[4:8])
