# SPDX-License-Identifier: Apache-2.0
"""Schedules as data, and the executor that runs them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from megatron.core.errors import ConfigError
from megatron.core.pipeline_parallel import forward_backward
from megatron.core.pipeline_parallel.executor import Executor
from megatron.core.pipeline_parallel.forward_backward import get_forward_backward_func
from megatron.core.pipeline_parallel.schedules import Action, forward_only, one_f_one_b
from megatron.core.process_groups_config import ProcessGroupCollection

SINGLE = ProcessGroupCollection.single()


def test_one_stage_is_the_plain_loop() -> None:
    assert "".join(f"{a.kind}{a.microbatch}" for a in one_f_one_b(0, 1, 3)) == "F0B0F1B1F2B2"


def test_first_of_three_stages_warms_up_with_two_forwards() -> None:
    assert "".join(f"{a.kind}{a.microbatch}" for a in one_f_one_b(0, 3, 4)) == "F0F1F2B0F3B1B2B3"


@given(st.integers(1, 8), st.integers(1, 20), st.data())
def test_every_microbatch_goes_forward_then_backward_and_few_are_in_flight(
    stages: int, microbatches: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, stages - 1))
    actions = one_f_one_b(rank, stages, microbatches)
    forwards = [a.microbatch for a in actions if a.kind == "F"]
    backwards = [a.microbatch for a in actions if a.kind == "B"]
    assert forwards == backwards == list(range(microbatches))
    in_flight, peak = 0, 0
    for action in actions:
        in_flight += 1 if action.kind == "F" else -1
        assert in_flight >= 0
        peak = max(peak, in_flight)
    assert peak == min(stages - rank, microbatches)
    assert [a for a in actions if a.kind == "F"] == forward_only(rank, stages, microbatches)


@pytest.mark.parametrize("schedule", [one_f_one_b, forward_only])
def test_a_step_without_microbatches_is_refused(schedule: Any) -> None:
    with pytest.raises(ConfigError, match="0 microbatches"):
        schedule(0, 1, 0)


# ---- executor


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    for index in range(count):
        generator = torch.Generator().manual_seed(index)
        mask = torch.zeros(4)
        mask[: index + 1] = 1
        yield torch.randn(4, 3, generator=generator), mask


def three_results(iterator: Any, model: nn.Module) -> Any:
    x, mask = next(iterator)
    output = model(x).squeeze(-1)

    def loss_func(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total = (output * mask).sum()
        tokens = mask.sum().int()
        return total, tokens, {"lm loss": torch.stack([total, tokens.float()])}

    return output, loss_func


def two_results(iterator: Any, model: nn.Module) -> Any:
    output, loss_func = three_results(iterator, model)

    def mean_loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        total, tokens, losses = loss_func(output)
        return total / tokens, losses

    return output, mean_loss


def expected_gradient(model: nn.Linear, count: int) -> Tensor:
    losses = [(model(x).squeeze(-1) * mask).sum() / mask.sum() for x, mask in batches(count)]
    (gradient,) = torch.autograd.grad(torch.stack(losses).mean(), [model.weight])
    return gradient


@pytest.mark.parametrize("forward_step", [two_results, three_results])
def test_gradient_is_that_of_the_mean_over_microbatches_of_the_mean_over_tokens(forward_step: Any) -> None:
    model = nn.Linear(3, 1)
    outputs = Executor([model], SINGLE).run(one_f_one_b(0, 1, 3), forward_step, batches(3))
    torch.testing.assert_close(model.weight.grad, expected_gradient(model, 3))
    assert [losses["lm loss"][1].item() for losses in outputs.loss_dicts] == [1, 2, 3]
    assert not any(losses["lm loss"].requires_grad for losses in outputs.loss_dicts)
    assert int(outputs.num_tokens) == (6 if forward_step is three_results else 0)


def test_microbatch_without_tokens_gives_no_gradient_and_no_nan() -> None:
    model = nn.Linear(3, 1)
    empty = iter([(torch.ones(4, 3), torch.zeros(4))])
    Executor([model], SINGLE).run(one_f_one_b(0, 1, 1), three_results, empty)
    assert (model.weight.grad == 0).all()  # type: ignore[union-attr]


def test_graph_of_a_microbatch_is_freed_before_the_next_one() -> None:
    """In memory is one microbatch's graph, not the step's."""
    model, alive = nn.Linear(3, 1), []
    seen: list[Any] = []

    def forward_step(iterator: Any, model: nn.Module) -> Any:
        alive.append(sum(reference() is not None for reference in seen))
        output, loss_func = three_results(iterator, model)
        seen.append(weakref.ref(output))
        return output, loss_func

    Executor([model], SINGLE).run(one_f_one_b(0, 1, 3), forward_step, batches(3))
    assert alive == [0, 0, 0]


def test_forward_only_keeps_no_graph() -> None:
    model = nn.Linear(3, 1)
    outputs = Executor([model], SINGLE).run(forward_only(0, 1, 2), three_results, batches(2), forward_only=True)
    assert len(outputs.loss_dicts) == 2
    assert model.weight.grad is None


def test_what_cannot_run_is_refused() -> None:
    executor = Executor([nn.Linear(3, 1)], SINGLE)
    with pytest.raises(ValueError, match="'W'"):
        executor.run([Action("F", 0), Action("W", 0)], three_results, batches(1))
    with pytest.raises(ValueError, match="its forward has not run"):
        executor.run([Action("B", 0)], three_results, batches(1))
    with pytest.raises(ValueError, match="found 1 values"):
        executor.run([Action("F", 0)], lambda it, model: (torch.ones(1), lambda output: (output,)), None)


def test_upstream_signature_runs_a_step_and_finalizes() -> None:
    class Config:
        finalized: list[Any] = []

        @staticmethod
        def finalize_model_grads_func(chunks: Any, num_tokens: Any = None, pg_collection: Any = None) -> None:
            Config.finalized.append(chunks)

    model = nn.Linear(3, 1)
    model.config = Config()  # type: ignore[assignment]
    settings: dict[str, Any] = {"model": model, "seq_length": 4, "micro_batch_size": 1, "decoder_seq_length": None}
    run = get_forward_backward_func()
    losses = run(
        forward_step_func=three_results, data_iterator=batches(3), num_microbatches=3, forward_only=False, **settings
    )
    assert [list(entry) for entry in losses] == [["lm loss"]] * 3
    torch.testing.assert_close(model.weight.grad, expected_gradient(model, 3))
    assert Config.finalized == [[model]]
    run(forward_step_func=three_results, data_iterator=batches(1), num_microbatches=1, forward_only=True, **settings)
    assert len(Config.finalized) == 1


def test_non_loss_data_is_collected() -> None:
    def forward_step(iterator: Any, model: nn.Module) -> Any:
        return model(next(iterator)[0]), lambda output, non_loss_data: output.shape

    found = get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=batches(2), model=[nn.Linear(3, 1)], num_microbatches=2,
        seq_length=4, micro_batch_size=1, forward_only=True, collect_non_loss_data=True,
    )  # fmt: skip
    assert found == [(4, 1)] * 2


def test_an_executor_serves_all_steps_of_a_model_and_a_copy_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(forward_backward, "Executor", lambda *args: made.append(args) or Executor(*args))

    def step(model: nn.Module, count: int = 1) -> None:
        get_forward_backward_func()(
            forward_step_func=three_results, data_iterator=batches(count), model=model, num_microbatches=count,
            seq_length=4, micro_batch_size=1,
        )  # fmt: skip

    model = nn.Linear(3, 1)
    for count in (1, 2):
        step(model, count)
    assert len(made) == 1
    copied = copy.deepcopy(model)
    step(copied)
    assert len(made) == 2 and list(model.state_dict()) == ["weight", "bias"]
    assert made[1][0] == [copied]


def test_losses_are_scaled_as_the_models_config_says() -> None:
    plain, scaled = nn.Linear(3, 1), nn.Linear(3, 1)
    scaled.load_state_dict(plain.state_dict())
    scaled.config = SimpleNamespace(grad_scale_func=lambda loss: 8 * loss)  # type: ignore[assignment]
    for model in (plain, scaled):
        get_forward_backward_func()(
            forward_step_func=three_results, data_iterator=batches(2), model=model, num_microbatches=2, seq_length=4,
            micro_batch_size=1,
        )  # fmt: skip
    torch.testing.assert_close(scaled.weight.grad, 8 * plain.weight.grad)  # type: ignore[operator]
