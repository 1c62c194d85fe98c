# SPDX-License-Identifier: Apache-2.0
"""The sequence of converters and reinforcement-learning trainers: Hugging Face weights in by names and marks, packed
microbatches of different lengths through the schedule, a step of the optimizer, weights out again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import (
    StrictHandling,
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.parallel.harness import run_distributed

HEADS, GROUPS, WIDTH, LAYERS, VOCABULARY = 8, 4, 4, 2, 64
LOCAL_EXPERTS = 2
LENGTHS = ([6, 10], [4, 4])
"""Of the documents in each microbatch; sequence parallelism needs even sums."""


def make_theirs(experts: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "hidden_size": HEADS * WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS,
        "intermediate_size": 40, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }  # fmt: skip
    if experts:
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        return MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=experts, rope_parameters=rope)).eval()
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


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
        found |= {
            f"{ours}self_attention.linear_qkv.layer_norm_weight": state[f"{theirs}input_layernorm.weight"],
            f"{ours}self_attention.linear_qkv.weight": torch.cat(parts, 1).flatten(0, 1),
            f"{ours}self_attention.linear_proj.weight": state[f"{theirs}self_attn.o_proj.weight"],
        }
        norm, router = state[f"{theirs}post_attention_layernorm.weight"], state.get(f"{theirs}mlp.gate.weight")
        if router is not None:  # experts: a weight each
            found |= {f"{ours}pre_mlp_layernorm.weight": norm, f"{ours}mlp.router.weight": router}
            for layer, name in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
                stacked = state[f"{theirs}mlp.experts.{name}"]
                found |= {f"{ours}mlp.experts.{layer}.weight{i}": weight for i, weight in enumerate(stacked)}
            continue
        gate_and_up = [state[f"{theirs}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        found |= {
            f"{ours}mlp.linear_fc1.layer_norm_weight": norm,
            f"{ours}mlp.linear_fc1.weight": torch.cat(gate_and_up),
            f"{ours}mlp.linear_fc2.weight": state[f"{theirs}mlp.down_proj.weight"],
        }
    return found


def whole_name(name: str) -> str:
    first = mpu.get_pipeline_model_parallel_rank() * (LAYERS // mpu.get_pipeline_model_parallel_world_size())
    start, _, rest = name.removeprefix("module.").partition("layers.")
    number, _, rest = rest.partition(".")
    if found := re.fullmatch(r"(mlp.experts.linear_fc\d.weight)(\d+)", rest):
        rest = f"{found[1]}{int(found[2]) + mpu.get_expert_model_parallel_rank() * LOCAL_EXPERTS}"
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
    for group in (mpu.get_pipeline_model_parallel_group(), mpu.get_expert_model_parallel_group()):
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, found, group=group)
        found = {name: value for one in everyone for name, value in one.items()}
    return found


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


def move_out_and_back(model: Any, optimizer: Any) -> None:
    """As verl does between phases: weights and gradients off the flat tensors, state off the optimizer, and back."""
    for buffer in [*model.buffers, *model.expert_parallel_buffers]:
        kept, sizes = buffer.param_data.clone(), []
        for flat in (buffer.param_data, buffer.grad_data):
            sizes.append(flat.storage().size())
            flat.storage().resize_(0)
        for flat, size in zip((buffer.param_data, buffer.grad_data), sizes, strict=True):
            flat.storage().resize_(size)
        buffer.param_data.copy_(kept)
        buffer.grad_data.zero_()
    for chained in optimizer.chained_optimizers:
        for group in chained.shard_fp32_from_float16_groups:
            for param in group:
                param.data = param.data.clone()
        for state in chained.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].clone()


def make_state(model: Any, optimizer: Any, scheduler: Any, is_loading: bool) -> dict[str, Any]:
    """What verl's checkpoint manager hands to dist_checkpointing."""
    of_model = model.module.sharded_state_dict()
    ranks = (mpu.get_pipeline_model_parallel_rank(), mpu.get_tensor_model_parallel_rank())
    shape = (mpu.get_pipeline_model_parallel_world_size(), mpu.get_tensor_model_parallel_world_size())
    replica = mpu.get_data_parallel_rank(with_context_parallel=True)
    drawn = [{"torch_rng_state": torch.get_rng_state()}]
    return {
        "model": of_model,
        "optimizer": optimizer.sharded_state_dict(of_model, is_loading=is_loading),
        "lr_scheduler": scheduler.state_dict(),
        "rng_state": ShardedObject("rng_state", drawn, shape, ranks, replica_id=replica),
    }


def list_state(model: Any, optimizer: Any) -> list[Tensor]:
    state = [value for entry in optimizer.optimizer.state.values() for value in entry.values()]
    return [torch.as_tensor(value).detach().clone() for value in [*model.parameters(), *state, torch.get_rng_state()]]


def save_and_load(model: Any, optimizer: Any, scheduler: Any, path: Path) -> None:
    """Save all, spoil all, load all: through the strategies, as verl wraps them."""
    replicas = mpu.get_data_parallel_group(with_context_parallel=True)
    expected, steps = list_state(model, optimizer), scheduler.num_steps
    path.mkdir(parents=True, exist_ok=True)
    save = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy("torch_dist"), replicas)
    dist_checkpointing.save(
        make_state(model, optimizer, scheduler, is_loading=False), str(path), sharded_strategy=save,
        async_sharded_save=False, validate_access_integrity=True,
    )  # fmt: skip
    assert dist_checkpointing.check_is_distributed_checkpoint(str(path))
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    for state in optimizer.optimizer.state.values():
        state["exp_avg"].zero_()
    scheduler.num_steps = 0
    torch.manual_seed(0)
    load = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(str(path)), replicas)
    found = dist_checkpointing.load(
        make_state(model, optimizer, scheduler, is_loading=True), str(path), sharded_strategy=load,
        strict=StrictHandling.RAISE_ALL,  # keys of all stages together
    )  # fmt: skip
    model.module.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    scheduler.load_state_dict(found["lr_scheduler"])
    torch.set_rng_state(found["rng_state"][0]["torch_rng_state"])
    assert scheduler.num_steps == steps
    assert all(map(torch.equal, list_state(model, optimizer), expected))


def replay(tp: int, pp: int, ep: int, directory: Path) -> Any:
    mpu.initialize_model_parallel(
        tp, pp, None, use_sharp=False, context_parallel_size=1, expert_model_parallel_size=ep,
        nccl_communicator_config_path=None,
    )  # fmt: skip
    experts: dict[str, Any] = {}
    if ep > 1:
        experts = {"num_moe_experts": LOCAL_EXPERTS * ep, "moe_router_topk": 2, "moe_ffn_hidden_size": 40,
                   "moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "alltoall",
                   "expert_model_parallel_size": ep, "moe_grouped_gemm": True}  # fmt: skip
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, num_query_groups=GROUPS,
        ffn_hidden_size=40, normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, layernorm_epsilon=1e-5,
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, sequence_parallel=tp > 1,
        variable_seq_lengths=True, batch_p2p_comm=True, pipeline_dtype=torch.float32, seed=9, **experts,
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
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.1, max_lr=0.1, min_lr=0.0, lr_warmup_steps=0, lr_decay_steps=40,
        lr_decay_style="constant", start_wd=0.01, end_wd=0.01, wd_incr_steps=40, wd_incr_style="constant",
    )  # fmt: skip
    load(model, rename(make_theirs(experts.get("num_moe_experts", 0)).state_dict()))
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
    scheduler.step(increment=2)
    after = export(model)
    move_out_and_back(model, optimizer)
    assert all(torch.equal(value, after[name]) for name, value in export(model).items())
    save_and_load(model, optimizer, scheduler, directory)
    again = run(data_iterator=[iter(LENGTHS)], forward_only=True, **options)
    mpu.destroy_model_parallel()
    return exported, [[entry["log_probs"] for entry in told] for told in (scores, again)], norm, after


LAYOUTS = {"tp2": (2, 1, 1), "pp2": (1, 2, 1), "dp2": (1, 1, 1), "ep2": (1, 1, 2)}


def replay_all(directory: Path) -> dict[str, Any]:
    if dist.get_world_size() == 1:
        return {"alone": replay(1, 1, 1, directory / "alone")}
    return {name: replay(*sizes, directory / name) for name, sizes in LAYOUTS.items()}


def score(theirs: Any) -> list[Tensor]:
    """Log-probabilities of each microbatch's next tokens, by the definition."""
    found = []
    for lengths in LENGTHS:
        documents = tokens_of(lengths).split(lengths)
        logits = torch.cat([theirs(document[None]).logits[0] for document in documents])
        found.append(logits.log_softmax(-1).gather(1, tokens_of(lengths).roll(-1)[:, None])[:, 0])
    return found


def check(results: list[Any], experts: int) -> None:
    theirs = make_theirs(experts)
    weights = rename(theirs.state_dict())
    for exported, *_ in results:
        assert set(exported) == set(weights) and all(torch.equal(exported[name], weights[name]) for name in weights)
    log_probs = score(theirs)
    for ours, expected in zip(results[-1][1][0], log_probs, strict=True):
        torch.testing.assert_close(ours, expected.detach(), rtol=0, atol=1e-5)
    loss: Any = -sum(value.sum() for value in log_probs) / 10 / len(LENGTHS)
    loss.backward()
    norm = torch.stack([param.grad.square().sum() for param in theirs.parameters()]).sum().sqrt()
    torch.testing.assert_close(torch.as_tensor(results[0][2]), norm, rtol=1e-5, atol=0)
    # Adam's first step, clipped to a norm of 1, with decay of the matrices.
    gradients = rename({name: param.grad / norm.clamp_min(1.0) for name, param in theirs.named_parameters()})
    for name, after in results[0][3].items():
        gradient, before = gradients[name], weights[name]
        decayed = before * (1 - 0.1 * 0.01) if before.dim() > 1 else before
        expected = decayed - 0.1 * gradient / (gradient.abs() + 1e-8)
        # Where a gradient is nothing but rounding its sign decides alone.
        clear = gradient.abs() > 1e-5
        assert clear.float().mean() > (0.2 if "embedding" in name else 0.8), name  # few tokens are looked up
        torch.testing.assert_close(after[clear], expected.detach()[clear], rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore:layers are those of the local spec")
def test_weights_in_scores_a_step_a_checkpoint_and_weights_out(tmp_path: Path) -> None:
    together = run_distributed(replay_all, 2, tmp_path)
    (alone,) = run_distributed(replay_all, 1, tmp_path)
    check([alone["alone"]], 0)
    for name, (*_, ep) in LAYOUTS.items():
        check([found[name] for found in together], LOCAL_EXPERTS * ep if ep > 1 else 0)
