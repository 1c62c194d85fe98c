# SPDX-License-Identifier: Apache-2.0
"""A run goes on from a checkpoint, in whichever format that is: where one is looked for, and what is compared, refused,
filled and said. A resumed run repeats the uninterrupted one bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.core.dist_checkpointing import non_persistent, serialization
from megatron.core.dist_checkpointing.agreement import on_first_rank
from megatron.core.dist_checkpointing.finding import FoundCheckpoint, find_checkpoint
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, DamagedCheckpointError
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.validation import ModelMismatchError, shorten_list
from megatron.core.dist_checkpointing.verification import Look
from megatron.core.errors import CheckpointError, say
from megatron.core.paths import explain_no_directory
from megatron.core.process_groups_config import Group
from megatron.core.tensor_parallel.fp8_products import recall_fallbacks
from megatron.core.upstream_checkpoints.common_state import RELEASE, find_release, find_upstream_checkpoint
from megatron.core.upstream_checkpoints.diagnosis import (
    explain_foreign_format,
    explain_nothing,
    explain_wrong_level,
)
from megatron.core.upstream_checkpoints.rank_file import FILE_NAME, find_legacy_file
from megatron.training.checkpoint import rng_state, upcycling
from megatron.training.checkpoint.differences import (
    Change,
    describe_shape_differences,
    list_changes,
    refuse_another_function,
)
from megatron.training.checkpoint.layer_names import find_renaming, rename_tensors
from megatron.training.checkpoint.local_saves import find_local_part, list_replicas
from megatron.training.checkpoint.run_tensors import (
    build_sharded_fallbacks,
    select_tensors,
)
from megatron.training.checkpoint.save_directories import find_global_directory, say_once, warn_once
from megatron.training.checkpoint.sources import (
    CheckpointSource,
    Filling,
    ForeignSource,
    LocalSource,
    OurSource,
    RankFiles,
    TorchDist,
)
from megatron.training.config.checkpoint import STRICTNESS, CheckpointConfig, find_hf_directory
from megatron.training.run import Run


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


# ---- one checkpoint


def restore(run: Run, source: CheckpointSource, *, weights_only: bool = False) -> None:
    """Continue from a checkpoint, or begin with its weights alone. Every rank calls this.

    Raises CheckpointError on every rank, where it can before a tensor is touched.
    """
    settings, world, path = run.config.checkpoint, run.groups.world, source.path
    changes = source.find_changes()
    if from_dense := upcycling.begins(run, changes, path):
        changes, weights_only = upcycling.leave_out_expert_settings(changes), True
    refuse_another_function(changes, str(path), is_overridden=settings.override_model_settings)
    with_optimizer = not (weights_only or settings.no_load_optim)
    state = source.read_state(with_optimizer=with_optimizer)
    if with_optimizer:
        # Before anything is loaded: a state that this optimizer cannot continue must leave the run as it was.
        run.optimizer.check_state(state.optimizer)
    random_numbers = None if weights_only or settings.no_load_rng else source.read_random_numbers()

    modules = [chunk.module for chunk in run.model]
    with_main = source.is_exact or settings.loads_main_params(run.config.model)
    tensors = select_tensors(run, with_optimizer=with_optimizer, with_main=with_main) | build_sharded_fallbacks(modules)
    if random_numbers is not None:
        tensors |= rng_state.build_sharded_rng_state(world.rank())
    # The checkpoint may be of a GPT where this is a hybrid, or the other way round.
    renamed = rename_tensors(tensors.values(), find_renaming(run, changes, path))
    tensors = {tensor.key: tensor for tensor in renamed}
    _fill(run, source, changes, tensors, from_dense=from_dense, with_state=with_optimizer or with_main)

    # A checkpoint that the run continues may be removed when it has saved the next one.
    is_base = source.weights is not None and (weights_only or source.weights.path != path) and not from_dense
    run.base = source.weights if is_base else None
    recall_fallbacks(modules)
    if with_optimizer:
        run.optimizer.load_numbers(state.optimizer)
        run.scheduler.load_state_dict(state.scheduler)
    if with_optimizer or with_main:
        run.optimizer.after_load()
    else:
        # The optimizer's main parameters are copies in float32: they must follow the weights that were loaded.
        run.optimizer.reload_model_params()
    if random_numbers is not None:
        # After everything that may draw: from here on the numbers continue the saved run's.
        rng_state.restore(random_numbers, tensors, world.rank())
    for note in source.notes:
        say_once(world, f"note: {note}")
    # Progress stays at 0, and the hooks have no state: this is a new run with given weights.
    if weights_only:
        say_once(world, f"loaded the weights of {path}; iteration, optimizer and random numbers start afresh")
        return
    if source.is_ours:
        run.loaded_from = path
    run.progress.load_state_dict(state.progress)
    run.hooks.load_state_dict(state.hooks)
    samples = run.progress.consumed_train_samples
    say_once(world, f"resuming from {path}{source.origin}, after {samples} samples{source.ending}")
    if source.is_ours and (lines := list_changes(changes)):
        say_once(world, "\n    ".join(["settings that changed:", *lines]))


def _fill(
    run: Run,
    source: CheckpointSource,
    changes: list[Change],
    tensors: ShardedStateDict,
    *,
    from_dense: bool,
    with_state: bool,
) -> None:
    """Fill the tensors with what --dist-ckpt-strictness tolerates, and say what it has tolerated. from_dense: the
    checkpoint is of a dense model, whose MLPs become experts."""
    settings = run.config.checkpoint
    strictness = STRICTNESS[settings.dist_ckpt_strictness]
    # With --no-initialization a weight that the checkpoint lacks would hold whatever was in memory.
    may_lack = strictness.may_lack and run.config.model.perform_initialization
    # What experts are made of stands in host memory, and does not travel over the devices' network.
    is_shared = settings.ckpt_fully_parallel_load and not from_dense
    tolerated = {"may_lack": may_lack, "may_have_more": strictness.may_have_more}
    wish = Filling(list_replicas(run) if is_shared else (), with_state, tolerated)
    try:
        with upcycling.load_as_dense(run, tensors) if from_dense else contextlib.nullcontext(tensors) as asked:
            report = source.fill(asked, wish)
    except ModelMismatchError as error:
        raise CheckpointError(f"{source.path}: {error}{describe_shape_differences(changes)}") from None
    for keys, what in (
        (report.lacking, "of this model are not in it and begin with their initial values"),
        (report.surplus if strictness.lists_more else (), "in it have no place in this model and were left out"),
    ):
        if keys:
            lines = [f"{source.path}: these tensors {what}:", *shorten_list(keys)]
            warn_once(run.groups.world, "\n    ".join(lines))
