# SPDX-License-Identifier: Apache-2.0
"""Overlap: collectives really start before backward ends, and forward waits for a layer's parameters, not for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.bucket import Bucket
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.mesh import RankGrid
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer.megatron_optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.pipeline_parallel.executor import Executor
from megatron.core.pipeline_parallel.schedules import one_f_one_b
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.parallel.harness import distributed
from tests.support.run_flags import run_config

WIDTH, LAYERS = 8, 4


class Tower(nn.Module):
    """Layers in a list, then an output layer: forward writes down when each runs, backward when its input's gradient is
    there."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.events = events

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate([*self.layers, self.output]):
            if x.requires_grad:
                x.register_hook(lambda grad, index=index: self.events.append(f"backward {index}"))
            x = layer(x).tanh()
            self.events.append(f"forward {index}")
        return x


def record(monkeypatch_events: list[str], buckets: list[Bucket]) -> None:
    """Write down when each bucket's collectives start and when they have been waited for."""
    for number, bucket in enumerate(buckets):
        for method, event in (("start_reduce", "reduce"), ("start_gather", "gather")):
            _recorded(bucket, method, f"{event} {number}", monkeypatch_events)
        finish = bucket.finish_gather

        def finish_gather(bucket: Bucket = bucket, number: int = number, finish: Any = finish) -> None:
            if bucket._gathering is not None:
                monkeypatch_events.append(f"gathered {number}")
            finish()

        bucket.finish_gather = finish_gather  # type: ignore[method-assign]


def _recorded(bucket: Bucket, method: str, event: str, events: list[str]) -> None:
    run = getattr(bucket, method)

    def recorded() -> None:
        events.append(event)
        run()

    setattr(bucket, method, recorded)


def forward_step(inputs: Any, model: nn.Module) -> Any:
    def loss_func(output: torch.Tensor) -> Any:
        loss = output.square().mean()
        return loss, {"loss": loss}

    return model(next(inputs)), loss_func


def one_step(flags: str, microbatches: int = 2) -> list[str]:
    """The events of a step and of the forward after it. Bucket i holds layer i, the last one the output layer."""
    events: list[str] = []
    config = run_config(flags, world_size=2)
    groups = ProcessGroupCollection.build(RankGrid(2), dist.get_rank())
    model = DistributedDataParallel(config.model, config.ddp, Tower(events), pg_collection=groups)
    optimizer = get_megatron_optimizer(config.optimizer, [model], pg_collection=groups)
    record(events, [bucket for buffer in model.flat_buffers for bucket in buffer.buckets])
    executor = Executor([model], groups)
    model.zero_grad_buffer()
    inputs = iter(torch.ones(microbatches, 3, WIDTH) * (1 + groups.dp.rank()))
    executor.run(one_f_one_b(0, 1, microbatches), forward_step, inputs)
    events.append("backward done")
    model.finish_grad_sync()
    optimizer.step()
    events.append("updated")
    model(torch.ones(3, WIDTH))
    return events


@pytest.mark.flags("--overlap-grad-reduce")
@distributed(world_size=2)
def test_reductions_start_during_the_last_microbatchs_backward() -> None:
    events = one_step("--overlap-grad-reduce --ddp-bucket-size 1")
    last = len(events) - events[::-1].index("backward 1")
    first_backward = events[: events.index("backward 1")]
    assert not [event for event in first_backward if event.startswith("reduce")], (
        "the first microbatch only accumulates"
    )
    assert [event for event in events if event.startswith("reduce")] == [f"reduce {i}" for i in (4, 3, 2, 1, 0)]
    for layer in (4, 3, 2):
        assert events.index(f"reduce {layer}") < last, "its reduction started before backward reached the first layers"
    assert events.index("reduce 0") < events.index("backward done")


@distributed(world_size=2)
def test_without_overlap_they_start_after_backward() -> None:
    events = one_step("--ddp-bucket-size 1")
    assert [event for event in events if event.startswith("reduce")] == ["reduce 0"], "one bucket"
    assert events.index("reduce 0") > events.index("backward done")


@pytest.mark.flags("--overlap-param-gather")
@distributed(world_size=2)
def test_forward_waits_for_each_layers_parameters_only() -> None:
    flags = "--use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 1"
    plain = one_step(flags)
    assert [event for event in plain if event.startswith("gathered")] == [f"gathered {i}" for i in range(5)]
    assert plain.index("gathered 4") < plain.index("updated")
    events = one_step(f"{flags} --overlap-param-gather")
    events = events[events.index("updated") - 1 :]
    assert events[:2] == ["gather 0", "updated"]
    # One gather under way at a time, beside the layers whose parameters are there.
    expected = [text for i in range(5) for text in (f"gathered {i}", f"gather {i + 1}", f"forward {i}")]
    expected.remove("gather 5")
    assert events[2:] == expected


@distributed(world_size=2)
def test_parameters_are_whole_for_whoever_reads_them_after_an_update() -> None:
    groups = ProcessGroupCollection.build(RankGrid(2), dist.get_rank())
    settings = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    ddp = DistributedDataParallelConfig(**settings)
    model = DistributedDataParallel(ModelParallelConfig(), ddp, Tower([]), pg_collection=groups)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1), [model], pg_collection=groups)
    model(torch.ones(3, WIDTH)).sum().backward()
    model.finish_grad_sync()
    optimizer.step()
    state = model.state_dict()
    for value in state.values():
        other = value.clone()
        dist.broadcast(other, src=0)
        assert torch.equal(other, value)
    assert optimizer.params_norm().item() == pytest.approx(
        torch.cat([value.flatten() for value in state.values()]).norm().item(), rel=1e-6
    )


class UsesHalf(nn.Module):
    """On one rank, a layer gets no gradient at all."""

    def __init__(self, skip: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.skip = skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.a(x)
        return self.c(hidden if self.skip else self.b(hidden))  # type: ignore[no-any-return]


@distributed(world_size=2)
def test_the_order_of_buckets_is_the_same_where_a_parameter_gets_no_gradient() -> None:
    groups = ProcessGroupCollection.build(RankGrid(2), dist.get_rank())
    ddp = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1)
    module = UsesHalf(skip=groups.dp.rank() == 1)
    model = DistributedDataParallel(ModelParallelConfig(), ddp, module, pg_collection=groups)
    model.zero_grad_buffer()
    model.enable_grad_sync()
    model(torch.ones(3, WIDTH)).sum().backward()
    model.finish_grad_sync()
    for param in module.parameters():
        other = param.main_grad.clone()  # type: ignore[attr-defined]
        dist.broadcast(other, src=0)
        assert torch.equal(other, param.main_grad)  # type: ignore[attr-defined]
        assert other.any()


@distributed(world_size=2)
def test_a_gradient_after_the_last_is_a_mistake_that_is_told() -> None:
    groups = ProcessGroupCollection.build(RankGrid(2), dist.get_rank())
    ddp = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1)
    model = DistributedDataParallel(ModelParallelConfig(), ddp, nn.Linear(2, 2), pg_collection=groups)
    model.enable_grad_sync()
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(AssertionError, match="before the last microbatch"):
        model(torch.ones(1, 2)).sum().backward()
    model.finish_grad_sync()
    model.zero_grad_buffer()
    model(torch.ones(1, 2)).sum().backward()


def test_a_single_process_pays_for_no_overlap() -> None:
    ddp = DistributedDataParallelConfig(overlap_grad_reduce=True)
    model = DistributedDataParallel(ModelParallelConfig(), ddp, nn.Linear(2, 2, bias=False))
    assert not model.overlaps_grad_reduce
    hooks = model.module.weight._post_accumulate_grad_hooks  # type: ignore[union-attr]
    assert [hook.__name__ for hook in hooks.values()] == ["_add_to_main_grad"]
