# SPDX-License-Identifier: Apache-2.0
"""A run goes on from a checkpoint, in whichever format that is: what is compared, refused, filled and said."""

from __future__ import annotations

import contextlib

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.validation import ModelMismatchError, shorten_list
from megatron.core.errors import CheckpointError
from megatron.core.tensor_parallel.fp8_products import recall_fallbacks
from megatron.training.checkpoint import rng_state, upcycling
from megatron.training.checkpoint.differences import (
    Change,
    describe_shape_differences,
    list_changes,
    refuse_another_function,
)
from megatron.training.checkpoint.layer_names import find_renaming, rename_tensors
from megatron.training.checkpoint.local_saves import list_replicas
from megatron.training.checkpoint.run_tensors import build_sharded_fallbacks, select_tensors
from megatron.training.checkpoint.save_directories import say_once, warn_once
from megatron.training.checkpoint.sources import CheckpointSource, Filling
from megatron.training.config.checkpoint import STRICTNESS
from megatron.training.run import Run


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
