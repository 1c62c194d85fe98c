# SPDX-License-Identifier: Apache-2.0
"""Evaluation with batches of its own, and an exit that one rank is asked for, under several processes."""

from __future__ import annotations

import os
import signal

import pytest

from megatron.training.loop import train
from megatron.training.run import Evaluation, Hook, Run
from megatron.training.verify.parity import open_local_run
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import EXPERTS, STYLES, own_rank, training


class Watch(Hook):
    """Keeps the losses of evaluations; the last rank gets a signal in the second iteration."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.texts: list[str] = []

    def on_step_start(self, run: Run) -> None:
        if run.progress.iteration == 1 and run.groups.world.rank() == run.groups.world.size() - 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    def on_evaluate(self, run: Run, evaluation: Evaluation) -> None:
        self.losses.append(evaluation.losses["lm loss"])
        self.texts += [evaluation.generated] if evaluation.generated else []


def evaluated(layout: str) -> tuple[int, str | None, list[float]]:
    flags = (
        "--eval-interval=1,--eval-iters=2,--eval-global-batch-size=8,--eval-micro-batch-size=4,"
        "--exit-signal-handler,--exit-signal=SIGUSR1"
    )
    config, recipe = training(STYLES["gpt2"], f"{layout},{flags}")
    with open_local_run(config, recipe, own_rank(config)) as run:
        watch = Watch()
        run.hooks.hooks.append(watch)  # type: ignore[attr-defined]
        train(run)
        return run.progress.iteration, run.stop_reason, watch.losses


@pytest.mark.flags("--eval-global-batch-size", "--eval-micro-batch-size", "--exit-signal-handler", "--exit-signal")
@pytest.mark.parametrize("layout", ["pp2", "dp2"])
def test_evaluation_and_exit_are_those_of_one_process(layout: str) -> None:
    """A rank that looked a moment before the signal came does one more step, and then so do all."""
    iterations, reason, losses = evaluated("1")
    assert (iterations, reason, len(losses)) == (2, "exiting program after signal SIGUSR1", 2)
    first, second = run_distributed(evaluated, 2, layout)
    assert first[:2] == second[:2] and first[0] in (2, 3, 4), "the same iteration on all ranks"
    for found_iterations, found_reason, found_losses in (first, second):
        assert found_reason == reason and len(found_losses) == found_iterations
        assert found_losses[:2] == pytest.approx(losses, rel=1e-5)


def generated(style: str, layout: str) -> tuple[list[str], list[float]]:
    flags = (
        "--train-iters=2,--lr-warmup-iters=0,--eval-interval=1,--eval-iters=1,--eval-sample-prompt=7,"
        "--eval-sample-tokens=6"
    )
    config, recipe = training((STYLES | EXPERTS)[style], f"{layout},{flags}")
    with open_local_run(config, recipe, own_rank(config)) as run:
        watch = Watch()
        run.hooks.hooks = [*run.hooks.hooks, watch]  # type: ignore[attr-defined]
        watch.on_step_start = lambda run: None  # type: ignore[method-assign]
        train(run)
        return watch.texts, watch.losses


@pytest.mark.flags("--eval-sample-prompt", "--eval-sample-tokens")
@pytest.mark.parametrize(
    ("style", "layout"),
    [("llama", "dp2,fsdp2"), ("moe", "dp2,ep2,dist-opt,--overlap-param-gather,--overlap-grad-reduce")],
)
def test_text_is_generated_where_parameters_or_experts_are_divided(style: str, layout: str) -> None:
    texts, losses = generated(style, "1")
    assert len(texts) == 2 and all(text.startswith("7 ") for text in texts)
    assert all(len(text.split()) <= 1 + 6 for text in texts), "the usual number of tokens is larger"
    for found_texts, found_losses in run_distributed(generated, 2, style, layout):
        assert found_texts == texts
        assert found_losses == pytest.approx(losses, rel=1e-5)
