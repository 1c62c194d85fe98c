# SPDX-License-Identifier: Apache-2.0
"""For tests of single flags: the settings of a run that is as small as it can be, plus the flags in question."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.training.config.container import RunConfig

SMALLEST_RUN = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 100 --lr 0.01 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 64"
)


def run_config(flags: str = "", base: str = SMALLEST_RUN, world_size: int = 1) -> RunConfig:
    """What a command line means in a job of so many processes; later flags win."""
    from megatron.training.flags.read import read_run_config

    environ = {"WORLD_SIZE": str(world_size)} if world_size > 1 else {}
    return read_run_config([*base.split(), *flags.split()], environ)
