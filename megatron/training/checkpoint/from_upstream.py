# SPDX-License-Identifier: Apache-2.0
"""Continuing a run from a checkpoint that upstream wrote: progress, schedule and settings beside its tensors.

Weights, optimizer state, iteration, consumed samples and learning-rate schedule go on where upstream's run stopped.
Random numbers start from --seed: upstream's generators are drawn from in another order, so that their states would
not give upstream's dropout masks here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.config_base import get_settings
from megatron.core.dist_checkpointing.agreement import with_everyone
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME
from megatron.core.dist_checkpointing.safe_pickle import read_metadata
from megatron.core.dist_checkpointing.saved_boxes import BoxReader, LazyTensor
from megatron.core.dist_checkpointing.upstream_dist import (
    METADATA_NAME,
    CommonState,
    explain_unusable_optimizer,
    find_setting,
    read_common_state,
)
from megatron.core.dist_checkpointing.upstream_optimizer import read_reshaped_state
from megatron.core.errors import CheckpointError, ConfigError, say
from megatron.core.process_groups_config import Group
from megatron.training.checkpoint.differences import Change, find_changes
from megatron.training.config.container import RunConfig
from megatron.training.config.run_groups import group_classes
from megatron.training.run import Run

_COMPARED = (bool, int, float, str)


def read_common(path: Path, *, with_optimizer: bool) -> CommonState:
    """Return what a torch_dist checkpoint says beside its tensors. Raises CheckpointError, also where the optimizer
    state is wanted and cannot be read."""
    metadata = read_metadata(path / METADATA_NAME)
    common = read_common_state(path, metadata)
    reason = explain_unusable_optimizer(metadata) if with_optimizer else None
    if reason is not None:
        raise CheckpointError(f"{path}: {reason}")
    if with_optimizer:
        check_optimizer(common, path)
    return common


def read_reshaped_optimizer(path: Path, common: CommonState, world: Group) -> dict[str, LazyTensor]:
    """The optimizer's tensors of a torch_dist checkpoint that are not saved in the shapes of the parameters, by key.

    Every rank calls this. Raises CheckpointError on every rank where they cannot be put together.
    """
    reader = with_everyone(world, lambda: BoxReader(path, read_metadata(path / METADATA_NAME)))
    return read_reshaped_state(reader, common.args, world)


def check_optimizer(common: CommonState, path: Path) -> None:
    """Raise CheckpointError where the optimizer's counts are missing."""
    if common.step_count is None or "num_steps" not in (common.scheduler or {}):
        raise CheckpointError(
            f"{path}: it does not say how many updates the optimizer has made; pass --no-load-optim or --finetune"
        )


def build_optimizer_state(common: CommonState) -> dict[str, Any]:
    """Return what is no tensor, as `optimizer.load_numbers` takes it."""
    return {"step_count": common.step_count, "optimizer": common.args.get("optimizer", "adam")}


def restore(run: Run, path: Path, common: CommonState, *, with_optimizer: bool, weights_only: bool) -> None:
    """After the tensors were filled: let the run go on from there. Every rank calls this."""
    if with_optimizer:
        assert common.scheduler is not None
        run.optimizer.load_numbers(build_optimizer_state(common))
        run.scheduler.load_state_dict(common.scheduler)
    speaks = run.groups.world.rank() == 0
    if weights_only:
        if speaks:
            say(f"checkpoint: loaded the weights of {path}; iteration, optimizer and random numbers start afresh")
        return
    run.progress.iteration = common.iteration
    run.progress.consumed_train_samples = common.consumed_train_samples
    run.progress.floating_point_operations = common.floating_point_operations
    # Ours have a manifest also where they are in upstream's formats.
    is_ours = any((directory / MANIFEST_NAME).is_file() for directory in (path, path.parent.parent))
    origin, checks = ("", "") if is_ours else (", which upstream wrote", "it has no checksums to verify, and ")
    if speaks:
        say(
            f"checkpoint: resuming from {path}{origin}, after {run.progress.consumed_train_samples} samples; "
            f"{checks}random numbers start from --seed"
        )


def find_upstream_changes(common: CommonState, config: RunConfig) -> list[Change]:
    """Return how the model of this run differs from upstream's, in the flags of the same name that both give a
    value."""
    saved = config.to_dict()
    for group, config_class in group_classes().items():
        for name, setting in get_settings(config_class).items():
            then, now = find_setting(common.args, name, setting.name), saved[group].get(name)
            comparable = isinstance(then, _COMPARED) and isinstance(now, _COMPARED)
            if setting.kind in ("shape", "function") and setting.name.startswith("--") and comparable:
                saved[group][name] = then
            # A GPT has no letters, and settings of earlier releases have no such name.
            elif name == "hybrid_layer_pattern":
                saved[group][name] = then or common.args.get("hybrid_override_pattern")
            # It knows no other way.
            elif name == "linear_norm_1p":
                saved[group][name] = True
            # None says that the model is dense, where it says anything.
            elif name == "num_moe_experts" and then is None and "num_experts" in common.args:
                saved[group][name] = None
    try:
        return find_changes(saved, config)
    except (ConfigError, TypeError, AttributeError) as error:
        raise CheckpointError(f"upstream's settings cannot be compared with this run's: {error}") from None
