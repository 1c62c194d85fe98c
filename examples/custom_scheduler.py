# SPDX-License-Identifier: Apache-2.0
"""A learning-rate schedule of one's own: a cosine that starts again and again (Loshchilov and Hutter, 2017).

    python examples/custom_scheduler.py --cycle-iters 1000 <flags of pretrain_gpt.py>

Each cycle falls from --lr to --min-lr; the position is part of checkpoints, so that a resumed run keeps its curve.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.training.config.container import RunConfig  # noqa: E402
from megatron.training.flags.read import read_run_config  # noqa: E402
from megatron.training.launch.launch import add_world_size, leave, run_job  # noqa: E402


class CosineRestarts:
    """What the trainer asks of a scheduler. Progress is counted in samples, as everywhere in a run."""

    def __init__(self, optimizer: Any, cycle_samples: int, max_lr: float, min_lr: float, weight_decay: float) -> None:
        self.optimizer, self.cycle_samples = optimizer, cycle_samples
        self.max_lr, self.min_lr, self.weight_decay = max_lr, min_lr, weight_decay
        self.samples = 0
        # The first update comes before the first call of step and needs a rate.
        self.step(0)

    def get_lr(self, param_group: Mapping[str, Any]) -> float:
        """The rate of a group; those of --decoupled-lr have bounds of their own."""
        highest, lowest = param_group.get("max_lr", self.max_lr), param_group.get("min_lr", self.min_lr)
        place = self.samples % self.cycle_samples / self.cycle_samples
        return float(lowest + 0.5 * (1 + math.cos(math.pi * place)) * (highest - lowest))

    def step(self, increment: int) -> None:
        """Called after each update with the samples of the batch."""
        self.samples += increment
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr(group)
            group["weight_decay"] = self.weight_decay * group.get("wd_mult", 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Kept in checkpoints: plain numbers."""
        return {"samples": self.samples, "cycle_samples": self.cycle_samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where state_dict was taken. The cycle is that of the command line, as flags win over files."""
        self.samples = state["samples"]
        self.step(0)


def build_scheduler(config: RunConfig, optimizer: Any) -> CosineRestarts:
    """The scheduler of the flags."""
    samples = config.extra["cycle_iters"] * (config.training.global_batch_size or 1)
    rates = config.optimizer
    return CosineRestarts(optimizer, samples, rates.lr or 0.0, rates.min_lr or 0.0, rates.weight_decay)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flag of this script, beside those of pretrain_gpt.py."""
    parser.add_argument("--cycle-iters", type=int, default=1000, help="iterations of a cycle")


def main() -> int:
    """Read the flags, then train."""
    config = read_run_config(sys.argv[1:], add_world_size(os.environ), add_flags)
    from megatron.training.recipes.gpt import build_gpt_recipe
    from megatron.training.training import run_recipe

    run_recipe(config, dataclasses.replace(build_gpt_recipe(config), build_scheduler=build_scheduler))
    return 0


if __name__ == "__main__":
    leave(run_job(main, os.environ))
