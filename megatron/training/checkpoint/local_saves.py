# SPDX-License-Identifier: Apache-2.0
"""--non-persistent-ckpt-type local: what a run saves on the ranks' nodes, and when it continues from there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import local_checkpoints, non_persistent
from megatron.core.dist_checkpointing.agreement import on_first_rank
from megatron.core.dist_checkpointing.local_checkpoints import Copying, FoundPart, Offer, find_rank_directory
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.errors import StorageError, report_error
from megatron.core.process_groups_config import Group
from megatron.training.checkpoint import rng_state
from megatron.training.checkpoint.documents import RNG
from megatron.training.checkpoint.run_tensors import select_tensors
from megatron.training.checkpoint.save_directories import (
    find_global_directory,
    find_local_directory,
    find_lock,
    say_once,
    warn_once,
)
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.run import Run


def save_locally(run: Run, tensors: ShardedStateDict, documents: Mapping[str, Any]) -> Path:
    """Save this rank's part on its node, and remove those before when all ranks have theirs; every rank calls this.
    Raises StorageError on every rank."""
    settings, groups = run.config.checkpoint, run.groups
    assert settings.save is not None
    root = settings.save
    directory = find_rank_directory(find_local_directory(settings, root), groups.world.rank())
    documents = dict(documents)
    if rng := documents.get(RNG):
        # All ranks' states in the files of each would grow with the square of their number.
        own = [entry if rank == groups.world.rank() else None for rank, entry in enumerate(rng["ranks"])]
        documents[RNG] = {**rng, "ranks": own}
    said = on_first_rank(groups.world, lambda: non_persistent.build_document(Path(root)))
    path = local_checkpoints.save(
        tensors, directory, run.progress.iteration, documents=documents, since=said["since"],
        layout=groups.grid.sizes, group=groups.world,
        replicas=list_replicas(run) if settings.non_persistent_local_ckpt_algo == "fully_parallel" else (),
        lock=find_lock(run.save_locks, directory),
    )  # fmt: skip
    copying = find_copying(settings)
    partners = [] if copying is None else copying.list_partners(groups.world.rank())
    kept = {run.progress.iteration}
    if copying is not None and _copy_to_partners(run, run.progress.iteration, path, directory, copying):
        # Nothing is removed while copies fail but what was saved since: the oldest is the last that is whole with its
        # copies. All of them would fill the disk.
        kept |= {local_checkpoints.find_oldest(directory, groups.world) or run.progress.iteration}
    try:
        local_checkpoints.remove_others(directory, kept, keeps_copies_of=partners)
    except StorageError as error:
        report_error(StorageError(f"earlier local checkpoints were not removed: {error}; training goes on"))
    return path


def find_copying(settings: CheckpointConfig) -> Copying | None:
    """Return which ranks keep copies of each other's parts; None without --replication."""
    if not settings.replication or not settings.saves_locally:
        return None
    assert settings.replication_jump is not None
    return Copying(settings.replication_jump, settings.replication_factor)


def _copy_to_partners(run: Run, iteration: int, path: Path, directory: Path, copying: Copying) -> list[str]:
    """See local_checkpoints.copy_to_partners; says what went wrong: without a copy a part is still a part."""
    problems = local_checkpoints.copy_to_partners(path, directory, copying, run.groups.world)
    if problems and run.is_first_rank:
        others = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        report_error(StorageError(f"iteration {iteration}: {problems[0]}{others}; training goes on"))
    return problems


def find_local_part(run: Run, root: Path) -> FoundPart | None:
    """Return this rank's part of a local checkpoint of --load `root` that is newer than everything there; None on every
    rank where there is none, with a warning where one was skipped."""
    settings, groups = run.config.checkpoint, run.groups
    if not settings.loads_locally:
        return None
    place = find_local_directory(settings, str(root))
    directory = find_rank_directory(place, groups.world.rank())
    other = find_global_directory(settings, str(root))

    def is_wanted(offer: Offer) -> bool:
        return non_persistent.is_newer_than_all(offer.since, offer.iteration, root, other)

    tensors = select_tensors(run, with_optimizer=True) | rng_state.build_sharded_rng_state(groups.world.rank())
    layout = local_checkpoints.compute_layout(tensors, groups.grid.sizes, groups.world)
    found, passed_over = local_checkpoints.find(directory, layout, groups.world, is_wanted)
    if passed_over:
        warn_once(groups.world, f"all ranks take an earlier checkpoint: {'; '.join(passed_over)}")
    if found is not None and found.moved:
        more = f"; {len(found.moved) - 1} more likewise" if len(found.moved) > 1 else ""
        say_once(groups.world, f"{found.moved[0]}, which has it on its node{more}")
        copying = find_copying(settings)
        if copying is not None and settings.save is not None and find_local_directory(settings, settings.save) == place:
            # The node that has come into the place of a lost one has no copies yet, and may be followed by the next.
            _copy_to_partners(run, found.checkpoint.manifest.iteration, found.checkpoint.path, directory, copying)
    return found


def list_replicas(run: Run) -> tuple[Group, Group]:
    """The groups whose members hold the same: dense weights, experts."""
    return run.groups.get_replicas(of_experts=False), run.groups.get_replicas(of_experts=True)
