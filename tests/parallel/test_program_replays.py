# SPDX-License-Identifier: Apache-2.0
"""The sequence of converters and reinforcement-learning trainers: Hugging Face weights in by names and marks, packed
microbatches of different lengths through the schedule, a step of the optimizer, weights out again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.parallel.harness import run_distributed

HEADS, GROUPS, WIDTH, LAYERS, VOCABULARY = 8, 4, 4, 2, 64
LENGTHS = ([6, 10], [4, 4])
"""Of the documents in each microbatch; sequence parallelism needs even sums."""


def make_theirs() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, num_key_value_heads=GROUPS, intermediate_size=40,
            num_hidden_layers=LAYERS, vocab_size=VOCABULARY, rms_norm_eps=1e-5, tie_word_embeddings=False,
        )
    ).eval()  # fmt: skip


def rename(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their weights whole under the names of Transformer Engine's modules."""
    found = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": state["model.norm.weight"],
        "output_layer.weight": state["lm_head.weight"],
    }
    for number in range(LAYERS):
        ours, theirs = f"decoder.layers.{number}.", f"model.layers.{number}."
        q, k, v = (state[f"{theirs}self_attn.{name}_proj.weight"] for name in "qkv")
        parts = [part.view(GROUPS, -1, HEADS * WIDTH) for part in (q, k, v)]
        gate_and_up = [state[f"{theirs}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        found |= {
            f"{ours}self_attention.linear_qkv.layer_norm_weight": state[f"{theirs}input_layernorm.weight"],
            f"{ours}self_attention.linear_qkv.weight": torch.cat(parts, 1).flatten(0, 1),
            f"{ours}self_attention.linear_proj.weight": state[f"{theirs}self_attn.o_proj.weight"],
            f"{ours}mlp.linear_fc1.layer_norm_weight": state[f"{theirs}post_attention_layernorm.weight"],
            f"{ours}mlp.linear_fc1.weight": torch.cat(gate_and_up),
            f"{ours}mlp.linear_fc2.weight": state[f"{theirs}mlp.down_proj.weight"],
        }
    return found


def whole_name(name: str) -> str:
    first = mpu.get_pipeline_model_parallel_rank() * (LAYERS // mpu.get_pipeline_model_parallel_world_size())
    start, _, rest = name.removeprefix("module.").partition("layers.")
    number, _, rest = rest.partition(".")
    return f"{start}layers.{int(number) + first}.{rest}" if rest else name.removeprefix("module.")


def load(model: Any, weights: dict[str, Tensor]) -> None:
    """Each tensor scattered from the first rank of the tensor-parallel group, as the marks say."""
    group, size = mpu.get_tensor_model_parallel_group(), mpu.get_tensor_model_parallel_world_size()
    for name, param in model.named_parameters():
        whole = weights[whole_name(name)]
        shards = [whole] * size
        if param.tensor_model_parallel:
            halves = whole.chunk(2) if "linear_fc1.weight" in name else [whole]
            cut = [half.chunk(size, dim=param.partition_dim) for half in halves]
            shards = [torch.cat(parts).contiguous() for parts in zip(*cut, strict=True)]
        received = torch.empty_like(param.data)
        source = dist.get_global_rank(group, 0)
        dist.scatter(received, shards if dist.get_rank() == source else None, src=source, group=group)
        with torch.no_grad():
            param.copy_(received)


def export(model: Any) -> dict[str, Tensor]:
    group, size = mpu.get_tensor_model_parallel_group(), mpu.get_tensor_model_parallel_world_size()
    found = {}
    for name, param in model.named_parameters():
        shards = [torch.empty_like(param.data) for _ in range(size)]
        dist.all_gather(shards, param.data.contiguous(), group=group)
        whole = shards[0]
        if param.tensor_model_parallel:
            halves = [shard.chunk(2) if "linear_fc1.weight" in name else [shard] for shard in shards]
            whole = torch.cat([torch.cat(parts, dim=param.partition_dim) for parts in zip(*halves, strict=True)])
        found[whole_name(name)] = whole
    everyone: list[Any] = [None] * mpu.get_pipeline_model_parallel_world_size()
    dist.all_gather_object(everyone, found, group=mpu.get_pipeline_model_parallel_group())
    return {name: value for one in everyone for name, value in one.items()}


def tokens_of(lengths: list[int]) -> Tensor:
    return torch.arange(sum(lengths)) * 7 % VOCABULARY


def forward_step(batches: Any, model: Any) -> Any:
    lengths = next(batches)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    tokens = tokens_of(lengths)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds,
                             max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))  # fmt: skip
    logits = model(tokens[None], None, None, labels=None, packed_seq_params=packed)

    def loss_func(output: Tensor) -> Any:
        # [s, 1, v / tp]: the loss of the token behind each.
        losses = vocab_parallel_cross_entropy(output.transpose(0, 1).float(), tokens.roll(-1)[:, None])[:, 0]
        return losses.sum() / 10, {"log_probs": -losses.detach()}

    return logits, loss_func


def replay(tp: int, pp: int) -> Any:
    mpu.initialize_model_parallel(
        tp, pp, None, use_sharp=False, context_parallel_size=1, expert_model_parallel_size=1,
        nccl_communicator_config_path=None,
    )  # fmt: skip
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, num_query_groups=GROUPS,
        ffn_hidden_size=40, normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, layernorm_epsilon=1e-5,
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, sequence_parallel=tp > 1,
        variable_seq_lengths=True, batch_p2p_comm=True, pipeline_dtype=torch.float32, seed=9,
    )  # fmt: skip
    network = GPTModel(
        config=config, transformer_layer_spec=get_gpt_decoder_block_spec(config, use_transformer_engine=True),
        vocab_size=VOCABULARY, max_sequence_length=32, position_embedding_type="rope",
        pre_process=mpu.is_pipeline_first_stage(), post_process=mpu.is_pipeline_last_stage(),
    )  # fmt: skip
    model = DistributedDataParallel(
        config=config, module=network, disable_bucketing=False,
        ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=True),
    )  # fmt: skip
    model.broadcast_params()
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, use_distributed_optimizer=True), [model])
    load(model, rename(make_theirs().state_dict()))
    optimizer.reload_model_params()
    exported = export(model)
    assert config.no_sync_func is None
    config.no_sync_func, config.finalize_model_grads_func = model.no_sync, finalize_model_grads
    run = get_forward_backward_func()
    options: dict[str, Any] = {"forward_step_func": forward_step, "model": [model], "num_microbatches": len(LENGTHS),
                               "seq_length": 1, "micro_batch_size": 1}  # fmt: skip
    scores = run(data_iterator=[iter(LENGTHS)], forward_only=True, **options)
    model.zero_grad_buffer()
    optimizer.zero_grad()
    run(data_iterator=[iter(LENGTHS)], forward_only=False, **options)
    _, norm, _ = optimizer.step()
    return exported, [entry["log_probs"] for entry in scores], norm, export(model)


@pytest.mark.filterwarnings("ignore:layers are those of the local spec")
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (1, 1)], ids=["tp2", "pp2", "dp2"])
def test_weights_in_scores_a_step_and_weights_out(tp: int, pp: int) -> None:
    theirs = make_theirs()
    results = run_distributed(replay, 2, tp, pp)
    weights = rename(theirs.state_dict())
    for exported, *_ in results:
        assert set(exported) == set(weights) and all(torch.equal(exported[name], weights[name]) for name in weights)
    log_probs: list[Tensor] = []
    for lengths in LENGTHS:
        documents = tokens_of(lengths).split(lengths)
        logits = torch.cat([theirs(document[None]).logits[0] for document in documents])
        log_probs.append(logits.log_softmax(-1).gather(1, tokens_of(lengths).roll(-1)[:, None])[:, 0])
    for ours, expected in zip(results[-1][1], log_probs, strict=True):
        torch.testing.assert_close(ours, expected.detach(), rtol=0, atol=1e-5)
    loss: Any = -sum(value.sum() for value in log_probs) / 10 / len(LENGTHS)
    loss.backward()
    norm = torch.stack([param.grad.square().sum() for param in theirs.parameters()]).sum().sqrt()
    torch.testing.assert_close(results[0][2], norm, rtol=1e-5, atol=0)
    # Adam's first step: lr * gradient / |gradient|, after clipping, and decay of the matrices.
    after = results[0][3]["output_layer.weight"]
    expected = theirs.lm_head.weight * (1 - 0.1 * 0.01) - 0.1 * theirs.lm_head.weight.grad.sign()
    assert ((after - expected).abs() < 1e-3).float().mean() > 0.98
