# SPDX-License-Identifier: Apache-2.0
"""Programs that make groups of their own and never call initialize_model_parallel: nothing asks for current ones."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.errors import ConfigError
from megatron.core.mesh import RankGrid
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.multi_token_prediction import get_mtp_layer_offset
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build, get_transformer_layer_offset
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.launch.initialize import initialize
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import training

FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_layer_freq": [0, 1],
                "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
    "latent": {"multi_latent_attention": True, "kv_lora_rank": 12, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4,
               "v_head_dim": 6, "rope_type": "rope", "mtp_num_layers": 1},
    "linear": {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": [1, 0],
               "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
               "linear_value_head_dim": 8},
}  # fmt: skip


def train(family: str, sizes: dict[str, int]) -> list[float]:
    """Losses of each microbatch and gradient norm, of two steps."""
    groups = None
    if dist.get_world_size() > 1:
        groups = ProcessGroupCollection.build(RankGrid(2, **sizes), dist.get_rank())
    assert not ProcessGroupCollection.has_current()
    tp, pp = sizes.get("tp", 1), sizes.get("pp", 1)
    config = TransformerConfig(
        num_layers=2, hidden_size=24, num_attention_heads=6, ffn_hidden_size=40, hidden_dropout=0.0,
        attention_dropout=0.0, add_bias_linear=False, tensor_model_parallel_size=tp, sequence_parallel=tp > 1,
        pipeline_model_parallel_size=pp, expert_model_parallel_size=sizes.get("ep", 1),
        pipeline_dtype=torch.float32, seed=5, **FAMILIES[family],
    )  # fmt: skip
    model_parallel_cuda_manual_seed(5, pg_collection=groups)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, pg_collection=groups)
    if pp == 1:
        assert get_num_layers_to_build(config) == 2 and get_transformer_layer_offset(config) == 0
        assert get_mtp_layer_offset(config) == 0
        assert PipelineParallelLayerLayout("EttL", 1).get_num_layers_to_build() == 2
    assert get_transformer_layer_offset(config, pp_rank=pp - 1) == 2 - 2 // pp
    model = GPTModel(
        config, block, vocab_size=64, max_sequence_length=16, position_embedding_type="rope", pg_collection=groups,
        pre_process=groups is None or groups.is_first_stage, post_process=groups is None or groups.is_last_stage,
        mtp_block_spec=get_gpt_mtp_block_spec(config, block),
    )  # fmt: skip
    chunk = DistributedDataParallel(config, DistributedDataParallelConfig(), model, pg_collection=groups)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01), [chunk], pg_collection=groups)
    config.finalize_model_grads_func = finalize_model_grads
    tokens = (torch.arange(2 * 16).view(2, 16) * 7) % 64
    replicas = 1 if groups is None else groups.dp.size()
    rank = 0 if groups is None else groups.dp.rank()

    def forward_step(batches: Any, model: Any) -> Any:
        row = next(batches)[None]
        losses = model(row, torch.arange(16)[None], None, labels=row.roll(-1, 1))
        return losses, lambda output: (output.mean(), {"loss": output.detach().mean()})

    found = []
    for _ in range(2):
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        told = get_forward_backward_func(schedule_pg_collection=groups)(
            forward_step_func=forward_step, data_iterator=[iter(tokens[rank::replicas])], model=[chunk],
            num_microbatches=2 // replicas, seq_length=16, micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        _, norm, _ = optimizer.step()
        found += [*(float(entry["loss"]) for entry in told), float(norm)]
    return found


LAYOUTS = [("dense", "tp"), ("dense", "pp"), ("dense", "dp"), ("experts", "ep"), ("latent", "tp"), ("linear", "tp")]


def train_all() -> dict[str, list[float]]:
    if dist.get_world_size() == 1:
        return {family: train(family, {}) for family in FAMILIES}
    return {f"{family} {axis}": train(family, {} if axis == "dp" else {axis: 2}) for family, axis in LAYOUTS}


def test_groups_of_ones_own_are_all_that_a_program_needs() -> None:
    (alone,) = run_distributed(train_all, 1)
    first, last = run_distributed(train_all, 2)
    for family, axis in LAYOUTS:
        expected, name = alone[family], f"{family} {axis}"
        if axis in ("dp", "ep"):  # each has the losses of its own rows, and both the norm of all gradients
            expected = sorted([*expected, *expected[2::3]])
            assert sorted(first[name] + last[name]) == pytest.approx(expected, rel=2e-5), name
        else:
            assert last[name] == pytest.approx(expected, rel=2e-5), name


def test_a_stage_is_asked_for_by_its_rank_without_groups() -> None:
    config = TransformerConfig(
        num_layers=5, hidden_size=24, num_attention_heads=6, pipeline_model_parallel_size=2,
        num_layers_in_first_pipeline_stage=3, pipeline_dtype=torch.float32,
    )  # fmt: skip
    assert [len(get_gpt_decoder_block_spec(config, pp_rank=rank).layer_specs) for rank in (0, 1)] == [3, 2]
    other = ProcessGroupCollection.pretend(RankGrid(2, pp=2), 1)
    assert len(get_gpt_decoder_block_spec(config, pg_collection=other).layer_specs) == 2


def join_twice() -> tuple[int, int, str]:
    """Sizes of the tensor-parallel group and of the job, and what is said where the environment has other ranks."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1")  # of the launcher, which nobody answers any more
    config, _ = training("--tensor-model-parallel-size 2", "tp2")
    process = initialize(config)
    assert process.presence is None and dist.get_rank() == process.groups.tp.rank()
    os.environ["WORLD_SIZE"] = "3"
    with pytest.raises(ConfigError) as caught:
        initialize(config)
    return process.groups.tp.size(), dist.get_world_size(), str(caught.value)


def test_processes_that_a_program_has_joined_itself_are_not_joined_again() -> None:
    first, last = run_distributed(join_twice, 2)
    assert first[:2] == last[:2] == (2, 2)
    assert "rank 1 of 2" in last[2] and "WORLD_SIZE=3" in last[2]
