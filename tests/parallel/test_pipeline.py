# SPDX-License-Identifier: Apache-2.0
"""Pipelines train like one process: every schedule, tied and untied, uneven, few microbatches; and evaluation."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.mesh import RankGrid
from megatron.core.pipeline_parallel.executor import Executor
from megatron.core.pipeline_parallel.forward_backward import get_forward_backward_func
from megatron.core.pipeline_parallel.programs import Pipeline
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.loop import evaluate
from megatron.training.verify.comparison import Tolerances, compare
from megatron.training.verify.parity import Trace, join
from megatron.training.verify.parity_layouts import parse_layout
from tests.parallel.harness import distributed, run_distributed
from tests.parallel.pipeline_runs import prepared_run, share

SCHEDULES = [
    "pp2",
    "pp4",
    "pp2,vpp2",
    "pp2,--pipeline-schedule=gpipe",
    "pp2,--pipeline-schedule=zb-h1",
    "pp4,--pipeline-schedule=zb-h1",
    "pp2,--pipeline-schedule=zb-v",
    "pp2,--no-overlap-p2p-communication",
    "pp2,dp2,dist-opt,overlap,--defer-embedding-wgrad-compute",
    "pp2,vpp2,--defer-embedding-wgrad-compute,--wgrad-deferral-limit=1",
    "pp2,--decoder-first-pipeline-num-layers=1",
    "pp4,--pipeline-model-parallel-layout=E|tt|tt|L",
    "pp2,dp2,dist-opt,overlap,--pipeline-schedule=zb-v",
]


@functools.cache
def reference(style: str, flags: str) -> Trace:
    return join([share(style, ",".join(filter(None, ("1", flags))))])


def assert_same_run(style: str, layout: str, flags: str = "") -> None:
    text = ",".join(filter(None, (layout, flags)))
    found = join(run_distributed(share, parse_layout(text).world_size, style, text))
    assert compare(reference(style, flags), found) == []


@pytest.mark.flags("--pipeline-model-parallel-size")
@pytest.mark.parametrize("style", ["tied", "untied"])
@pytest.mark.parametrize("layout", SCHEDULES)
def test_pipeline_is_the_same_run(style: str, layout: str) -> None:
    assert_same_run(style, layout)


@pytest.mark.parametrize(
    ("style", "layout"),
    [
        ("tied", "pp3,--pipeline-model-parallel-layout=E||ttttL"),
        ("untied", "pp2,--pipeline-model-parallel-layout=E||tttt|L"),
        ("untied", "pp3,dp2,fsdp2,--pipeline-model-parallel-layout=E||ttttL"),
    ],
)
def test_a_stage_without_layers_hands_on(style: str, layout: str) -> None:
    """A process, or one of its chunks, without a single parameter."""
    assert_same_run(style, layout)


@pytest.mark.parametrize(("schedule", "batch"), [("1f1b", 1), ("gpipe", 2), ("1f1b", 5), ("zb-h1", 2)])
def test_few_and_odd_microbatches(schedule: str, batch: int) -> None:
    """Fewer microbatches than stages: part of the pipeline never works at the same time."""
    assert_same_run("tied", f"pp3,--pipeline-schedule={schedule}", f"--num-layers=3,--global-batch-size={batch}")


def test_one_microbatch_in_a_folded_pipeline() -> None:
    assert_same_run("tied", "pp2,--pipeline-schedule=zb-v", "--global-batch-size=1")


def test_interleaving_in_groups_that_end_short() -> None:
    group = "--microbatch-group-size-per-virtual-pipeline-stage=3"
    assert_same_run("untied", f"pp2,vpp2,{group}", "--global-batch-size=5")


def test_bfloat16_hidden_states_travel_in_bfloat16() -> None:
    """The same operations in the same format; the norm is summed in another order, so a weight may round otherwise."""
    found = join(run_distributed(share, 2, "untied", "pp2,--bf16"))
    assert compare(reference("untied", "--bf16"), found, Tolerances(loss=1e-4, grad=1e-2, weight=1e-2)) == []


# ---- evaluation


def evaluated(style: str, text: str) -> dict[str, float]:
    run = prepared_run(style, text)
    try:
        return evaluate(run, run.data.open("validation", 0), 2)
    finally:
        run.data.close()


@pytest.mark.parametrize("layout", ["pp2", "pp2,vpp2", "pp2,--pipeline-schedule=zb-v"])
def test_evaluation_gives_the_same_loss(layout: str) -> None:
    flags = "--eval-iters=2,--eval-interval=100"
    expected = evaluated("tied", f"1,{flags}")
    text = f"{layout},{flags}"
    for found in run_distributed(evaluated, 2, "tied", text):
        assert found == pytest.approx(expected, rel=1e-6)


# ---- what a stage keeps


class Stage(nn.Module):
    """One linear layer with upstream's way of taking hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.config = TransformerConfig(
            num_layers=2, hidden_size=4, num_attention_heads=1, pipeline_model_parallel_size=2
        )
        self.layer = nn.Linear(4, 4)
        self.hidden_states: Tensor | None = None

    def set_input_tensor(self, hidden_states: Tensor | None) -> None:
        self.hidden_states = hidden_states

    def forward(self, batch: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]."""
        return self.layer(batch if self.hidden_states is None else self.hidden_states)  # type: ignore[no-any-return]


def batches(count: int) -> Iterator[Tensor]:
    for index in range(count):
        yield torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(index))


def forward_step(iterator: Any, model: nn.Module) -> Any:
    def loss_func(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = output.square().mean()
        return loss, {"loss": loss}

    return model(next(iterator)), loss_func


@distributed(world_size=2)
def test_a_stage_keeps_no_output_that_it_has_sent() -> None:
    """All microbatches are in flight at once (GPipe), their graphs stay, their outputs do not."""
    import torch.distributed as dist

    groups = ProcessGroupCollection.build(RankGrid(2, pp=2), dist.get_rank())
    model = Stage()
    outputs: list[Any] = []

    def remember(iterator: Any, model: nn.Module) -> Any:
        output, loss_func = forward_step(iterator, model)
        alive.append(sum(reference() is not None for reference in outputs))
        outputs.append(weakref.ref(output))
        return output, loss_func

    alive: list[int] = []
    executor = Executor([model], groups, model.config, activation_shape=(3, 2, 4))
    program = Pipeline(executor.stages, "gpipe").program(groups.pp.rank(), 6)
    executor.run(program, remember, batches(6))
    if groups.is_first_stage:
        assert max(alive) == 0


def test_upstream_door_runs_a_pipeline() -> None:
    torch.manual_seed(1)
    first, second = Stage(), Stage()
    x = [second.layer(first.layer(batch)).square().mean() for batch in batches(3)]
    torch.stack(x).mean().backward()
    states = [stage.state_dict() for stage in (first, second)]
    grads = run_distributed(through_the_door, 2, states)
    assert first.layer.weight.grad is not None and second.layer.weight.grad is not None
    torch.testing.assert_close(torch.tensor(grads[0]), first.layer.weight.grad)
    torch.testing.assert_close(torch.tensor(grads[1]), second.layer.weight.grad)


def through_the_door(states: list[dict[str, Tensor]]) -> Any:
    import torch.distributed as dist

    groups = ProcessGroupCollection.build(RankGrid(2, pp=2), dist.get_rank())
    model = Stage()
    model.load_state_dict(states[groups.pp.rank()])
    losses = get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=batches(3), model=[model], num_microbatches=3, seq_length=3,
        micro_batch_size=2, pg_collection=groups,
    )  # fmt: skip
    assert len(losses) == (3 if groups.is_last_stage else 0)
    assert model.layer.weight.grad is not None
    return model.layer.weight.grad.tolist()
