# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C under several processes: all end after the same iteration, and what they save is resumed bit for bit."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from megatron.training.hooks.exits import ExitHook
from megatron.training.hooks.stop_agreement import StopAgreement
from megatron.training.loop import train
from megatron.training.run import Hook, Run
from megatron.training.verify.parity import list_placed_parameters, open_local_run
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import STYLES, own_rank, training


class Press(Hook):
    """The signal, in the given iteration of each rank (from 1; 0: never)."""

    def __init__(self, iterations: tuple[int, ...]) -> None:
        self.iterations = iterations

    def on_step_start(self, run: Run) -> None:
        if self.iterations[run.groups.world.rank()] == run.progress.iteration + 1:
            os.kill(os.getpid(), signal.SIGINT)
            (exits,) = (hook for hook in run.hooks.hooks if isinstance(hook, ExitHook))  # type: ignore[attr-defined]
            while exits._interrupted_at is None:
                time.sleep(0.001)


def trained(layout: str, directory: str, iterations: tuple[int, ...]) -> tuple[int, bool, list[torch.Tensor]]:
    """Train, or continue, to the end or the signal."""
    flags = f"{STYLES['gpt2']} --hidden-dropout 0.1 --save {directory} --load {directory} --save-interval 100"
    config, recipe = training(flags, layout)
    with open_local_run(config, recipe, own_rank(config), [Press(iterations)]) as run:
        train(run)
        weights = [parameter.detach().clone() for _, parameter in list_placed_parameters(run)]
        return run.progress.iteration, run.interrupted, weights


@pytest.mark.parametrize(("layout", "pressed"), [("pp2", (2, 4)), ("dp2", (0, 3))])
def test_interrupted_together_and_resumed_bit_for_bit(layout: str, pressed: tuple[int, int], tmp_path: Path) -> None:
    """By a terminal, which signals all ranks though not in the same step; and of one rank only."""
    first, second = run_distributed(trained, 2, layout, str(tmp_path / "parts"), pressed)
    assert first[:2] == second[:2]
    stopped, interrupted, _ = first
    assert interrupted and min(filter(None, pressed)) <= stopped < 10
    assert (tmp_path / "parts" / "latest_checkpointed_iteration.txt").read_text() == str(stopped)
    resumed = run_distributed(trained, 2, layout, str(tmp_path / "parts"), (0, 0))
    whole = run_distributed(trained, 2, layout, str(tmp_path / "whole"), (0, 0))
    for ours, theirs in zip(resumed, whole, strict=True):
        assert ours[:2] == theirs[:2] == (10, False)
        assert all(map(torch.equal, ours[2], theirs[2]))


def agreed(skews: tuple[int, ...]) -> int:
    """The step after which this rank ends, where ranks hear of the request at different steps and no device holds them
    together."""
    import torch.distributed as dist

    from megatron.core.process_groups_config import SingleRankGroup

    rank = dist.get_rank()
    assert not isinstance(dist.group.WORLD, SingleRankGroup) and dist.group.WORLD is not None
    agreement = StopAgreement(dist.group.WORLD)
    for step in range(1, 200):
        if step == skews[rank]:
            agreement.ask("test")
        reason = agreement.look()
        if reason is not None:
            assert reason == "test"
            return step
        dist.barrier()
    return 0


def several(cases: list[tuple[int, ...]]) -> list[int]:
    """One after the other, in the same job."""
    return [agreed(skews) for skews in cases]


def test_R22_ranks_agree_whoever_is_asked() -> None:
    cases = [(5, 5, 5), (5, 9, 5), (300, 7, 300)]
    by_rank = run_distributed(several, 3, cases)
    for skews, found in zip(cases, zip(*by_rank, strict=True), strict=True):
        assert len(set(found)) == 1 and found[0] >= min(skews)
