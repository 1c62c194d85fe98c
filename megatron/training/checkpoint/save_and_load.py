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
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing import non_persistent, serialization
from megatron.core.dist_checkpointing.agreement import on_first_rank
from megatron.core.dist_checkpointing.async_save import AsyncSaver
from megatron.core.dist_checkpointing.crash_points import reach
from megatron.core.dist_checkpointing.directory import FoundCheckpoint, find_checkpoint
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, DamagedCheckpointError
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.verification import Look
from megatron.core.errors import CheckpointError, say
from megatron.core.paths import explain_no_directory
from megatron.core.process_groups_config import Group
from megatron.core.upstream_checkpoints.common_state import RELEASE, find_release, find_upstream_checkpoint
from megatron.core.upstream_checkpoints.diagnosis import (
    explain_foreign_format,
    explain_nothing,
    explain_wrong_level,
)
from megatron.core.upstream_checkpoints.rank_file import FILE_NAME, find_legacy_file
from megatron.training.checkpoint import rng_state
from megatron.training.checkpoint.adapter_saves import BASE, describe_base, leave_out_base, saves_adapters_only
from megatron.training.checkpoint.documents import CONFIG, RNG, STATE
from megatron.training.checkpoint.local_saves import find_local_part, save_locally
from megatron.training.checkpoint.restoring import restore
from megatron.training.checkpoint.run_tensors import (
    build_sharded_fallbacks,
    build_sharded_fp8_state,
    build_sharded_model_state,
    build_sharded_optimizer_state,
)
from megatron.training.checkpoint.save_directories import find_global_directory, find_lock, say_once, warn_once
from megatron.training.checkpoint.save_for_upstream import save_torch, save_upstream_dist
from megatron.training.checkpoint.sources import (
    CheckpointSource,
    ForeignSource,
    LocalSource,
    OurSource,
    RankFiles,
    TorchDist,
)
from megatron.training.checkpoint.tokenizer_assets import list_tokenizer_files
from megatron.training.config.checkpoint import UPSTREAM_TORCH_DIST, CheckpointConfig, find_hf_directory
from megatron.training.run import Run

# ---- saving


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


# ---- loading


def load_checkpoint(run: Run) -> None:
    """Continue from --load, or take the weights of --pretrained-checkpoint; a fresh start is said, never assumed.

    Every rank calls this, after the model and the optimizer exist. Raises CheckpointError on every rank when there is
    no checkpoint where one must be, when none is undamaged, or when it is of another model.
    """
    settings, world = run.config.checkpoint, run.groups.world
    if settings.load is not None:
        root, step, weights_only = Path(settings.load), settings.ckpt_step, settings.finetune
        if step is None and (release := on_first_rank(world, lambda: find_release(root))) is not None:
            root, weights_only = release, True
        other = find_global_directory(settings, settings.load)
        if _restore_from(run, LoadPlace(root, step, weights_only, other)):
            return
        _explain_missing(settings, root, world, run.config.model.perform_initialization)
    if settings.pretrained_checkpoint is not None:
        step = settings.ckpt_step if settings.load is None else None
        load_weights(run, "--pretrained-checkpoint", settings.pretrained_checkpoint, step)


def load_weights(run: Run, flag: str, directory: str, iteration: int | None = None) -> None:
    """Fill the model with the weights that a flag's directory holds: checkpoints, of which the newest when `iteration`
    is None, or Hugging Face's files (`hf:DIR`). Every rank calls this. Raises CheckpointError on every rank when there
    are none."""
    if not _restore_from(run, LoadPlace(Path(directory), iteration, True)):
        raise CheckpointError(f"{flag} {directory} {explain_nothing(Path(directory))}")


class LoadPlace(NamedTuple):
    """Directory that a run is to go on from."""

    root: Path
    iteration: int | None
    weights_only: bool
    other: Path | None = None
    """Of --load, where non-persistent checkpoints lie."""


def _restore_from(run: Run, place: LoadPlace) -> bool:
    """Go on from what a place holds; whether it holds anything."""
    if any(way(run, place) for way in WAYS):
        if place.other is not None and find_hf_directory(run.config.checkpoint.load) is None:
            _override_iteration(run, run.config.checkpoint.override_ckpt_iteration)
        return True
    return False


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


def _restore_foreign(run: Run, place: LoadPlace) -> bool:
    """Begin with the weights of a Hugging Face directory."""
    if (directory := find_hf_directory(str(place.root))) is not None:
        restore(run, ForeignSource(run, directory), weights_only=True)
    return directory is not None


def _restore_local(run: Run, place: LoadPlace) -> bool:
    """Continue from the ranks' parts on their nodes."""
    if place.other is not None and (part := find_local_part(run, place.root)) is not None:
        restore(run, LocalSource(run, part))
        return True
    return False


def _restore_newest_good(run: Run, place: LoadPlace) -> bool:
    """Continue from the newest checkpoint with a manifest, and where files of tensors turn out to be damaged, from the
    next one."""
    look: Look = functools.partial(find_checkpoint, place.root, place.iteration)
    if place.other is not None:
        look = functools.partial(non_persistent.find_newest, place.root, place.other, place.iteration)
    damaged: dict[Path, str] = {}
    lacking: frozenset[str] | None = None
    while True:
        found = serialization.agree(look, run.groups.world, leave_tensors=True, damaged=damaged)
        if found is None:
            return False
        try:
            restore(run, _open_verified(run, found, lacking), weights_only=place.weights_only)
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
    """Apply --override-ckpt-iteration, once the progress is the checkpoint's."""
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


def _restore_upstream(run: Run, place: LoadPlace) -> bool:
    """Continue from a checkpoint that upstream wrote."""
    root, iteration, weights_only, other = place

    def find() -> tuple[Path | None, Path | None]:
        found = find_upstream_checkpoint(root, iteration)
        # Beside checkpoints of ours an older one of upstream's counts only where it is asked for.
        has_ours = iteration is None and any(root.glob(f"iter_*/{MANIFEST_NAME}"))
        file = None if found is not None or has_ours else find_legacy_file(root, iteration)
        # What has a manifest is verified before it is read, in whichever format it is.
        file = None if file is None or (file.parent.parent / MANIFEST_NAME).is_file() else file
        if iteration is None and other is not None and (found or file) is not None:
            newest = non_persistent.list_all_candidates(root, other, [])[0]
            if newest.parent == other and _is_good(newest):
                return None, None
        return found, file

    # One rank looks, so that all agree. A release is weights to begin with, as in upstream's loader.
    path, file = on_first_rank(run.groups.world, find)
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


WAYS: Sequence[Callable[[Run, LoadPlace], bool]] = (
    _restore_foreign, _restore_local, _restore_upstream, _restore_newest_good
)  # fmt: skip
"""Ways to go on from a place, the first that finds something there: each says whether it does. Every rank calls them,
and they raise CheckpointError on every rank."""
