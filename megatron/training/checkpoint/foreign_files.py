# SPDX-License-Identifier: Apache-2.0
"""--save-hf and --load-adapter: another program's files, through what the recipe brings along."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron.core.dist_checkpointing.agreement import on_every_rank, on_first_rank
from megatron.core.errors import ConfigError, say
from megatron.core.process_groups_config import Group
from megatron.training.checkpoint.run_tensors import build_sharded_model_state, select_tensors
from megatron.training.config.container import RunConfig
from megatron.training.recipes.recipe import Recipe
from megatron.training.run import Run


def prepare_foreign_save(config: RunConfig, recipe: Recipe, world: Group) -> None:
    """Before training: can the model be written as --save-hf asks? Raises ConfigError on every rank where it cannot."""
    directory, files = config.checkpoint.save_hf, recipe.foreign_files
    if directory is None:
        return
    if files is None:
        raise ConfigError(
            f"--save-hf {directory}: this program writes no Hugging Face directories; start pretrain_gpt.py, or "
            "convert a checkpoint: python -m megatron.bridge.convert --source megatron --target hf"
        )
    # A model that no family computes should not be found out after days of training.
    on_first_rank(world, lambda: files.prepare_save(config, recipe.vocab_size, Path(directory)))


def load_adapter(run: Run) -> None:
    """At the start of a run: the adapters of --load-adapter, where the run does not continue an earlier one. Every rank
    calls this. Raises CheckpointError or ConfigError on every rank."""
    directory, files = run.config.checkpoint.load_adapter, run.recipe.foreign_files
    if directory is None or run.config.model.lora_rank is None or run.progress.iteration:
        return
    if files is None:
        raise ConfigError(f"--load-adapter {directory}: this program reads no files of peft; start pretrain_gpt.py")
    tensors = select_tensors(run, with_optimizer=False)

    def load() -> None:
        with torch.no_grad():
            files.open_adapter(Path(directory), run.config, run.recipe.vocab_size).load(tensors)

    on_every_rank(run.groups.world, load)
    if run.config.checkpoint.loads_main_params(run.config.model):
        run.optimizer.after_load()
    else:
        run.optimizer.reload_model_params()
    _say(run, f"loaded the adapters of {directory}")


def save_foreign(run: Run) -> None:
    """At the end of a run: write --save-hf, if it is asked for. Every rank calls this.

    Raises StorageError on every rank where the disk refuses.
    """
    directory, files = run.config.checkpoint.save_hf, run.recipe.foreign_files
    if directory is None:
        return
    assert files is not None, "checked by prepare_foreign_save"
    if not run.progress.finished and run.config.checkpoint.ckpt_convert_format is None:
        _say(run, f"--save-hf: {directory} is not written, as the run stops before its last iteration")
        return
    files.save(run.config, run.recipe.vocab_size, build_sharded_model_state(run), run.groups.world, Path(directory))
    _say(run, f"--save-hf: wrote {directory}")


def _say(run: Run, sentence: str) -> None:
    if run.is_first_rank:
        say(sentence)
