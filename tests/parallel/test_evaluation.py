"""Evaluation with batches of its own, and an exit that one rank is asked for, under several processes."""

from __future__ import annotations

import os
import signal

import pytest

from megatron.training.loop import train
from megatron.training.run import Evaluation, Hook, Run
from megatron.training.verify.parity import open_local_run
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import STYLES, own_rank, training


class Watch(Hook):
    """Keeps the losses of evaluations; the last rank gets a signal in the second iteration."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step_start(self, run: Run) -> None:
        if run.progress.iteration == 1 and run.groups.world.rank() == run.groups.world.size() - 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    def on_evaluate(self, run: Run, evaluation: Evaluation) -> None:
        self.losses.append(evaluation.losses["lm loss"])


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
