# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a few tensors, for tests of the directory protocol that need no model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.finding import FoundCheckpoint
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.process_groups_config import SingleRankGroup

ALONE = SingleRankGroup()


def tensors(value: float = 0.0) -> ShardedStateDict:
    """Two tensors whose content tells them from those of another value."""
    content = {"weight": torch.full((7, 5), value), "optimizer.state.exp_avg.weight": torch.full((7, 5), -value)}
    return {key: ShardedTensor.whole(key, tensor) for key, tensor in content.items()}


def save(root: Path, iteration: int, value: float | None = None, attachments: Mapping[str, Path] | None = None) -> Path:
    """Save an iteration whose tensors hold `value`, by default the iteration's number."""
    root.mkdir(exist_ok=True)
    document = {"iteration": iteration, "value": iteration if value is None else value}
    return serialization.save(
        tensors(float(document["value"])), root, iteration, documents={"state": document}, attachments=attachments,
        group=ALONE,
    )  # fmt: skip


def find(root: Path, iteration: int | None = None) -> FoundCheckpoint | None:
    """What a run would load."""
    return serialization.find(root, iteration, ALONE)


def content(found: FoundCheckpoint) -> float:
    """The value in the tensors, after checking that everything in the checkpoint belongs to the same save."""
    loaded = tensors(float("nan"))
    serialization.load(loaded, found, ALONE)
    value = float(loaded["weight"].data[0, 0])
    assert all(
        torch.equal(tensor.data, expected.data)
        for tensor, expected in zip(loaded.values(), tensors(value).values(), strict=True)
    ), "tensors of different saves are mixed"
    document = serialization.read_document(found.path, "state")
    assert (document["value"], document["iteration"]) == (value, found.manifest.iteration)
    return value
