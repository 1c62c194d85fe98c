# SPDX-License-Identifier: Apache-2.0
"""Pretrain a GPT model or a hybrid: what pretrain_gpt.py, pretrain_hybrid.py, `python -m megatron train` and
`megatron-train` start.

What is particular to GPT is its recipe, `megatron/training/recipes/gpt.py`: model, data, forward step, loss. This
program reads the flags and runs the recipe. torch is imported only after the flags have been read, so that help and
mistakes answer at once.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megatron.core.errors import ConfigError, MegatronError
from megatron.training.config.container import RunConfig
from megatron.training.flags.read import read_run_config
from megatron.training.launch.launch import add_world_size, leave, run_job
from megatron.training.recipes.gpt import build_gpt_recipe

if TYPE_CHECKING:
    from megatron.training.run import Hook, Run

DISTRIBUTION = "megatron-lm-torch"


def train(config: RunConfig, hooks: Sequence[Hook] = ()) -> Run:
    """Train the GPT model that the settings describe; returns the finished run.

    hooks: yours, in addition to the settings'; see docs/logging.md.
    """
    from megatron.hf.running import HuggingFaceFiles
    from megatron.training.training import run_recipe

    # Passed here, because training is below megatron.hf: for --load hf:DIR and --save-hf.
    return run_recipe(config, dataclasses.replace(build_gpt_recipe(config), foreign_files=HuggingFaceFiles()), hooks)


def main(*, needs_letters: bool = False) -> int:
    """Read the flags, then train; returns the exit code. needs_letters: the model must be a hybrid."""
    config = read_run_config(sys.argv[1:], add_world_size(os.environ))
    if needs_letters and config.model.hybrid_layer_pattern is None:
        raise ConfigError(
            "--hybrid-layer-pattern is missing; give a letter for each layer, such as M-M*- (M Mamba-2, * attention, - "
            "MLP), or use pretrain_gpt.py"
        )
    from megatron.cli.summary import ProgramStart, SummaryHook

    start = ProgramStart(sys.argv[0], sys.argv[1:], os.environ, Path.cwd(), is_installed())
    train(config, [SummaryHook(start, can_export)])
    return 0


def is_installed() -> bool:
    """Return whether `python -m megatron` works in any directory."""
    # Here, because it imports parsers of mail and archives, which would make up a sixth of the time that --help takes.
    from importlib import metadata

    try:
        metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return False
    return True


def can_export(run: Run) -> bool:
    """Return whether a Hugging Face model can be made of this one."""
    from megatron.hf.running import describe_run

    try:
        describe_run(run.config, run.recipe.vocab_size)
    except MegatronError:
        return False
    return True


def run(*, needs_letters: bool = False) -> NoReturn:
    """The whole program: an error becomes its line and exit code, and the process ends here. needs_letters: as
    above."""
    # Not sys.exit: see `leave` for what threads of process groups do while the interpreter cleans up.
    leave(run_job(functools.partial(main, needs_letters=needs_letters), os.environ))


def find_program(script: str = "pretrain_gpt.py", module: str = __name__) -> list[str]:
    """Return what python, or torchrun, is given to start this program, or another: the script of a checkout, or else
    the module."""
    path = Path(__file__).resolve().parents[2] / script
    return [str(path)] if path.exists() else ["-m", module]


if __name__ == "__main__":
    run()
