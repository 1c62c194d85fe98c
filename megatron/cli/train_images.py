# SPDX-License-Identifier: Apache-2.0
"""Pretrain a model of images and text: what pretrain_vlm.py starts.

Its recipe is megatron/training/recipes/images.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from megatron.cli.train import is_installed
from megatron.training.flags.read import read_run_config
from megatron.training.launch.launch import add_world_size, leave, run_job
from megatron.training.recipes.images import add_image_flags, build_image_recipe


def main() -> int:
    """Read the flags, then train; returns the exit code."""
    config = read_run_config(sys.argv[1:], add_world_size(os.environ), add_image_flags)
    from megatron.cli.summary import ProgramStart, SummaryHook
    from megatron.training.training import run_recipe

    start = ProgramStart(sys.argv[0], sys.argv[1:], os.environ, Path.cwd(), is_installed())
    run_recipe(config, build_image_recipe(config), [SummaryHook(start, lambda run: False)])
    return 0


def run() -> NoReturn:
    """The whole program: an error becomes its line and exit code, and the process ends here."""
    leave(run_job(main, os.environ))


if __name__ == "__main__":
    run()
