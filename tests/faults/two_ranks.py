"""A run of two ranks that takes a second: what campaigns of kills and damage start from and compare with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from megatron.core.dist_checkpointing.stored_tensors import open_checkpoint
from tests.functional.pretrain_runs import TINY, finish, free_port, start
from tests.programs import Program

RANKS = 2
# The two ranks hold different halves of everything, so that neither's file can be done without.
FLAGS = [*TINY, *"--train-iters 6 --tensor-model-parallel-size 2 --save-interval 2".split()]

WAYS = {
    "sync": [],
    "thread": ["--async-save"],
    "process": ["--async-save", "--use-persistent-ckpt-worker"],
}
"""Ways of saving, by who writes."""


def train(root: Path, *flags: str | Path, crash_point: str | None = None) -> list[tuple[int, str]]:
    """Train from what is in `root`, or from the beginning; exit code and errors of each rank. Fails unless a crash was
    asked for and came, or none was and none came."""
    crash = {} if crash_point is None else {"MEGATRON_CRASH_POINT": crash_point}
    ranks = finish(start_ranks(["--save", root, "--load", root, *flags], **crash))
    outcomes = [(rank.returncode, rank.stderr) for rank in ranks]
    assert crash_point is not None or not any(code for code, _ in outcomes), outcomes
    return outcomes


def start_ranks(flags: Sequence[str | Path], **variables: str) -> list[Program]:
    """Start all ranks of a run."""
    job = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()} | variables
    return [start([*FLAGS, *flags], RANK=str(rank), LOCAL_RANK=str(rank), **job) for rank in range(RANKS)]


def read_tensors(root: Path, iteration: int) -> dict[str, torch.Tensor]:
    """All tensors of an iteration, random-number states among them."""
    return {tensor.key: tensor.read() for tensor in open_checkpoint(root, iteration).tensors}
