# SPDX-License-Identifier: Apache-2.0
"""Saving of a run: weights, optimizer, schedule, random numbers, and how far it is.

    iter_0000010/
      tensors         <parameter>, optimizer.state.exp_avg.<parameter>, ..., rng_state.<rank>.<generator>
      state.json      progress, learning-rate schedule, number of updates, loss scale
      rng.json        Python's and numpy's generators
      config.json     all settings of the run
      tokenizer/      the tokenizer's files

Files and names are the affair of core/dist_checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import non_persistent, serialization
from megatron.core.dist_checkpointing.async_save import AsyncSaver
from megatron.core.dist_checkpointing.crash_points import reach
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.training.checkpoint import rng_state
from megatron.training.checkpoint.adapter_saves import BASE, describe_base, leave_out_base, saves_adapters_only
from megatron.training.checkpoint.documents import CONFIG, RNG, STATE
from megatron.training.checkpoint.local_saves import save_locally
from megatron.training.checkpoint.run_tensors import (
    build_sharded_fallbacks,
    build_sharded_fp8_state,
    build_sharded_model_state,
    build_sharded_optimizer_state,
)
from megatron.training.checkpoint.save_directories import find_lock, say_once
from megatron.training.checkpoint.save_for_upstream import save_torch, save_upstream_dist
from megatron.training.checkpoint.tokenizer_assets import list_tokenizer_files
from megatron.training.config.checkpoint import UPSTREAM_TORCH_DIST
from megatron.training.run import Run


def save_checkpoint(
    run: Run, saver: AsyncSaver | None = None, *, non_persistent_root: Path | None = None, ranks: Collection[int] = ()
) -> Path | None:
    """Save the run to --save as `iter_<iteration>` and return the directory. Every rank calls this.

    saver: only begin it, return None, and let this one go on while training does. non_persistent_root: save there
    instead. ranks: whose random numbers this process saves, only itself if empty. Raises StorageError on every rank
    when the disk is full or fails, or another run has taken the directory over; earlier checkpoints stay as they are.
    """
    settings = run.config.checkpoint
    assert settings.save is not None
    reach("save-begun")
    # A checkpoint that does not stay is for this program alone.
    kind = settings.ckpt_format if non_persistent_root is None else LOCAL if settings.saves_locally else None
    path = SINKS.get(kind, _save_ours)(run, saver, non_persistent_root, ranks)
    if path is not None:
        reach("save-done")
    return path


def _save_ours(run: Run, saver: AsyncSaver | None, other: Path | None, ranks: Collection[int]) -> Path | None:
    tensors, documents = _gather_content(run, ranks)
    if saves_adapters_only(run):
        tensors = leave_out_base(run, tensors)
    settings, root = run.config.checkpoint, Path(run.config.checkpoint.save or "")
    if other is not None:
        documents[non_persistent.DOCUMENT] = non_persistent.build_document(root)
        root = other
    # With it a checkpoint can be used where the tokenizer's directory does not exist.
    attachments = list_tokenizer_files(run.config.tokenizer) if settings.save_tokenizer_assets else {}
    if run.recipe.foreign_files is not None:
        attachments |= run.recipe.foreign_files.list_attachments(run.config)
    save = serialization.save if saver is None else saver.start
    reach("state-gathered")
    return save(
        tensors, root, run.progress.iteration, documents=documents, attachments=attachments, group=run.groups.world,
        lock=find_lock(run.save_locks, root),
    )  # fmt: skip


def _save_on_nodes(run: Run, saver: AsyncSaver | None, other: Path | None, ranks: Collection[int]) -> Path:
    tensors, documents = _gather_content(run, ranks)
    reach("state-gathered")
    return save_locally(run, tensors, documents)


def _gather_content(run: Run, ranks: Collection[int]) -> tuple[ShardedStateDict, dict[str, Any]]:
    """The tensors that a checkpoint of ours has, and its documents by their names."""
    settings, world = run.config.checkpoint, run.groups.world
    tensors = build_sharded_model_state(run)
    reach("weights-gathered")
    # With --no-save-optim the entries stay, as None: that tells a reader from a checkpoint that is damaged.
    state: dict[str, Any] = {"progress": run.progress.state_dict(), "optimizer": None, "scheduler": None}
    if not settings.no_save_optim:
        tensors |= build_sharded_optimizer_state(run) | build_sharded_fp8_state(run)
        state["optimizer"] = run.optimizer.numbers()
        state["scheduler"] = run.scheduler.state_dict()
    else:
        tensors |= build_sharded_fallbacks(chunk.module for chunk in run.model)
    if hooks := run.hooks.state_dict():
        state["hooks"] = hooks
    documents: dict[str, Any] = {STATE: state, CONFIG: run.config.to_dict()}
    if saves_adapters_only(run):
        documents[BASE] = describe_base(run)
    if not settings.no_save_rng:
        ranks = ranks or [world.rank()]
        for rank in ranks:
            tensors |= rng_state.build_sharded_rng_state(rank)
        documents[RNG] = rng_state.build_rng_document(world, run.groups.grid.sizes, ranks)
    return tensors, documents


LOCAL = "local"
SINKS: Mapping[str | None, Callable[..., Path | None]] = {
    "torch": lambda run, *_: save_torch(run),
    UPSTREAM_TORCH_DIST: lambda run, *_: save_upstream_dist(run),
    LOCAL: _save_on_nodes,
}
"""What saves a run in another way than ours, by --ckpt-format, and on the ranks' nodes. Every rank calls it, and it
raises StorageError on every rank."""


def convert_checkpoint(run: Run) -> None:
    """--ckpt-convert-format: save what was loaded; every rank calls this. Raises StorageError on every rank."""
    path = save_checkpoint(run)
    say_once(run.groups.world, f"converted {run.config.checkpoint.load} to {path}; nothing is trained")
