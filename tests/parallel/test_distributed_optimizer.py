# SPDX-License-Identifier: Apache-2.0
"""ZeRO-1: replicas that divide the optimizer's state train like one process, and keep 1/DP of the state each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.distributed.param_and_grad_buffer import ALIGNMENT
from megatron.core.errors import NonFiniteError
from megatron.core.mesh import RankGrid
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer.megatron_optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.pipeline_parallel.executor import Executor
from megatron.core.pipeline_parallel.schedules import one_f_one_b
from megatron.core.placement import Part, Placement, Split, place
from megatron.core.process_groups_config import ProcessGroupCollection, group_ranks
from tests.parallel.harness import distributed, run_distributed
from tests.parallel.test_data_parallel import MICROBATCHES, gpt, gpt_forward_step, microbatches
from tests.support.run_flags import run_config

STEPS = 4
BOTH_OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 300}
DIVIDED = {"use_distributed_optimizer": True}


def wrapped(
    groups: ProcessGroupCollection, module: nn.Module, **ddp: Any
) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    settings = {"grad_reduce_in_fp32": True} | ddp
    config = DistributedDataParallelConfig(**settings)
    model = DistributedDataParallel(ModelParallelConfig(), config, module, pg_collection=groups)
    optimizer = OptimizerConfig(lr=0.01, weight_decay=0.1, clip_grad=0.5, adam_eps=1e-6)
    return model, get_megatron_optimizer(optimizer, [model], pg_collection=groups)


def train(world_size: int, dtype: torch.dtype, ddp: dict[str, Any], instances: int = 1) -> dict[str, Any]:
    """Some steps of a GPT model on this process's share of every batch."""
    rank = dist.get_rank() if world_size > 1 else 0
    groups = ProcessGroupCollection.build(RankGrid(world_size, optimizer_instances=instances), rank)
    model, optimizer = wrapped(
        groups, gpt(groups, dtype, fused=True), **ddp, num_distributed_optimizer_instances=instances
    )
    executor = Executor([model], groups)
    losses, norms, param_norms = [], [], []
    for step in range(STEPS):
        model.zero_grad_buffer()
        own = microbatches(step, rank, world_size)
        outputs = executor.run(one_f_one_b(0, 1, MICROBATCHES // world_size), gpt_forward_step, own)
        finalize_model_grads([model], pg_collection=groups)
        norms.append(optimizer.step().grad_norm.item())
        param_norms.append(optimizer.params_norm().item())
        mean = torch.stack([entry["lm loss"] for entry in outputs.loss_dicts]).mean()
        if world_size > 1:
            dist.all_reduce(mean)
        losses.append(mean.item() / world_size)
    return {
        "losses": losses,
        "norms": norms,
        "params_norms": param_norms,
        "weights": {name: value.detach().float().numpy() for name, value in model.state_dict().items()},
        "elements": sum(tensor.numel() for kinds in optimizer.named_state().values() for tensor in kinds.values()),
        "allocated": sum(state.tensors["exp_avg"].numel() for state in optimizer._states),
        "buffer": sum(buffer.layout.numel for buffer in model.flat_buffers),
    }


def assert_same(found: dict[str, Any], single: dict[str, Any], rel: float) -> None:
    for numbers in ("losses", "norms", "params_norms"):
        assert found[numbers] == pytest.approx(single[numbers], rel=rel), numbers
    for name, expected in single["weights"].items():
        assert found["weights"][name] == pytest.approx(expected, rel=10 * rel, abs=10 * rel), name


@pytest.fixture(scope="module")
def single() -> dict[str, Any]:
    """One process on the whole batch."""
    return train(1, torch.float32, {})


CASES = [
    (2, {}),
    (3, {}),
    (2, DIVIDED),
    (3, DIVIDED),
    (2, DIVIDED | {"overlap_grad_reduce": True, "num_buckets": 3}),
    (3, DIVIDED | BOTH_OVERLAPS),
    (4, DIVIDED | BOTH_OVERLAPS),
    (2, DIVIDED | {"average_in_collective": True}),
    (2, {"overlap_grad_reduce": True, "bucket_size": 300}),
]


@pytest.mark.parametrize(
    ("world_size", "ddp"), CASES, ids=lambda case: "-".join(case) if isinstance(case, dict) else ""
)
def test_replicas_equal_one_process(single: dict[str, Any], world_size: int, ddp: dict[str, Any]) -> None:
    ranks = run_distributed(train, world_size, world_size, torch.float32, ddp)
    for found in ranks:
        assert_same(found, single, 1e-6)
        for name in single["weights"]:
            assert (found["weights"][name] == ranks[0]["weights"][name]).all(), f"{name} differs between replicas"


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_each_process_keeps_its_share_of_the_state(single: dict[str, Any], world_size: int) -> None:
    ranks = run_distributed(train, world_size, world_size, torch.float32, DIVIDED)
    assert sum(found["elements"] for found in ranks) == single["elements"], "every element has one keeper"
    for found in ranks:
        assert found["allocated"] * world_size == found["buffer"]
        assert found["buffer"] <= single["buffer"] + 2 * ALIGNMENT * world_size, "padding of two buckets"


@pytest.mark.parametrize("world_size", [2, 3])
def test_bfloat16_keeps_divided_main_parameters(world_size: int) -> None:
    whole = run_distributed(train, world_size, world_size, torch.bfloat16, {})[0]
    for found in run_distributed(train, world_size, world_size, torch.bfloat16, DIVIDED | BOTH_OVERLAPS):
        assert_same(found, whole, 1e-6)
        assert found["elements"] < whole["elements"] / world_size * 1.5


@pytest.mark.parametrize(("world_size", "instances"), [(4, 2), (4, 4), (2, 2)])
def test_instances_keep_a_copy_of_the_state_each(single: dict[str, Any], world_size: int, instances: int) -> None:
    ranks = run_distributed(train, world_size, world_size, torch.float32, DIVIDED | BOTH_OVERLAPS, instances)
    assert sum(found["elements"] for found in ranks) == single["elements"] * instances
    for found in ranks:
        assert_same(found, single, 1e-6)


@distributed(world_size=4)
def test_instances_are_groups_of_neighbours() -> None:
    rank = dist.get_rank()
    groups = ProcessGroupCollection.build(RankGrid(4, optimizer_instances=2), rank)
    assert group_ranks(groups.optimizer_shards) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert group_ranks(groups.optimizer_copies) == [rank % 2, rank % 2 + 2]


@pytest.mark.flags("--use-distributed-optimizer", "--num-distributed-optimizer-instances")
@distributed(world_size=4)
def test_flags_divide_the_state() -> None:
    module = nn.Linear(64, 64, bias=False)
    for flags, instances, share in (
        ("", 1, 1),
        ("--use-distributed-optimizer", 1, 4),
        ("--use-distributed-optimizer --num-distributed-optimizer-instances 2", 2, 2),
    ):
        config = run_config(flags, world_size=4)
        assert config.ddp.num_distributed_optimizer_instances == instances
        grid = RankGrid(4, optimizer_instances=config.ddp.num_distributed_optimizer_instances)
        groups = ProcessGroupCollection.build(grid, dist.get_rank())
        model = DistributedDataParallel(config.model, config.ddp, module, pg_collection=groups)
        optimizer = get_megatron_optimizer(config.optimizer, [model], pg_collection=groups)
        assert optimizer.named_state()["weight"]["exp_avg"].numel() == 64 * 64 // share


@pytest.mark.flags("--ddp-average-in-collective")
@distributed(world_size=3)
def test_flag_decides_where_the_mean_is_computed() -> None:
    values = torch.tensor([0.1, 0.7, 0.9])
    groups = ProcessGroupCollection.build(RankGrid(3), dist.get_rank())
    found = {}
    for flags in ("", "--ddp-average-in-collective"):
        config = run_config(f"{flags} --global-batch-size 12", world_size=3)
        module = nn.Linear(50, 1, bias=False)
        model = DistributedDataParallel(config.model, config.ddp, module, pg_collection=groups)
        module.weight.main_grad.copy_((torch.arange(50.0) + 1)[None] * values[groups.dp.rank()])  # type: ignore[operator]
        model.finish_grad_sync()
        found[flags] = module.weight.main_grad.clone()  # type: ignore[operator]
        expected = (torch.arange(50.0) + 1)[None] * values.mean()
        torch.testing.assert_close(found[flags], expected)
    assert not torch.equal(*found.values()), "a third of each, summed, is rounded otherwise than a third of the sum"


@distributed(world_size=2)
def test_one_replicas_nan_stops_all_with_its_name() -> None:
    groups = ProcessGroupCollection.build(RankGrid(2), dist.get_rank())
    torch.manual_seed(0)
    model, optimizer = wrapped(groups, nn.Sequential(nn.Linear(64, 4), nn.LayerNorm(4)), **DIVIDED)
    before = model.flat_buffers[0].param_data.clone()
    if groups.dp.rank() == 1:
        model.module[0].weight.main_grad[0, 0] = float("nan")  # type: ignore[union-attr, index]
    finalize_model_grads([model], pg_collection=groups)
    with pytest.raises(NonFiniteError, match=r"0\.weight is not finite in 1 of 256"):
        optimizer.step()
    assert torch.equal(before, model.flat_buffers[0].param_data)


@distributed(world_size=4)
def test_tied_embeddings_lie_at_other_places_on_two_stages_yet_are_summed_and_counted_once() -> None:
    """PP 2 x DP 2: the first stage has something before the tied weight, the last stage something after it."""
    groups = ProcessGroupCollection.build(RankGrid(4, pp=2), dist.get_rank())
    stage = groups.pp.rank()
    tied, other = nn.Parameter(torch.ones(40, 3)), nn.Parameter(torch.ones(10 + 90 * stage, 7))
    place(tied, Placement("tied", (40, 3), is_copy=stage == 1, partial_grad_axes=("embd",)))
    module = nn.ParameterDict({"other": other, "tied": tied} if stage == 0 else {"tied": tied, "other": other})
    model, optimizer = wrapped(groups, module, **DIVIDED)
    tied.main_grad.fill_(stage + 1.0 + groups.dp.rank())  # type: ignore[attr-defined]
    finalize_model_grads([model], pg_collection=groups)
    # The mean over replicas is 1.5 on the first stage and 2.5 on the last; their sum is the gradient.
    assert optimizer.step().grad_norm.item() == pytest.approx((120 * 4.0**2) ** 0.5, rel=1e-6)
    first = tied.detach().clone()
    dist.broadcast(first, src=0)
    assert torch.equal(first, tied)
    assert (first < 1.0).all()


@distributed(world_size=4)
def test_partly_replicated_shards_are_counted_once() -> None:
    """TP 2 x DP 2: a weight whose last part both tensor-parallel ranks hold."""
    groups = ProcessGroupCollection.build(RankGrid(4, tp=2), dist.get_rank())
    parts = (Part(4, name="query"), Part(30, replicated=True, name="key"))
    module = nn.ParameterDict({"w": nn.Parameter(torch.zeros(32, 5))})
    place(module["w"], Placement("w", (34, 5), (Split(0, "tp", 2, groups.tp.rank(), parts),)))
    model, optimizer = wrapped(groups, module, **DIVIDED)
    module["w"].main_grad.fill_(1.0)  # type: ignore[attr-defined]
    model.finish_grad_sync()
    assert optimizer.step().grad_norm.item() == pytest.approx((34 * 5) ** 0.5, rel=1e-6)


def per_token_gradients(world_size: int, flags: str) -> dict[str, Tensor]:
    rank = dist.get_rank() if world_size > 1 else 0
    config = run_config(flags, world_size=world_size)
    groups = ProcessGroupCollection.build(RankGrid(world_size), rank)
    module = gpt(groups, torch.float32, fused=True)
    model = DistributedDataParallel(config.model, config.ddp, module, pg_collection=groups)
    executor = Executor([model], groups, config.model)
    own = microbatches(0, rank, world_size)
    outputs = executor.run(one_f_one_b(0, 1, MICROBATCHES // world_size), gpt_forward_step, own)
    num_tokens = outputs.num_tokens if config.model.calculate_per_token_loss else None
    finalize_model_grads([model], num_tokens, pg_collection=groups)
    return {name: param.main_grad.numpy() for name, param in module.named_parameters()}  # type: ignore[attr-defined]


@pytest.mark.flags("--calculate-per-token-loss")
def test_per_token_loss_divides_by_the_tokens_of_the_whole_batch() -> None:
    groups = ProcessGroupCollection.single()
    module = gpt(groups, torch.float32, fused=False)
    total = tokens = torch.zeros(())
    for batch in microbatches(0, 0, 1):
        output, loss_func = gpt_forward_step(iter([batch]), module)
        loss, count, _ = loss_func(output)
        total, tokens = total + loss, tokens + count
    (total / tokens).backward()
    expected = {name: param.grad.numpy() for name, param in module.named_parameters()}  # type: ignore[union-attr]
    flag = "--calculate-per-token-loss"
    for found in [per_token_gradients(1, flag), *run_distributed(per_token_gradients, 2, 2, flag)]:
        for name, grad in expected.items():
            assert found[name] == pytest.approx(grad, rel=1e-5, abs=1e-7), name
    means_of_means = per_token_gradients(1, "")
    assert any((abs(means_of_means[name] - grad) > 1e-5).any() for name, grad in expected.items())
