# SPDX-License-Identifier: Apache-2.0
"""Filling a run's tensors from a checkpoint: what may differ between the two, and which ranks share the reading."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.validation import KeyReport, ModelMismatchError, shorten_list
from megatron.core.errors import CheckpointError
from megatron.core.process_groups_config import Group
from megatron.training.checkpoint import upcycling
from megatron.training.checkpoint.differences import Change, describe_shape_differences
from megatron.training.checkpoint.layer_names import ask_for_sections, find_renaming, rename_tensors
from megatron.training.checkpoint.run_tensors import select_tensors
from megatron.training.checkpoint.save_directories import warn_once
from megatron.training.config.checkpoint import STRICTNESS
from megatron.training.run import Run


def fill_tensors(
    run: Run,
    path: Path,
    changes: list[Change],
    load: Callable[..., KeyReport],
    tensors: ShardedStateDict,
    from_dense: bool,
) -> KeyReport:
    """Call `load` with what --dist-ckpt-strictness tolerates; say what it has tolerated, and return it. from_dense: the
    checkpoint is of a dense model, whose MLPs become experts."""
    strictness = STRICTNESS[run.config.checkpoint.dist_ckpt_strictness]
    # With --no-initialization a weight that the checkpoint lacks would hold whatever was in memory.
    may_lack = strictness.may_lack and run.config.model.perform_initialization
    try:
        with upcycling.load_as_dense(run, tensors) if from_dense else contextlib.nullcontext(tensors) as asked:
            report = load(asked, may_lack=may_lack, may_have_more=strictness.may_have_more)
    except ModelMismatchError as error:
        raise CheckpointError(f"{path}: {error}{describe_shape_differences(changes)}") from None
    _list_tolerated(report, path, run.groups.world, lists_more=strictness.lists_more)
    return report


def name_as_saved(run: Run, path: Path, changes: list[Change], tensors: ShardedStateDict) -> ShardedStateDict:
    """Return what to load in place of tensors, from a checkpoint that may be of a GPT where this is a hybrid, or the
    other way round."""
    renamed = rename_tensors(tensors.values(), find_renaming(run, changes, path))
    return {tensor.key: tensor for tensor in renamed}


def select_for_upstream(
    run: Run, path: Path, changes: list[Change], reshaped: Collection[str], *, with_optimizer: bool
) -> tuple[ShardedStateDict, ShardedStateDict]:
    """Return what to load from a torch_dist checkpoint of upstream's: from `reshaped`, keys of optimizer state that was
    put together, and from its files.
    There each section of a mixer is a tensor of its own; in flat buckets it is not."""
    whole = select_tensors(run, with_optimizer=with_optimizer)
    others = {key: tensor for key, tensor in whole.items() if key not in reshaped}
    sections = ask_for_sections(run.config.model, others)
    flat = {key: tensor for key, tensor in whole.items() if key not in others}
    named = name_as_saved(run, path, changes, flat | sections)
    flat = {key: tensor for key, tensor in named.items() if key in reshaped}
    return flat, {key: tensor for key, tensor in named.items() if key not in reshaped}


def list_replicas(run: Run, from_dense: bool) -> Sequence[Group]:
    """With --ckpt-fully-parallel-load, the groups whose members share the reading: of dense weights, of experts."""
    # What experts are made of stands in host memory, and does not travel over the devices' network.
    if from_dense or not run.config.checkpoint.ckpt_fully_parallel_load:
        return ()
    return run.groups.get_replicas(of_experts=False), run.groups.get_replicas(of_experts=True)


def _list_tolerated(report: KeyReport, path: Path, world: Group, *, lists_more: bool) -> None:
    """Say which weights of the model begin with their initial values, and which of the checkpoint were left out."""
    for keys, what in (
        (report.lacking, "of this model are not in it and begin with their initial values"),
        (report.surplus if lists_more else (), "in it have no place in this model and were left out"),
    ):
        if keys:
            warn_once(world, "\n    ".join([f"{path}: these tensors {what}:", *shorten_list(keys)]))
