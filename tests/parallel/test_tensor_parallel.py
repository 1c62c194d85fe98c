# SPDX-License-Identifier: Apache-2.0
"""Parallel layers and the whole GPTModel on two gloo ranks against one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron.core.collectives import all_gather_object, all_reduce
from megatron.core.mesh import RankGrid
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.placement import get_placement
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.sequences.state import SequenceState
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from tests.parallel.harness import distributed, run_distributed

LLAMA = {
    "normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": "silu", "num_query_groups": 2,
    "add_bias_linear": False,
}  # fmt: skip


def two_ranks() -> ProcessGroupCollection:
    return ProcessGroupCollection.build(RankGrid(2, tp=2), dist.get_rank())


def model_and_grads(style: str, sequence_parallel: bool, groups: ProcessGroupCollection) -> dict[str, torch.Tensor]:
    """The losses under "loss", and the gradient of every parameter by name: the full one, joined from all ranks."""
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, ffn_hidden_size=24, hidden_dropout=0.0,
        attention_dropout=0.0, sequence_parallel=sequence_parallel, tensor_model_parallel_size=groups.tp.size(),
        **(LLAMA if style == "llama" else {}),
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_layer_local_spec(), 32, 8, share_embeddings_and_output_weights=style == "gpt2",
        position_embedding_type="rope" if style == "llama" else "learned_absolute", pg_collection=groups,
    )  # fmt: skip
    ids = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(0))
    losses = model(ids[:, :-1], torch.arange(8).expand(2, -1), labels=ids[:, 1:])
    losses.mean().backward()
    found = {"loss": losses.detach()}
    for name, param in model.named_parameters():
        grad = param.grad
        assert grad is not None, name
        placement = get_placement(param)
        if "tp" in placement.partial_grad_axes:
            all_reduce(grad, groups.tp)
        found[name] = placement.join(all_gather_object(grad, groups.tp)) if placement.splits else grad
    return found


def shards_worker(style: str, sequence_parallel: bool) -> dict[str, torch.Tensor]:
    return model_and_grads(style, sequence_parallel, two_ranks())


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_gpt_on_two_ranks_equals_one(style: str, sequence_parallel: bool) -> None:
    expected = model_and_grads(style, False, ProcessGroupCollection.single())
    for found in run_distributed(shards_worker, 2, style, sequence_parallel):
        assert found.keys() == expected.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@distributed(world_size=2)
def test_cross_entropy_of_split_vocabulary() -> None:
    groups = two_ranks()
    generator = torch.Generator().manual_seed(1)
    logits, target = torch.randn(3, 2, 12, generator=generator), torch.randint(12, (3, 2), generator=generator)
    for smoothing in (0.0, 0.2):
        whole = logits.clone().requires_grad_()
        alone = ProcessGroupCollection.single().tp
        expected = vocab_parallel_cross_entropy(whole * 1.0, target, smoothing, tp_group=alone)
        expected.sum().backward()
        own = logits.chunk(2, dim=-1)[dist.get_rank()].clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(own * 1.0, target, smoothing, tp_group=groups.tp)
        loss.sum().backward()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(own.grad, whole.grad.chunk(2, dim=-1)[dist.get_rank()])


@distributed(world_size=2)
def test_mappings_and_their_transposes() -> None:
    group, rank = two_ranks().tp, dist.get_rank()
    whole = torch.arange(8.0).view(4, 2) + 1
    own_rows, own_columns = whole.chunk(2, dim=0)[rank], whole.chunk(2, dim=1)[rank]
    weight = torch.randn(4, 2, generator=torch.Generator().manual_seed(2))  # the same on both ranks

    def check(mapping, own, expected, expected_grad):  # type: ignore[no-untyped-def]
        leaf = own.clone().requires_grad_()
        output = mapping(leaf, group=group)
        torch.testing.assert_close(output, expected)
        (output * weight[: output.shape[0], : output.shape[1]]).sum().backward()
        torch.testing.assert_close(leaf.grad, expected_grad)

    check(gather_from_tensor_model_parallel_region, own_columns, whole, weight.chunk(2, dim=1)[rank])
    both_columns = torch.cat([weight[:, :1]] * 2, dim=1)
    check(scatter_to_tensor_model_parallel_region, whole, own_columns, both_columns)
    both_rows = torch.cat([weight[:2]] * 2)
    check(scatter_to_sequence_parallel_region, whole, own_rows, both_rows)
    # Each rank goes on with its own work: the gradients of both are summed.
    check(gather_from_sequence_parallel_region, own_rows, whole, 2 * weight.chunk(2)[rank])
    check(reduce_scatter_to_sequence_parallel_region, whole, 2 * own_rows, both_rows)


# ---- generation with latent attention: every rank keeps the same latent vectors


def latent_logits(sequence_parallel: bool, groups: ProcessGroupCollection, ends: list[int]) -> torch.Tensor:
    """Logits [b, s, v] of eight tokens that are read in parts which end there."""
    config = MLATransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, q_lora_rank=7, kv_lora_rank=6, qk_head_dim=5,
        qk_pos_emb_head_dim=4, v_head_dim=3, qk_layernorm=True, sequence_parallel=sequence_parallel,
        tensor_model_parallel_size=groups.tp.size(), init_method_std=0.3,
    )  # fmt: skip
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(multi_latent_attention=True),
        32,
        8,
        parallel_output=False,
        pg_collection=groups,
    )
    ids, positions = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(0)), torch.arange(8)[None]
    cache, parts, first = SequenceState(len(ids), 8), [], 0
    with torch.no_grad():
        for end in ends:
            cache.begin([end - first] * len(ids))
            parts.append(model.eval()(ids[:, first:end], positions[:, first:end], inference_context=cache))
            first = end
    return torch.cat(parts, dim=1)


def latent_logits_on_two_ranks(sequence_parallel: bool, ends: list[int]) -> torch.Tensor:
    return latent_logits(sequence_parallel, two_ranks(), ends)


@pytest.mark.parametrize(("sequence_parallel", "ends"), [(False, [5, 6, 8]), (True, [4, 6, 8])])
def test_generation_with_latent_vectors(sequence_parallel: bool, ends: list[int]) -> None:
    expected = latent_logits(False, ProcessGroupCollection.single(), [8])
    for found in run_distributed(latent_logits_on_two_ranks, 2, sequence_parallel, ends):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
