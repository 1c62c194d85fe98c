# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of --save-adapter-only: adapters and their optimizer state, and the name of the checkpoint that has the
rest of the model. A reader reads both, as if they were one.

    iter_0000010/
      base.json      {"path": directory of the other checkpoint, "run_id": its manifest's}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.finding import FoundCheckpoint
from megatron.core.dist_checkpointing.mapping import OPTIMIZER_PREFIX, RNG_PREFIX, ShardedStateDict
from megatron.core.dist_checkpointing.validation import KeyReport
from megatron.core.errors import CheckpointError
from megatron.core.process_groups_config import Group
from megatron.training.checkpoint.run_tensors import iterate_placed_parameters
from megatron.training.run import Run

BASE = "base"
"""Name of the document."""


def saves_adapters_only(run: Run) -> bool:
    """Return whether --save-adapter-only has an effect."""
    return run.config.checkpoint.save_adapter_only and run.config.model.lora_rank is not None


def require_base(run: Run) -> None:
    """Raise CheckpointError where --save-adapter-only could not name the model that the adapters belong to."""
    if saves_adapters_only(run) and run.config.checkpoint.save is not None and run.base is None:
        raise CheckpointError(
            f"--save-adapter-only: the weights of this run are not those of a checkpoint that can be named; start it "
            f"with --pretrained-checkpoint and one of this program, not from {run.loaded_from or 'another source'}"
        )


def leave_out_base(run: Run, tensors: ShardedStateDict) -> ShardedStateDict:
    """Return the tensors without the parameters that are not trained."""
    frozen = {placement.name for _, param, placement in iterate_placed_parameters(run.model) if not param.requires_grad}
    return {key: tensor for key, tensor in tensors.items() if key not in frozen}


def describe_base(run: Run) -> dict[str, str]:
    """Return the document that says where those parameters are."""
    assert run.base is not None, "checked by require_base"
    return {"path": str(run.base.path.absolute()), "run_id": run.base.manifest.run_id}


def find_base(found: FoundCheckpoint, group: Group, given: str | None = None) -> FoundCheckpoint | None:
    """Return the checkpoint with the rest of the model of one that may have adapters only; None if it has all of it.

    given: --pretrained-checkpoint, which is looked at where the directory is no longer where it was. Raises
    CheckpointError on every member of the group where there is none, or another one.
    """
    if f"{BASE}.json" not in found.manifest.files:
        return None
    said = serialization.read_document(found.path, BASE)
    recorded = Path(said["path"])
    for place in (recorded, None if given is None else Path(given)):
        if place is None or (base := serialization.find(place, None, group)) is None:
            continue
        if base.manifest.run_id != said["run_id"]:
            raise CheckpointError(
                f"{found.path} has adapters of the model in {recorded}, and {base.path} was saved by another run; "
                "bring that checkpoint back, or begin anew with --finetune"
            )
        return base
    raise CheckpointError(
        f"{found.path} has only adapters, and the model that they belong to is no longer in {recorded}; bring it back"
        + ("" if given is None else f", or give its directory: --pretrained-checkpoint {given} holds no checkpoint")
    )


def load(
    tensors: ShardedStateDict, found: FoundCheckpoint, base: FoundCheckpoint | None, group: Group, **options: Any
) -> KeyReport:
    """Fill the tensors of all members of the group from a checkpoint and, what is in that, its base; otherwise as
    serialization.load()."""
    if base is None:
        return serialization.load(tensors, found, group, **options)
    # The same division on all ranks, whatever they hold.
    own = {
        key: tensor
        for key, tensor in tensors.items()
        if key.startswith((OPTIMIZER_PREFIX, RNG_PREFIX)) or ".adapter." in (tensor.fallback_key or key)
    }
    rest = {key: tensor for key, tensor in tensors.items() if key not in own}
    serialization.load(rest, base, group, **options | {"may_have_more": True})
    return serialization.load(own, found, group, **options)
