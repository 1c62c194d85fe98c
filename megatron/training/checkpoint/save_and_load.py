# SPDX-License-Identifier: Apache-2.0
"""Saving of a run, and its continuation: weights, optimizer, schedule, random numbers, and how far it is.

    iter_0000010/
      tensors         <parameter>, optimizer.state.exp_avg.<parameter>, ..., rng_state.<rank>.<generator>
      state.json      progress, learning-rate schedule, number of updates, loss scale
      rng.json        Python's and numpy's generators
      config.json     all settings of the run
      tokenizer/      the tokenizer's files

A resumed run repeats the uninterrupted one bit for bit. Files and names are the affair of core/dist_checkpointing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import non_persistent, serialization
from megatron.core.dist_checkpointing.agreement import on_first_rank
from megatron.core.dist_checkpointing.async_save import AsyncSaver
from megatron.core.dist_checkpointing.crash_points import reach
from megatron.core.dist_checkpointing.diagnosis import (
    explain_foreign_format,
    explain_other_content,
    explain_wrong_level,
)
from megatron.core.dist_checkpointing.directory import FoundCheckpoint, find_checkpoint
from megatron.core.dist_checkpointing.legacy import FILE_NAME, find_legacy_file
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, DamagedCheckpointError
from megatron.core.dist_checkpointing.upstream_dist import RELEASE, find_release, find_upstream_checkpoint
from megatron.core.dist_checkpointing.verification import Look
from megatron.core.errors import CheckpointError, say
from megatron.core.paths import explain_no_directory
from megatron.core.process_groups_config import Group
from megatron.training.checkpoint import rng_state
from megatron.training.checkpoint.documents import CONFIG, RNG, STATE
from megatron.training.checkpoint.local_saves import find_local_part, save_locally
from megatron.training.checkpoint.restoring import restore
from megatron.training.checkpoint.run_tensors import (
    build_sharded_fallbacks,
    build_sharded_fp8_state,
    build_sharded_model_state,
    build_sharded_optimizer_state,
)
from megatron.training.checkpoint.save_directories import find_global_directory, say_once, warn_once
from megatron.training.checkpoint.save_for_upstream import save_for_upstream
from megatron.training.checkpoint.sources import (
    CheckpointSource,
    ForeignSource,
    LocalSource,
    OurSource,
    RankFiles,
    TorchDist,
)
from megatron.training.checkpoint.tokenizer_assets import list_tokenizer_files
from megatron.training.config.checkpoint import FOR_UPSTREAM, CheckpointConfig, find_hf_directory
from megatron.training.run import Run

# ---- saving


def save_checkpoint(
    run: Run, saver: AsyncSaver | None = None, *, non_persistent_root: Path | None = None, ranks: Collection[int] = ()
) -> Path | None:
    """Save the run to --save as `iter_<iteration>` and return the directory. Every rank calls this.

    saver: only begin it, return None, and let this one go on while training does. non_persistent_root: save there
    instead. ranks: whose random numbers this process saves, its own if empty. Raises StorageError on every rank when
    the disk is full or fails, or another run has taken the directory over; earlier checkpoints stay as they are.
    """
    settings, world = run.config.checkpoint, run.groups.world
    assert settings.save is not None
    reach("save-begun")
    # A checkpoint that does not stay is for this program alone.
    if settings.ckpt_format in FOR_UPSTREAM and non_persistent_root is None:
        path: Path | None = save_for_upstream(run)
        reach("save-done")
        return path
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
    if not settings.no_save_rng:
        ranks = ranks or [world.rank()]
        for rank in ranks:
            tensors |= rng_state.build_sharded_rng_state(rank)
        documents[RNG] = rng_state.build_rng_document(world, run.groups.grid.sizes, ranks)
    root = Path(settings.save)
    if non_persistent_root is not None and settings.saves_locally:
        reach("state-gathered")
        path = save_locally(run, tensors, documents)
        reach("save-done")
        return path
    if non_persistent_root is not None:
        documents[non_persistent.DOCUMENT] = non_persistent.build_document(root)
        root = non_persistent_root
    # With it a checkpoint can be used where the tokenizer's own directory does not exist.
    attachments = list_tokenizer_files(run.config.tokenizer) if settings.save_tokenizer_assets else {}
    if run.recipe.foreign_files is not None:
        attachments |= run.recipe.foreign_files.list_attachments(run.config)
    save = serialization.save if saver is None else saver.start
    reach("state-gathered")
    path = save(
        tensors, root, run.progress.iteration, documents=documents, attachments=attachments, group=world,
        lock=next((lock for lock in run.save_locks if lock.covers(root)), None),
    )  # fmt: skip
    if path is not None:
        reach("save-done")
    return path


def convert_checkpoint(run: Run) -> None:
    """--ckpt-convert-format: save what was loaded; every rank calls this. Raises StorageError on every rank."""
    path = save_checkpoint(run)
    say_once(run.groups.world, f"converted {run.config.checkpoint.load} to {path}; nothing is trained")


# ---- loading


def load_checkpoint(run: Run) -> None:
    """Continue from --load, or take the weights of --pretrained-checkpoint; a fresh start is said, never assumed.

    Every rank calls this, after the model and the optimizer exist. Raises CheckpointError on every rank when there is
    no checkpoint where one must be, when none is undamaged, or when it is of another model.
    """
    settings, world = run.config.checkpoint, run.groups.world
    if (directory := find_hf_directory(settings.load)) is not None:
        restore(run, ForeignSource(run, directory), weights_only=True)
        return
    if settings.load is not None:
        root, step, weights_only = Path(settings.load), settings.ckpt_step, settings.finetune
        if step is None and (release := on_first_rank(world, lambda: find_release(root))) is not None:
            root, weights_only = release, True
        other = find_global_directory(settings, settings.load)
        look = functools.partial(non_persistent.find_newest, root, other, step)
        if (part := find_local_part(run, root)) is not None:
            restore(run, LocalSource(run, part))
        if (
            part is not None
            or _restore_upstream(run, root, step, weights_only=weights_only, non_persistent_root=other)
            or _restore_newest_good(run, look, weights_only=weights_only)
        ):
            _override_iteration(run, settings.override_ckpt_iteration)
            return
        _explain_missing(settings, root, world, run.config.model.perform_initialization)
    if settings.pretrained_checkpoint is not None:
        step = settings.ckpt_step if settings.load is None else None
        _load_pretrained(run, Path(settings.pretrained_checkpoint), step)


def _explain_missing(settings: CheckpointConfig, root: Path, world: Group, draws_weights: bool) -> None:
    """--load holds nothing: a sentence where that may be, CheckpointError where not."""
    obstacle = explain_no_directory(root)
    what = obstacle or "holds no checkpoint"
    # A file, or a link that leads nowhere, does not become a directory of checkpoints later.
    if obstacle is not None and obstacle != "does not exist":
        raise CheckpointError(f"--load {root} {what}; give a directory")
    if obstacle is None and (foreign := explain_foreign_format(root)) is not None:
        raise CheckpointError(f"--load {root} {foreign[0]}; {foreign[1]}")
    if settings.pretrained_checkpoint is not None:
        say_once(world, f"--load {root} {what} yet: starting from --pretrained-checkpoint")
        return
    if not draws_weights:
        raise CheckpointError(f"--load {root} {what}, and --no-initialization leaves the weights undefined without one")
    if settings.exit_on_missing_checkpoint:
        raise CheckpointError(f"--load {root} {what}, and --exit-on-missing-checkpoint was given")
    # The same command may start and continue a run, if --load is --save; anywhere else a missing checkpoint is more
    # likely a typing error, and training from scratch would waste the job.
    if settings.save is None or Path(settings.save).resolve() != root.resolve():
        if obstacle is None and (above := explain_wrong_level(root)) is not None:
            raise CheckpointError(f"--load {root} {above[0]}; {above[1]}")
        raise CheckpointError(
            f"--load {root} {what}; give a directory that holds one, or give the same directory as --save to start anew"
        )
    say_once(world, f"--load {root} {what} yet: starting from the beginning, with random weights")


def _restore_newest_good(run: Run, look: Look, *, weights_only: bool) -> bool:
    """Continue from the checkpoint that `look` finds, and where files of tensors turn out to be damaged, from the next
    one; whether there is one."""
    damaged: dict[Path, str] = {}
    lacking: frozenset[str] | None = None
    while True:
        found = serialization.agree(look, run.groups.world, leave_tensors=True, damaged=damaged)
        if found is None:
            return False
        try:
            restore(run, _open_verified(run, found, lacking), weights_only=weights_only)
        except DamagedCheckpointError as error:
            # What it has left in the tensors is overwritten by the next one.
            damaged[found.path] = str(error)
            lacking = error.lacking if lacking is None else lacking & error.lacking
            continue
        except CheckpointError:
            _say_what_was_passed_over(run, found)
            raise
        _say_what_was_passed_over(run, found)
        return True


def _say_what_was_passed_over(run: Run, found: FoundCheckpoint) -> None:
    """Say why this checkpoint and no other one is loaded, where that may surprise."""
    if found.skipped:
        warn_once(run.groups.world, f"loading {found.path}, because {'; '.join(found.skipped)}")


def _open_verified(run: Run, found: FoundCheckpoint, filled_but: frozenset[str] | None) -> CheckpointSource:
    """A checkpoint with a manifest as a source, in whichever format it was saved. filled_but: see OurSource."""
    if f"{serialization.TENSORS_DOCUMENT}.json" in found.manifest.files:
        return OurSource(run, found, filled_but)
    file = next((name for name in sorted(found.manifest.files) if name.endswith(f"/{FILE_NAME}")), None)
    return TorchDist(run, found.path) if file is None else RankFiles(run, found.path / file)


def _override_iteration(run: Run, iteration: int | None) -> None:
    """--override-ckpt-iteration, once the progress is that of the checkpoint."""
    if iteration is None:
        return
    saved = run.progress.iteration
    # Data are made for --train-iters from the first sample on: with more iterations to come they would not suffice.
    if iteration < saved:
        raise CheckpointError(
            f"--override-ckpt-iteration {iteration} is below the checkpoint's iteration, {saved}; "
            "to train longer raise --train-iters, to start afresh give --finetune"
        )
    run.progress.iteration = iteration
    say_once(run.groups.world, f"iterations are counted on from {iteration} instead of {saved}")


def _restore_upstream(
    run: Run, root: Path, iteration: int | None, *, weights_only: bool, non_persistent_root: Path | None = None
) -> bool:
    """Continue from a checkpoint that upstream wrote, where `root` holds one; whether it does."""
    world = run.groups.world

    def find() -> tuple[Path | None, Path | None]:
        found = find_upstream_checkpoint(root, iteration)
        # Beside checkpoints of ours an older one of upstream's counts only where it is asked for.
        has_ours = iteration is None and any(root.glob(f"iter_*/{MANIFEST_NAME}"))
        file = None if found is not None or has_ours else find_legacy_file(root, iteration)
        # What has a manifest is verified before it is read, in whichever format it is.
        file = None if file is None or (file.parent.parent / MANIFEST_NAME).is_file() else file
        if iteration is None and non_persistent_root is not None and (found or file) is not None:
            newest = non_persistent.list_all_candidates(root, non_persistent_root, [])[0]
            if newest.parent == non_persistent_root and _is_good(newest):
                return None, None
        return found, file

    # One rank looks, so that all agree. A release is weights to begin with, as in upstream's loader.
    path, file = on_first_rank(world, find)
    weights_only |= RELEASE in (path and path.name, file and file.parent.parent.name)
    if path is not None:
        restore(run, TorchDist(run, path), weights_only=weights_only)
    elif file is not None:
        restore(run, RankFiles(run, file), weights_only=weights_only)
    return path is not None or file is not None


def _is_good(path: Path) -> bool:
    """Return whether a checkpoint can be loaded; a warning where not."""
    try:
        return find_checkpoint(path) is not None
    except CheckpointError as error:
        say(f"warning: {error}; loading an earlier checkpoint", sys.stderr)
        return False


def _load_pretrained(run: Run, root: Path, iteration: int | None) -> None:
    """Weights only, from a checkpoint of ours or of upstream's."""
    if (directory := find_hf_directory(str(root))) is not None:
        restore(run, ForeignSource(run, directory), weights_only=True)
        return
    if _restore_upstream(run, root, iteration, weights_only=True):
        return
    if not _restore_newest_good(run, functools.partial(find_checkpoint, root, iteration), weights_only=True):
        nothing = ("holds no checkpoint",)
        what = explain_no_directory(root) or "; ".join(explain_other_content(root) or nothing)
        raise CheckpointError(f"--pretrained-checkpoint {root} {what}")
