# SPDX-License-Identifier: Apache-2.0
"""Command lines with the checkpoint flags of upstream's scripts: trained, killed while a save is under way, resumed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.functional.pretrain_runs import TIMEOUT_SECONDS, TINY, finish, free_port, metrics, start
from tests.programs import Program

FLAGS = (
    "--async-save --use-persistent-ckpt-worker --dist-ckpt-strictness log_all --ckpt-fully-parallel-load "
    "--dist-ckpt-optim-fully-reshardable --ckpt-assume-constant-structure --ckpt-format torch_dist"
).split()
# Six heads in three groups over three replicas, a vocabulary that nothing divides.
ODD = (
    "--hidden-size 72 --num-attention-heads 6 --group-query-attention --num-query-groups 3 --vocab-size 1009 "
    "--make-vocab-size-divisible-by 1 --micro-batch-size 1 --global-batch-size 6 --train-iters 10 "
    "--hidden-dropout 0.1 --attention-dropout 0.1 --use-distributed-optimizer"
).split()
RANKS = 3


def launch(*flags: str | Path, **variables: str) -> list[Program]:
    job = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), **variables}
    return [start([*TINY, *ODD, *FLAGS, *flags], RANK=str(n), LOCAL_RANK=str(n), **job) for n in range(RANKS)]


def train(*flags: str | Path) -> str:
    """Run to the end; what the first rank printed."""
    done = finish(launch(*flags))
    assert [rank.returncode for rank in done] == [0] * RANKS, [rank.stderr for rank in done]
    return done[0].stdout


def train_and_kill(*flags: str | Path) -> None:
    """SIGKILL to every rank, to the first one when it has all but completed its second checkpoint."""
    ranks = launch(*flags, MEGATRON_CRASH_POINT="manifest-unflushed:0:2")
    try:
        assert ranks[0].wait(TIMEOUT_SECONDS) == -signal.SIGKILL
    finally:
        for rank in ranks:
            rank.kill()


def curve(directory: Path) -> dict[int, tuple[Any, ...]]:
    """The last word on each iteration."""
    return {row["iteration"]: (row["lm loss"], row["grad_norm"]) for row in metrics(directory)}


@pytest.mark.flags("--async-save", "--use-persistent-ckpt-worker", "--dist-ckpt-strictness")
def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    train("--metrics-dir", tmp_path / "whole")
    save = ["--save", tmp_path / "ckpt", "--load", tmp_path / "ckpt", "--save-interval", "2"]
    train_and_kill(*save, "--metrics-dir", tmp_path / "parts")
    log = train(*save, "--metrics-dir", tmp_path / "parts")
    assert f"resuming from {tmp_path}/ckpt/iter_0000002" in log and "removed iter_0000004.tmp-" in log
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    assert len(curve(tmp_path / "parts")) == 10
