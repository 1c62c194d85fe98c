# SPDX-License-Identifier: Apache-2.0
"""A run of two ranks that takes a second: what campaigns of kills and damage start from and compare with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from megatron.core.dist_checkpointing.directory import list_leftovers
from megatron.core.dist_checkpointing.non_persistent import DIRECTORY_NAME, find_newest
from megatron.core.errors import CheckpointError
from megatron.core.upstream_checkpoints.stored_tensors import open_checkpoint
from tests.functional.pretrain_runs import TINY, finish, free_port, start
from tests.programs import Program

RANKS = 2
# The two ranks hold different halves of everything, so that neither's file can be done without. One layer and one
# microbatch: what is killed is saving, which then is most of what such a run does.
FLAGS = [
    *TINY,
    *"""--train-iters 6 --tensor-model-parallel-size 2 --save-interval 2 --num-layers 1
        --global-batch-size 2""".split(),
]

WAYS = {
    "sync": [],
    "thread": ["--async-save"],
    "process": ["--async-save", "--use-persistent-ckpt-worker"],
    "torch": ["--ckpt-format", "torch"],
    "non-persistent": "--save-interval 100 --non-persistent-save-interval 2 --non-persistent-ckpt-type global".split(),
}
"""Ways of saving: by who writes, what, and where."""


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
    # Where rank 0 is killed, the other one would let it speak first, for five seconds.
    job["TEST_SPEAK_AT_ONCE"] = "1"
    return [start([*FLAGS, *flags], RANK=str(rank), LOCAL_RANK=str(rank), **job) for rank in range(RANKS)]


def find_saved(root: Path) -> int:
    """The iteration that is loaded next; 0 where there is none, -1 where something is there and nothing is good."""
    try:
        found = find_newest(root, root / DIRECTORY_NAME)
    except CheckpointError:
        return -1
    return 0 if found is None else found.manifest.iteration


def list_remains(root: Path) -> list[str]:
    """What interrupted saves have left, and locks."""
    places = [place for place in (root, root / DIRECTORY_NAME) if place.is_dir()]
    return [str(path) for place in places for path in (*list_leftovers(place), *place.glob("*.lock"))]


def read_tensors(root: Path, iteration: int) -> dict[str, torch.Tensor]:
    """All tensors of an iteration, random-number states among them."""
    return {tensor.key: tensor.read() for tensor in open_checkpoint(root, iteration).tensors}
