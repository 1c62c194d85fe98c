# SPDX-License-Identifier: Apache-2.0
"""Data parallelism on gloo processes: replicas that share a global batch train like one process on all of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.errors import ConfigError, NonFiniteError
from megatron.core.mesh import RankGrid
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer.megatron_optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.pipeline_parallel.executor import Executor
from megatron.core.pipeline_parallel.schedules import one_f_one_b
from megatron.core.placement import Placement, Split, place
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.parallel.harness import distributed, run_distributed
from tests.support.run_flags import run_config

VOCABULARY, WIDTH, LENGTH = 19, 6, 8
MICROBATCHES, STEPS = 12, 5


class TinyLanguageModel(nn.Module):
    """Embedding, a nonlinear layer, a norm, the embedding again as output layer; all parameters carry placements."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.to(dtype)
        for name, param in self.named_parameters():
            place(param, Placement(name, tuple(param.shape)))

    def forward(self, tokens: Tensor) -> Tensor:
        """[b, s + 1] -> per-token loss [b, s]."""
        hidden = self.embedding(tokens[:, :-1])
        hidden = self.norm(hidden + torch.tanh(self.layer(hidden)))
        logits = (hidden @ self.embedding.weight.T).float()
        return nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")


def microbatches(step: int, rank: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of the step's microbatches: tokens [2, LENGTH + 1], loss mask [2, LENGTH]."""
    for index in range(rank, MICROBATCHES, size):
        generator = torch.Generator().manual_seed(1000 * step + index)
        tokens = torch.randint(VOCABULARY // 3, (2, LENGTH + 1), generator=generator)  # a third occurs: learnable
        yield tokens, (torch.rand(2, LENGTH, generator=generator) < 0.8).float()


def forward_step(iterator: Any, model: nn.Module) -> Any:
    tokens, mask = next(iterator)

    def loss_func(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total, count = (output * mask).sum(), mask.sum().int()
        return total, count, {"lm loss": torch.stack([total.detach() / count])}

    return model(tokens), loss_func


def build(groups: ProcessGroupCollection, dtype: torch.dtype) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    module = TinyLanguageModel(dtype)
    if groups.dp_cp.rank() > 0:  # only broadcast_params makes replicas equal
        with torch.no_grad():
            for param in module.parameters():
                param.add_(1.0)
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = DistributedDataParallel(ModelParallelConfig(), ddp_config, module, pg_collection=groups)
    model.broadcast_params()
    config = OptimizerConfig(lr=0.01, weight_decay=0.1, clip_grad=0.1, adam_eps=1e-6)
    return model, get_megatron_optimizer(config, [model], pg_collection=groups)


def train(dtype: torch.dtype, world_size: int) -> dict[str, Any]:
    """Five steps with gradient accumulation on this process's share; losses are means over the replicas."""
    groups = ProcessGroupCollection.build(RankGrid(world_size), dist.get_rank() if world_size > 1 else 0)
    model, optimizer = build(groups, dtype)
    executor = Executor([model], groups)
    rank, size = groups.dp.rank(), groups.dp.size()
    losses, norms = [], []
    for step in range(STEPS):
        model.zero_grad_buffer()
        outputs = executor.run(one_f_one_b(0, 1, MICROBATCHES // size), forward_step, microbatches(step, rank, size))
        finalize_model_grads([model], pg_collection=groups)
        norms.append(optimizer.step().grad_norm.item())
        mean = torch.stack([entry["lm loss"] for entry in outputs.loss_dicts]).mean()
        if size > 1:
            dist.all_reduce(mean)
        losses.append(mean.item() / size)
    weights = {name: param.detach().float().numpy() for name, param in model.module.named_parameters()}
    mains = {name: kinds.get("main_param", torch.zeros(0)).numpy() for name, kinds in optimizer.named_state().items()}
    return {"losses": losses, "norms": norms, "weights": weights, "mains": mains}


@pytest.mark.parametrize("world_size", [2, 3])
def test_replicas_equal_one_process_on_the_whole_batch(world_size: int) -> None:
    single = train(torch.float32, 1)
    ranks = run_distributed(train, world_size, torch.float32, world_size)
    for found in ranks:
        assert found["losses"] == pytest.approx(single["losses"], rel=1e-6)
        assert found["norms"] == pytest.approx(single["norms"], rel=1e-6)
        for name, expected in single["weights"].items():
            assert found["weights"][name] == pytest.approx(expected, rel=1e-6, abs=1e-6), name
            assert (found["weights"][name] == ranks[0]["weights"][name]).all(), f"{name} differs between replicas"
    assert single["losses"][-1] < single["losses"][0]


def test_bfloat16_replicas_equal_one_process_through_main_parameters() -> None:
    single = train(torch.bfloat16, 1)
    for found in run_distributed(train, 2, torch.bfloat16, 2):
        assert found["losses"] == pytest.approx(single["losses"], rel=1e-3)
        assert found["norms"] == pytest.approx(single["norms"], rel=1e-3)
        for name, expected in single["mains"].items():
            # A sum in another order may round a bfloat16 weight the other way: one step of lr 0.01 at most differs.
            assert found["mains"][name] == pytest.approx(expected, abs=1e-3), name


@distributed(world_size=2)
def test_one_replicas_nan_stops_all_and_changes_nothing() -> None:
    groups = ProcessGroupCollection.build(RankGrid(2), dist.get_rank())
    model, optimizer = build(groups, torch.float32)
    before = model.flat_buffers[0].param_data.clone()
    if groups.dp.rank() == 1:
        model.module.layer.weight.main_grad[0, 0] = float("nan")  # type: ignore[union-attr, index]
    finalize_model_grads([model], pg_collection=groups)
    with pytest.raises(NonFiniteError, match="layer.weight is not finite in 1 of 36"):
        optimizer.step()
    assert torch.equal(before, model.flat_buffers[0].param_data)


@distributed(world_size=2)
def test_partial_gradients_are_summed_and_the_norm_counts_each_element_once() -> None:
    """Two tensor-parallel ranks: a weight cut in two, and a norm of which each rank saw half of the tokens."""
    groups = ProcessGroupCollection.build(RankGrid(2, tp=2), dist.get_rank())
    rank = groups.tp.rank()
    module = nn.ParameterDict({"cut": nn.Parameter(torch.zeros(2, 3)), "norm": nn.Parameter(torch.zeros(5))})
    place(module["cut"], Placement("cut", (4, 3), (Split(0, "tp", 2, rank),)))
    place(module["norm"], Placement("norm", (5,), partial_grad_axes=("tp",)))
    config = DistributedDataParallelConfig()
    model = DistributedDataParallel(ModelParallelConfig(), config, module, pg_collection=groups)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.0), [model], pg_collection=groups)
    module["cut"].main_grad.fill_(rank + 1.0)  # type: ignore[attr-defined]
    module["norm"].main_grad.fill_(rank + 1.0)  # type: ignore[attr-defined]
    finalize_model_grads([model], pg_collection=groups)
    assert (module["norm"].main_grad == 3.0).all()  # type: ignore[attr-defined]
    assert (module["cut"].main_grad == rank + 1.0).all()  # type: ignore[attr-defined]
    expected = (6 * 1.0 + 6 * 4.0 + 5 * 9.0) ** 0.5
    assert optimizer.step().grad_norm.item() == pytest.approx(expected, rel=1e-6)


@distributed(world_size=2)
def test_tied_embeddings_on_two_stages_stay_equal_and_are_counted_once() -> None:
    groups = ProcessGroupCollection.build(RankGrid(2, pp=2), dist.get_rank())
    stage = groups.pp.rank()
    module = nn.ParameterDict({"weight": nn.Parameter(torch.ones(4, 3))})
    place(module["weight"], Placement("weight", (4, 3), is_copy=stage == 1, partial_grad_axes=("embd",)))
    config = DistributedDataParallelConfig()
    model = DistributedDataParallel(ModelParallelConfig(), config, module, pg_collection=groups)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1), [model], pg_collection=groups)
    module["weight"].main_grad.fill_(stage + 1.0)  # type: ignore[attr-defined]
    finalize_model_grads([model], pg_collection=groups)
    assert optimizer.step().grad_norm.item() == pytest.approx((12 * 9.0) ** 0.5, rel=1e-6)
    other = model.flat_buffers[0].param_data.clone()
    dist.broadcast(other, src=0)
    assert torch.equal(other, model.flat_buffers[0].param_data)
    assert optimizer.params_norm().item() == pytest.approx(other.norm().item(), rel=1e-6)


# ---- the real model


def gpt(groups: ProcessGroupCollection, dtype: torch.dtype, fused: bool) -> nn.Module:
    """A Llama-style model with tied embeddings, so that one weight gets gradients in two ways."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=24,
        normalization="RMSNorm", gated_linear_unit=True, add_bias_linear=False, bf16=dtype == torch.bfloat16,
        params_dtype=dtype, gradient_accumulation_fusion=fused, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
        pg_collection=groups,
    )


def gpt_forward_step(iterator: Any, model: nn.Module) -> Any:
    tokens, mask = next(iterator)
    positions = torch.arange(LENGTH).expand(2, -1)

    def loss_func(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total, count = (output * mask).sum(), mask.sum().int()
        return total, count, {"lm loss": torch.stack([total.detach() / count])}

    return model(tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous()), loss_func


def train_gpt(world_size: int, dtype: torch.dtype, fused: bool) -> dict[str, Any]:
    groups = ProcessGroupCollection.build(RankGrid(world_size), dist.get_rank() if world_size > 1 else 0)
    module = gpt(groups, dtype, fused)
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = DistributedDataParallel(ModelParallelConfig(), ddp_config, module, pg_collection=groups)
    config = OptimizerConfig(lr=0.01, weight_decay=0.1, clip_grad=0.5, adam_eps=1e-6)
    optimizer = get_megatron_optimizer(config, [model], pg_collection=groups)
    executor = Executor([model], groups)
    rank, size = groups.dp.rank(), groups.dp.size()
    norms = []
    for step in range(STEPS):
        model.zero_grad_buffer()
        executor.run(one_f_one_b(0, 1, MICROBATCHES // size), gpt_forward_step, microbatches(step, rank, size))
        finalize_model_grads([model], pg_collection=groups)
        norms.append(optimizer.step().grad_norm.item())
    weights = {name: param.detach().float().numpy() for name, param in model.module.named_parameters()}
    return {"norms": norms, "weights": weights}


@pytest.mark.parametrize("fused", [True, False])
def test_gpt_replicas_equal_one_process_whichever_way_gradients_reach_the_buffer(fused: bool) -> None:
    single = train_gpt(1, torch.float32, fused=False)
    for found in run_distributed(train_gpt, 2, 2, torch.float32, fused):
        assert found["norms"] == pytest.approx(single["norms"], rel=2e-6)
        for name, expected in single["weights"].items():
            assert found["weights"][name] == pytest.approx(expected, rel=1e-5, abs=2e-6), name


@pytest.mark.flags("--ddp-reduce-scatter-with-fp32-accumulation")
@distributed(world_size=4)
def test_16_bit_gradients_are_summed_in_float32() -> None:
    """256, and three times 1: bfloat16 keeps 8 binary digits, so where 256 comes first each partial sum is 256."""
    base = "--bf16 --grad-reduce-in-bf16 --use-distributed-optimizer"
    found = {}
    for flags in ("", " --ddp-reduce-scatter-with-fp32-accumulation"):
        config = run_config(base + flags, world_size=4)
        groups = ProcessGroupCollection.build(RankGrid(4), dist.get_rank())
        per_token = dataclasses.replace(config.model, calculate_per_token_loss=True)  # a sum, not a mean
        model = DistributedDataParallel(per_token, config.ddp, TinyLanguageModel(torch.bfloat16), pg_collection=groups)
        (buffer,) = model.flat_buffers
        assert buffer.grad_data.dtype == torch.bfloat16
        turn = torch.arange(buffer.grad_data.numel()) % 4  # every process has the 256 of some elements
        buffer.grad_data.copy_(torch.where(turn == dist.get_rank(), 256.0, 1.0))
        model.finish_grad_sync()
        own = torch.cat([buffer.grad_data[start:stop] for start, stop in buffer.owned])
        found[flags] = (own == 260.0).all().item()
    assert list(found.values()) == [False, True], "259 rounds to 260"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("", "needs --use-distributed-optimizer"),
        ("--use-distributed-optimizer --num-distributed-optimizer-instances 2", "second sum rounds; use 1"),
    ],
)
def test_where_float32_sums_cannot_be(flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run_config(f"--ddp-reduce-scatter-with-fp32-accumulation {flags}", world_size=4)
