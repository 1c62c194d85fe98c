# SPDX-License-Identifier: Apache-2.0
"""Pretrain a GPT model: `python pretrain_gpt.py --help`, `torchrun pretrain_gpt.py …`, `srun python pretrain_gpt.py …`.

The program is megatron/cli/train.py, so that it is there where only the package is installed; its recipe is
megatron/training/recipes/gpt.py. Scripts of your own import parts of it from here, by upstream's names.
"""

from __future__ import annotations

from megatron.cli.train import main, run, train
from megatron.training.recipes.forward_step import forward_step, loss_func
from megatron.training.recipes.gpt import build_gpt_model as model_provider
from megatron.training.recipes.gpt_data import build_gpt_datasets as train_valid_test_datasets_provider

# Upstream's names, under which users' scripts import them from this file.
__all__ = ["forward_step", "loss_func", "main", "model_provider", "train", "train_valid_test_datasets_provider"]

if __name__ == "__main__":
    run()
