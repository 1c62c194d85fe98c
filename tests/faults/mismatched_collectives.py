# SPDX-License-Identifier: Apache-2.0
"""pretrain_gpt.py whose rank 1 is in another collective than the others in the third iteration: MISMATCH says another
operation (`operation`), or the same ones over two groups in another order (`order`)."""

from __future__ import annotations

import os
import sys

import torch

from megatron.cli.train import train
from megatron.core.collectives import all_reduce, broadcast
from megatron.core.errors import command_line
from megatron.training.flags.read import read_run_config
from megatron.training.launch.launch import add_world_size, leave, run_job
from megatron.training.run import Hook, Run


class MismatchHook(Hook):
    """Makes the calls that do not fit."""

    def on_gradients(self, run: Run) -> None:
        """Enter, in the third iteration."""
        if run.progress.iteration != 2:
            return
        is_odd, values = run.groups.world.rank() == 1, torch.ones(64)
        if os.environ["MISMATCH"] == "operation":
            (broadcast if is_odd else all_reduce)(values, run.groups.world)
            return
        groups = [run.groups.pp, run.groups.pp_directions[0]]
        for group in reversed(groups) if is_odd else groups:
            all_reduce(values, group)


@command_line
def main() -> int:
    train(read_run_config(sys.argv[1:], add_world_size(os.environ)), [MismatchHook()])
    return 0


if __name__ == "__main__":
    leave(run_job(main, os.environ))
