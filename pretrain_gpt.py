# SPDX-License-Identifier: Apache-2.0
"""Pretrain a GPT model: `python pretrain_gpt.py --help`, `torchrun pretrain_gpt.py …`, `srun python pretrain_gpt.py …`.

What is particular to GPT is its recipe, `megatron/training/recipes/gpt.py`: model, data, forward step, loss. This
program reads the flags and runs the recipe. Scripts of your own import parts of it from here, by upstream's names.
torch is imported only after the flags have been read, so that help and mistakes answer at once.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import TYPE_CHECKING

from megatron.training.config.container import RunConfig
from megatron.training.flags.read import read_run_config
from megatron.training.launch.launch import add_world_size, leave, run_job
from megatron.training.recipes.gpt import (
    build_gpt_model as model_provider,
)
from megatron.training.recipes.gpt import (
    build_gpt_recipe,
    forward_step,
    loss_func,
)
from megatron.training.recipes.gpt_data import build_gpt_datasets as train_valid_test_datasets_provider

if TYPE_CHECKING:
    from megatron.training.run import Run

# Upstream's names, under which users' scripts import them from this file.
__all__ = ["forward_step", "loss_func", "model_provider", "train", "train_valid_test_datasets_provider"]


def train(config: RunConfig) -> Run:
    """Train the GPT model that the settings describe; returns the finished run."""
    from megatron.bridge.running import HuggingFaceFiles
    from megatron.training.training import run_recipe

    # Handed over here, as training stands below the bridge: for --load hf:DIR and --save-hf.
    return run_recipe(config, dataclasses.replace(build_gpt_recipe(config), foreign_files=HuggingFaceFiles()))


def main() -> int:
    """Read the flags, then train; returns the exit code."""
    train(read_run_config(sys.argv[1:], add_world_size(os.environ)))
    return 0


if __name__ == "__main__":
    # Not sys.exit: see `leave` for what threads of process groups do while the interpreter cleans up.
    leave(run_job(main, os.environ))
