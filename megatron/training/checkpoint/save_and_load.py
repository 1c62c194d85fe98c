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

import torch

from megatron.core.collectives import all_gather_object
from megatron.core.dist_checkpointing import non_persistent, serialization
from megatron.core.dist_checkpointing.agreement import on_every_rank, on_first_rank, with_everyone
from megatron.core.dist_checkpointing.async_save import AsyncSaver
from megatron.core.dist_checkpointing.crash_points import reach
from megatron.core.dist_checkpointing.diagnosis import (
    explain_foreign_format,
    explain_other_content,
    explain_wrong_level,
)
from megatron.core.dist_checkpointing.directory import FoundCheckpoint, find_checkpoint
from megatron.core.dist_checkpointing.legacy import FILE_NAME, fill_from_full, find_legacy_file
from megatron.core.dist_checkpointing.legacy_ranks import open_legacy
from megatron.core.dist_checkpointing.local_checkpoints import FoundPart
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, DamagedCheckpointError
from megatron.core.dist_checkpointing.tensor_reading import read_upstream_tensors
from megatron.core.dist_checkpointing.upstream_dist import RELEASE, CommonState, find_release, find_upstream_checkpoint
from megatron.core.dist_checkpointing.validation import ModelMismatchError, shorten_list
from megatron.core.dist_checkpointing.verification import Look
from megatron.core.errors import CheckpointError, ConfigError, say
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.paths import explain_no_directory
from megatron.core.process_groups_config import Group
from megatron.core.tensor_parallel.fp8_products import recall_fallbacks
from megatron.training.checkpoint import from_upstream, rng_state, upcycling
from megatron.training.checkpoint.differences import (
    Change,
    describe_shape_differences,
    find_changes,
    list_changes,
    refuse_another_function,
)
from megatron.training.checkpoint.documents import RNG, STATE, read_rng, read_state
from megatron.training.checkpoint.filling import fill_tensors, list_replicas, name_as_saved, select_for_upstream
from megatron.training.checkpoint.layer_names import find_renaming, rename_tensors
from megatron.training.checkpoint.local_saves import find_local_part, load_locally, save_locally
from megatron.training.checkpoint.run_tensors import (
    build_sharded_fallbacks,
    build_sharded_fp8_state,
    build_sharded_model_state,
    build_sharded_optimizer_state,
    list_full_precision_weights,
    select_tensors,
)
from megatron.training.checkpoint.save_directories import find_global_directory, say_once, warn_once
from megatron.training.checkpoint.save_for_upstream import save_for_upstream
from megatron.training.checkpoint.tokenizer_assets import list_tokenizer_files
from megatron.training.config.checkpoint import FOR_UPSTREAM, HF_PREFIX, CheckpointConfig, find_hf_directory
from megatron.training.recipes.recipe import ForeignModel
from megatron.training.run import Run

CONFIG = "config"


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
        _restore_foreign(run, directory)
        return
    if settings.load is not None:
        root, step, weights_only = Path(settings.load), settings.ckpt_step, settings.finetune
        if step is None and (release := on_first_rank(world, lambda: find_release(root))) is not None:
            root, weights_only = release, True
        other = find_global_directory(settings, settings.load)
        look = functools.partial(non_persistent.find_newest, root, other, step)
        if (part := find_local_part(run, root)) is not None:
            _restore(run, part.checkpoint, filled_but=None, part=part)
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
            _restore_verified(run, found, weights_only=weights_only, filled_but=lacking)
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


def _restore_verified(
    run: Run, found: FoundCheckpoint, *, weights_only: bool, filled_but: frozenset[str] | None
) -> None:
    """Continue from a checkpoint with a manifest, in whichever format it was saved.

    filled_but: a damaged checkpoint has filled all tensors but these before; None: there was none.
    """
    if f"{serialization.TENSORS_DOCUMENT}.json" in found.manifest.files:
        _restore(run, found, weights_only=weights_only, filled_but=filled_but)
        return
    file = next((name for name in sorted(found.manifest.files) if name.endswith(f"/{FILE_NAME}")), None)
    if file is None:
        _restore_torch_dist(run, found.path, weights_only=weights_only)
    else:
        _restore_legacy(run, found.path / file, weights_only=weights_only)


def _restore(
    run: Run,
    found: FoundCheckpoint,
    *,
    weights_only: bool = False,
    filled_but: frozenset[str] | None,
    part: FoundPart | None = None,
) -> None:
    """part: `found` is this rank's own, of a local checkpoint."""
    settings, world = run.config.checkpoint, run.groups.world
    # Settings of a run are those of its own flags, never the checkpoint's, which are only compared.
    changes = _compare_settings(run, found)
    if from_dense := upcycling.begins(run, changes, found.path):
        changes, weights_only = upcycling.leave_out_expert_settings(changes), True
    refuse_another_function(changes, str(found.path), is_overridden=settings.override_model_settings)
    counts_steps = isinstance(run.scheduler, OptimizerParamScheduler)
    state = with_everyone(world, lambda: read_state(found.path, counts_steps=counts_steps))
    with_optimizer = not (weights_only or settings.no_load_optim)
    with_rng = not (weights_only or settings.no_load_rng)
    if with_optimizer and state["optimizer"] is None:
        raise CheckpointError(f"{found.path} was saved with --no-save-optim; pass --no-load-optim or --finetune")
    if with_optimizer:
        # Before anything is loaded: a state that this optimizer cannot continue must leave the run as it was.
        run.optimizer.check_state(state["optimizer"])
    random_numbers = _read_rng_document(found, run) if with_rng else None

    modules = [chunk.module for chunk in run.model]
    tensors = select_tensors(run, with_optimizer=with_optimizer) | build_sharded_fallbacks(modules)
    if random_numbers is not None:
        tensors |= rng_state.build_sharded_rng_state(world.rank())
    if part is None:
        tensors = name_as_saved(run, found.path, changes, tensors)
        replicas = list_replicas(run, from_dense)
        load = functools.partial(serialization.load, checkpoint=found, group=world, replicas=replicas)
        report = fill_tensors(run, found.path, changes, load, tensors, from_dense)
    else:
        report = load_locally(run, part, tensors)
    spoiled = sorted(set(report.lacking) - (filled_but if filled_but is not None else set(report.lacking)))
    if spoiled:
        raise CheckpointError(
            f"{found.path} lacks {'; '.join(shorten_list(spoiled))}, which a damaged newer checkpoint has filled; "
            f"start again with --ckpt-step {found.manifest.iteration}, so that they begin with their initial values"
        )

    recall_fallbacks(modules)
    if with_optimizer:
        run.optimizer.load_numbers(state["optimizer"])
        run.optimizer.after_load()
        run.scheduler.load_state_dict(state["scheduler"])
    elif settings.loads_main_params(run.config.model):
        run.optimizer.after_load()
    else:
        # The optimizer's main parameters are copies in float32: they must follow the weights that were loaded.
        run.optimizer.reload_model_params()
    if random_numbers is not None:
        # After everything that may draw: from here on the numbers continue those of the saved run.
        rng_state.restore(random_numbers, tensors, world.rank())
    # Progress stays at 0, and the hooks have no state: this is a new run with given weights.
    if weights_only:
        say_once(world, f"loaded the weights of {found.path}; iteration, optimizer and random numbers start afresh")
        return
    run.loaded_from = found.path
    run.progress.load_state_dict(state["progress"])
    run.hooks.load_state_dict(state.get("hooks", {}))  # older checkpoints have none
    say_once(world, f"resuming from {found.path}, after {run.progress.consumed_train_samples} samples")
    if lines := list_changes(changes):
        say_once(world, "\n    ".join(["settings that changed:", *lines]))


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
        _restore_torch_dist(run, path, weights_only=weights_only)
    elif file is not None:
        _restore_legacy(run, file, weights_only=weights_only)
    return path is not None or file is not None


def _is_good(path: Path) -> bool:
    """Return whether a checkpoint can be loaded; a warning where not."""
    try:
        return find_checkpoint(path) is not None
    except CheckpointError as error:
        say(f"warning: {error}; loading an earlier checkpoint", sys.stderr)
        return False


def _restore_torch_dist(run: Run, path: Path, *, weights_only: bool) -> None:
    settings, world = run.config.checkpoint, run.groups.world
    with_optimizer = not (weights_only or settings.no_load_optim)
    # Of a dense model that experts are made of, the optimizer's state is not wanted, and need not be readable.
    is_wanted = with_optimizer and not run.config.model.moe_use_upcycling
    common = on_first_rank(world, lambda: from_upstream.read_common(path, with_optimizer=is_wanted))
    changes = from_upstream.find_upstream_changes(common, run.config)
    if from_dense := upcycling.begins(run, changes, path):
        changes, with_optimizer, weights_only = upcycling.leave_out_expert_settings(changes), False, True
    if with_optimizer and not is_wanted:
        common = on_first_rank(world, lambda: from_upstream.read_common(path, with_optimizer=True))
    refuse_another_function(changes, str(path), is_overridden=settings.override_model_settings)
    if with_optimizer:
        run.optimizer.check_state(from_upstream.build_optimizer_state(common))
    with_state = with_optimizer or settings.loads_main_params(run.config.model)
    reshaped = from_upstream.read_reshaped_optimizer(path, common, world) if with_state else {}
    flat, others = select_for_upstream(run, path, changes, reshaped, with_optimizer=with_optimizer)
    replicas = list_replicas(run, from_dense)
    load = functools.partial(read_upstream_tensors, path, group=world, replicas=replicas)
    fill_tensors(run, path, changes, load, others, from_dense)
    on_every_rank(world, lambda: fill_from_full(flat.values(), reshaped))
    if with_state:
        run.optimizer.after_load()
    else:
        run.optimizer.reload_model_params()
    from_upstream.restore(run, path, common, with_optimizer=with_optimizer, weights_only=weights_only)


def _restore_legacy(run: Run, file: Path, *, weights_only: bool) -> None:
    settings, world = run.config.checkpoint, run.groups.world
    with_optimizer = not (weights_only or settings.no_load_optim)
    model = build_sharded_model_state(run)
    # Stages hold different layers: what one does not know, another may.
    elsewhere = set().union(*all_gather_object(set(model), run.groups.pp))
    tensors = list_full_precision_weights(run)
    if with_optimizer:
        tensors = [*model.values(), *build_sharded_optimizer_state(run).values()]

    # Every rank maps the files itself: a tensor cannot travel before it is read.
    content = with_everyone(world, lambda: open_legacy(file, with_optimizer=with_optimizer))
    content.locate_state(world)

    def fill() -> tuple[CommonState, int]:
        changes = from_upstream.find_upstream_changes(content.common, run.config)
        upcycling.refuse_files_of_ranks(run, changes, file)
        refuse_another_function(changes, str(file), is_overridden=settings.override_model_settings)
        if with_optimizer:
            from_upstream.check_optimizer(content.common, file)
            run.optimizer.check_state(from_upstream.build_optimizer_state(content.common))
        try:
            with torch.no_grad():
                rename = find_renaming(run, changes, file)
                known = {name for name in map(rename, elsewhere) if name is not None}
                fill_from_full(rename_tensors(tensors, rename), content.tensors, known)
        except ModelMismatchError as error:
            raise CheckpointError(f"{file}: {error}{describe_shape_differences(changes)}") from None
        return content.common, len(content.ignored)

    common, ignored = on_every_rank(world, fill)[0]
    run.optimizer.after_load()
    from_upstream.restore(run, file, common, with_optimizer=with_optimizer, weights_only=weights_only)
    if ignored:
        say_once(world, f"note: {ignored} entries without weights (_extra_state) were ignored")


def _restore_foreign(run: Run, directory: Path) -> None:
    """Take the weights of a Hugging Face directory, as if it had been converted first."""
    settings, world = run.config.checkpoint, run.groups.world
    files = run.recipe.foreign_files
    if files is None:
        raise CheckpointError(
            f"{HF_PREFIX}{directory}: this program reads no Hugging Face directories; start pretrain_gpt.py, or "
            "convert it first: python -m megatron.bridge.convert --source hf --target megatron"
        )
    opened: list[ForeignModel] = []
    on_every_rank(world, lambda: opened.append(files.open(directory, run.config)))
    model = opened[0]
    changes = find_changes(model.config.to_dict(), run.config)
    if from_dense := upcycling.begins(run, changes, directory):
        changes = upcycling.leave_out_expert_settings(changes)
    refuse_another_function(changes, str(directory), is_overridden=settings.override_model_settings)
    tensors = name_as_saved(run, directory, changes, select_tensors(run, with_optimizer=False))
    fill_tensors(run, directory, changes, functools.partial(model.load, group=world), tensors, from_dense)
    if settings.loads_main_params(run.config.model):
        run.optimizer.after_load()
    else:
        run.optimizer.reload_model_params()
    for note in model.notes:
        say_once(world, f"note: {note}")
    say_once(world, f"loaded the weights of {directory}; iteration, optimizer and random numbers start afresh")


def _compare_settings(run: Run, found: FoundCheckpoint) -> list[Change]:
    """Return how this run's settings differ from the checkpoint's; nothing, with a warning, where those cannot be
    read."""
    try:
        return find_changes(serialization.read_document(found.path, CONFIG), run.config)
    except (ConfigError, TypeError, AttributeError) as error:
        warn_once(run.groups.world, f"{found.path / CONFIG}.json cannot be compared with this run's settings: {error}")
        return []


def _read_rng_document(found: FoundCheckpoint, run: Run) -> dict[str, Any] | None:
    """The saved random-number state; None, with a sentence, where this job cannot continue it."""
    world = run.groups.world
    if f"{RNG}.json" not in found.manifest.files:
        raise CheckpointError(f"{found.path} was saved with --no-save-rng; pass --no-load-rng or --finetune")
    document = with_everyone(world, lambda: read_rng(found.path, world.rank()))
    reason = rng_state.explain_unrestorable_state(document, world, run.groups.grid.sizes)
    if reason is not None:
        warn_once(world, f"random numbers start from --seed instead of continuing: {reason}")
        return None
    return document


def _load_pretrained(run: Run, root: Path, iteration: int | None) -> None:
    """Weights only, from a checkpoint of ours or of upstream's."""
    if (directory := find_hf_directory(str(root))) is not None:
        _restore_foreign(run, directory)
        return
    if _restore_upstream(run, root, iteration, weights_only=True):
        return
    if not _restore_newest_good(run, functools.partial(find_checkpoint, root, iteration), weights_only=True):
        nothing = ("holds no checkpoint",)
        what = explain_no_directory(root) or "; ".join(explain_other_content(root) or nothing)
        raise CheckpointError(f"--pretrained-checkpoint {root} {what}")
