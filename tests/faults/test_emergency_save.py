# SPDX-License-Identifier: Apache-2.0
"""The last completed iteration is saved when a rank fails or is lost, if what is left holds all of it, and never
otherwise."""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.errors import DriftError
from megatron.core.mesh import RankGrid
from megatron.training.loop import train
from megatron.training.rerun.emergency_save import find_stand_in
from megatron.training.run import Hook, Run, StepResult
from tests.faults.two_ranks import find_saved, read_tensors
from tests.functional.pretrain_runs import TINY, metrics, run_ranks
from tests.support.tiny_training import prepare, replace_forward_step


def _train(root: Path, *flags: str) -> Any:
    places = ["--save", root, "--load", root, "--metrics-dir", root / "metrics"]
    return run_ranks([*TINY, *places, "--hidden-dropout", "0.1", *flags], 2)


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        ("--global-batch-size 8", "kill:1,4"),
        ("--tensor-model-parallel-size 2", "exception:1,4"),
        ("--use-distributed-optimizer", "exception:0,4"),
    ],
)
def test_a_run_goes_on_from_the_iteration_before_the_failure(layout: str, fault: str, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert _train(whole, *layout.split(), "--save-interval", "3").returncode == 0
    failed = _train(parts, *layout.split(), "--save-interval", "100", "--simulate-fault", fault)
    assert failed.returncode != 0
    of_whom = " of 1 ranks, 1 of 2 being lost" if fault.startswith("kill") else ""
    assert f"note: iteration 3 is saved in an emergency save{of_whom}\n" in failed.stderr
    assert find_saved(parts) == 3
    _assert_equal(read_tensors(parts, 3), read_tensors(whole, 3))
    assert _train(parts, *layout.split(), "--save-interval", "100").returncode == 0
    _assert_equal(read_tensors(parts, 5), read_tensors(whole, 5))
    assert metrics(parts / "metrics") == metrics(whole / "metrics")
    assert (parts / "ledger.jsonl").read_text() == (whole / "ledger.jsonl").read_text()


def _assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [key for key, tensor in found.items() if not torch.equal(tensor, expected[key])] == []


def test_what_only_the_lost_rank_had_is_named_and_nothing_is_saved(tmp_path: Path) -> None:
    failed = _train(tmp_path, "--use-distributed-optimizer", "--simulate-fault", "kill:1,4")
    sentence = (
        "note: iteration 3 was not saved in an emergency save: rank 1 is lost, and none that is left has its part of "
        "the optimizer's state (--use-distributed-optimizer)"
    )
    assert sentence in failed.stderr
    assert find_saved(tmp_path) == 0


class _Failing(Hook):
    """Does something at the end of one step."""

    def __init__(self, iteration: int, action: Any) -> None:
        self.iteration, self.action = iteration, action

    def on_step_start(self, run: Run) -> None:
        if run.progress.iteration == self.iteration:
            self.action(run)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        pass


def _fail(save: Path, action: Any, *flags: str) -> Run:
    """A run of one process, in the fourth step of which the action raises."""
    run = prepare("--save", save, "--load", save, "--save-interval", "100", *flags)
    run.hooks.hooks.append(_Failing(3, action))  # type: ignore[attr-defined]
    try:
        with pytest.raises((ValueError, DriftError)):
            train(run)
    finally:
        run.hooks.on_close(run)
    return run


def _raise(error: Exception) -> Any:
    def act(run: Run) -> None:
        raise error

    return act


def _spoil(run: Run) -> None:
    next(run.model[0].parameters()).data.view(-1)[0] = math.nan
    raise ValueError("something else")


def _fail_within_the_update(run: Run) -> None:
    def refuse(_: Any) -> None:
        raise ValueError("in the middle")

    run.optimizer.call_after_update(refuse)


def _fail_in_the_forward_pass(run: Run) -> None:
    usual = run.recipe.forward_step

    def forward_step(*arguments: Any) -> Any:
        usual(*arguments)  # draws random numbers
        raise ValueError("after it has begun")

    replace_forward_step(run, forward_step)


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (_raise(ValueError("nothing is wrong with the state")), None),
        (_fail_in_the_forward_pass, None),
        (_raise(DriftError("replicas differ")), "the error puts the state itself in question"),
        (_spoil, "holds values that are not finite"),
        (_fail_within_the_update, "an update of the weights was under way"),
    ],
)
def test_only_a_state_that_is_whole_and_good_is_saved(
    action: Any, reason: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dropout = ["--hidden-dropout", "0.1"]
    _fail(tmp_path / "failed", action, *dropout)
    errors = capsys.readouterr().err
    if reason is not None:
        assert reason in errors
        assert find_saved(tmp_path / "failed") == 0
        return
    whole = prepare("--save", tmp_path / "whole", "--train-iters", "3", "--lr-decay-iters", "6", *dropout)
    train(whole)
    whole.hooks.on_close(whole)
    _assert_equal(read_tensors(tmp_path / "failed", 3), read_tensors(tmp_path / "whole", 3))


def test_an_evaluation_that_was_not_finished_is_not_saved_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = prepare("--save", tmp_path, "--eval-interval", "2", "--eval-iters", "1", "--save-interval", "100")

    class FailingEvaluation(Hook):
        def on_evaluate(self, run: Run, evaluation: Any) -> None:
            raise ValueError("the evaluation")

    run.hooks.hooks.append(FailingEvaluation())  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="the evaluation"):
        train(run)
    run.hooks.on_close(run)
    assert "the evaluation after iteration 2 was not finished" in capsys.readouterr().err
    assert find_saved(tmp_path) == 0


def test_a_stand_in_has_all_that_the_lost_rank_had(tmp_path: Path) -> None:
    """In layouts drawn by chance: it is in the same groups of replicas; where none is left in one of them, that is
    said."""
    generator = random.Random(11)
    for _ in range(60):
        tp, pp, ep, copies = (generator.choice((1, 2)) for _ in range(4))
        dp = generator.choice((2, 4))
        divides, has_experts = generator.random() < 0.5, ep > 1
        grid = RankGrid(tp * pp * dp, tp=tp, pp=pp, ep=ep, optimizer_instances=copies if divides else 1)
        config = prepare().config
        config.model.num_moe_experts = 2 * ep if has_experts else None
        config.ddp.use_distributed_optimizer = divides
        lost = generator.sample(range(grid.world_size), generator.randint(1, grid.world_size - 1))
        present = [rank for rank in range(grid.world_size) if rank not in lost]
        for rank in lost:
            found = find_stand_in(config, grid, rank, present)
            shared = [grid.groups("dp-cp"), *([grid.groups("edp")] if has_experts else [])]
            if divides:
                shared.append(grid.optimizer_groups()[1])
                shared += [grid.optimizer_groups(of_experts=True)[1]] if has_experts else []
            fit = [
                other
                for other in present
                if all(any(rank in group and other in group for group in groups) for groups in shared)
            ]
            assert (found in fit) if fit else str(found).startswith(f"rank {rank} is lost")


def test_a_loader_process_that_is_ended_does_not_end_the_save(tmp_path: Path) -> None:
    """torch raises an error in the main thread at the moment at which one dies, wherever that is."""
    run = prepare("--save", tmp_path, "--num-workers", "2", "--hidden-dropout", "0")
    forward_step = run.recipe.forward_step

    def fail(*arguments: Any) -> Any:
        if run.progress.iteration == 3:
            raise OSError("a fault")
        return forward_step(*arguments)

    # As torchrun does while a rank saves: it signals the whole group of its processes.
    leave = run.leave_groups

    def kill_loaders() -> None:
        leave()
        for child in multiprocessing.active_children():
            assert child.pid is not None
            # By another process: a loader process takes its parent's signal for the end of its work.
            subprocess.run(["kill", str(child.pid)], check=True)
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is left to torch to find it

    run.leave_groups = kill_loaders
    replace_forward_step(run, fail)
    with pytest.raises(OSError, match="a fault"):
        train(run)
    run.hooks.on_close(run)
    assert find_saved(tmp_path) == 3
