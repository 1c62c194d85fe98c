# SPDX-License-Identifier: Apache-2.0
"""Weights averaged over several checkpoints of one run, as a checkpoint of only weights.

The average of the last few is often better than the last (Izmailov et al. 2018, "Averaging weights leads to wider
optima"). Tensors are read, averaged and written one after the other: in memory are a few copies of one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.directory import (
    iteration_directory,
    make_save_directory,
    refuse_unwritable,
    saved_iterations,
    settle_leftovers,
)
from megatron.core.dist_checkpointing.directory_lock import DirectoryLock
from megatron.core.dist_checkpointing.manifest import read_manifest, verify_files
from megatron.core.dist_checkpointing.mapping import OPTIMIZER_PREFIX, ShardedStateDict, ShardedTensor
from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.placement import Placement
from megatron.core.process_groups_config import SingleRankGroup
from megatron.core.upstream_checkpoints.stored_tensors import (
    OUR_FORMAT,
    StoredCheckpoint,
    StoredTensor,
    count_bytes,
    kind_of,
    open_checkpoint,
)

MAIN_PREFIX = f"{OPTIMIZER_PREFIX}fp32_param."
"""Key of a parameter's copy in float32, which 16-bit training keeps."""
_LISTED = 5


@dataclass(frozen=True)
class _AveragedTensor(ShardedTensor):
    """A tensor that is computed when it is written; `data` has its shape and dtype, and no memory."""

    sources: tuple[StoredTensor, ...] = ()
    """The last one is of the newest checkpoint."""
    shares: tuple[float, ...] = ()
    """They sum to 1."""
    on_bytes: Callable[[int], None] = lambda size: None

    def block(self, index: int) -> Tensor:
        newest = self.sources[-1].read()
        self.on_bytes(newest.nbytes)
        # Counters are no weights, and half of one means nothing.
        if not newest.is_floating_point():
            return newest.to(self.dtype)
        # In float64: the average of equal values is then that value, whatever their number.
        total = newest.double() * self.shares[-1]
        del newest
        # Padding, whose number of rows may differ, is never used: it stays what the newest has there, scaled.
        used = total if self.valid_rows is None else total[: self.valid_rows]
        for source, share in zip(self.sources[:-1], self.shares[:-1], strict=True):
            values = source.read()
            self.on_bytes(values.nbytes)
            used.add_(values if self.valid_rows is None else values[: self.valid_rows], alpha=share)
            del values  # before the next one is read
        return total.to(self.dtype)


def average_checkpoints(
    root: Path,
    iterations: Sequence[int],
    weights: Sequence[float] | None,
    output: Path,
    on_bytes: Callable[[int], None] = lambda size: None,
) -> Path:
    """Average the weights of these iterations in `root` and save them into `output`, a directory of checkpoints, under
    the newest one's number. Returns the new checkpoint's directory.

    weights: one for each iteration; None weighs all alike. on_bytes: hears of the bytes read, each file once for its
    checksum and each averaged tensor once. The dtype of each tensor is the newest checkpoint's; where 16-bit training
    has kept a copy in float32, that is averaged and rounded once. State of the optimizer and random numbers are left
    out. Raises CheckpointError when a checkpoint is missing, damaged, or of another model, ConfigError for unusable
    numbers or an output that has this iteration already, StorageError.
    """
    shares = _find_shares(iterations, weights)
    order = sorted(range(len(iterations)), key=lambda index: iterations[index])
    checkpoints = [_open_verified(root, iterations[index], on_bytes) for index in order]
    newest, number = checkpoints[-1], max(iterations)
    tensors = _plan(checkpoints, tuple(shares[index] for index in order), on_bytes)
    make_save_directory(output)
    if number in saved_iterations(output):
        raise ConfigError(f"--save {output} has iteration {number} already; give another directory")
    state = serialization.read_document(newest.path, "state")
    documents = {
        # As --no-save-optim and --no-save-rng would have left it.
        "state": {"progress": state["progress"], "optimizer": None, "scheduler": None},
        "config": serialization.read_document(newest.path, "config"),
        "average": {"iterations": [iterations[index] for index in order], "shares": [shares[index] for index in order]},
    }
    # Files in subdirectories were copied along: the tokenizer's.
    attachments = {name: newest.path / name for name in read_manifest(newest.path).files if "/" in name}
    with refuse_unwritable(output):
        lock = DirectoryLock(output, lambda sentence: None)
        settle_leftovers(output)
    try:
        return serialization.save(
            tensors, output, number, documents=documents, attachments=attachments, group=SingleRankGroup(), lock=lock
        )
    finally:
        lock.release()


def _open(root: Path, iteration: int) -> StoredCheckpoint:
    """The checkpoint of an iteration. Raises CheckpointError where there is none, or it is not in our format."""
    path = iteration_directory(root, iteration)
    if not path.is_dir():
        saved = ", ".join(map(str, saved_iterations(root))) or "none"
        raise CheckpointError(f"--load {root} holds no iteration {iteration}; saved iterations: {saved}")
    checkpoint = open_checkpoint(path)
    if checkpoint.format != OUR_FORMAT:
        raise CheckpointError(
            f"{path} is in the format {checkpoint.format}, and only this program's own is averaged; convert each "
            f"of them first: pretrain_gpt.py --load {root} --ckpt-step {iteration} --ckpt-convert-format {OUR_FORMAT} "
            "--ckpt-convert-save NEW, with the flags of its model"
        )
    return checkpoint


def count_work_bytes(root: Path, iterations: Sequence[int]) -> int:
    """Bytes that average_checkpoints will report. Raises CheckpointError."""
    total = 0
    for iteration in iterations:
        checkpoint = _open(root, iteration)
        total += sum(record.bytes for record in read_manifest(checkpoint.path).files.values())
        total += sum(count_bytes(tensor) for tensor in _weights(checkpoint).values())
    return total


def _find_shares(iterations: Sequence[int], weights: Sequence[float] | None) -> list[float]:
    if len(iterations) < 2 or len(set(iterations)) < len(iterations):
        raise ConfigError(f"--iterations {' '.join(map(str, iterations))}: give two or more, each once")
    if weights is None:
        return [1 / len(iterations)] * len(iterations)
    if len(weights) != len(iterations):
        raise ConfigError(f"--weights has {len(weights)} numbers for {len(iterations)} iterations; give one for each")
    # not (w >= 0): NaN is refused as well.
    if any(not 0 <= weight < float("inf") for weight in weights) or not sum(weights):
        raise ConfigError(f"--weights {' '.join(map(str, weights))}: give finite numbers from 0 on, not all of them 0")
    return [weight / sum(weights) for weight in weights]


def _open_verified(root: Path, iteration: int, on_bytes: Callable[[int], None]) -> StoredCheckpoint:
    checkpoint = _open(root, iteration)
    verify_files(checkpoint.path, read_manifest(checkpoint.path), on_bytes)
    return checkpoint


def _weights(checkpoint: StoredCheckpoint) -> dict[str, StoredTensor]:
    """Key -> what to average: the copy in float32 where there is one."""
    every = {tensor.key: tensor for tensor in checkpoint.tensors}
    keys = (key for key in every if kind_of(key) == "weights")
    return {key: every.get(MAIN_PREFIX + key, every[key]) for key in keys}


def _plan(
    checkpoints: Sequence[StoredCheckpoint], shares: tuple[float, ...], on_bytes: Callable[[int], None]
) -> ShardedStateDict:
    """The averages by key, none of them computed yet. Raises CheckpointError when the models differ."""
    of_each = [_weights(checkpoint) for checkpoint in checkpoints]
    newest = of_each[-1]
    formats = {tensor.key: tensor for tensor in checkpoints[-1].tensors}
    problems: list[str] = []
    for checkpoint, found in zip(checkpoints[:-1], of_each[:-1], strict=True):
        name = checkpoint.path.name
        problems += [f"{key} is missing in {name}" for key in newest if key not in found]
        problems += [f"{key} is in {name} only" for key in found if key not in newest]
        problems += [
            f"{key} is {_used_shape(found[key], formats[key])} in {name}, {_used_shape(newest[key], formats[key])} in "
            f"{checkpoints[-1].path.name}"
            for key in newest
            if key in found and _used_shape(found[key], formats[key]) != _used_shape(newest[key], formats[key])
        ]
    if problems:
        more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        raise CheckpointError(f"these are checkpoints of different models: {'; '.join(problems[:_LISTED])}{more}")
    tensors: ShardedStateDict = {}
    for key in newest:
        saved = formats[key]
        placement = Placement(key, saved.shape, valid_rows=saved.valid_rows)
        empty = torch.empty(saved.shape, dtype=saved.dtype, device="meta")
        tensors[key] = _AveragedTensor(
            **vars(ShardedTensor.from_placement(empty, placement)),
            sources=tuple(found[key] for found in of_each), shares=shares, on_bytes=on_bytes,
        )  # fmt: skip
    return tensors


def _used_shape(tensor: StoredTensor, like: StoredTensor) -> tuple[int, ...]:
    """Shape without rows of padding, whose number may change during a run."""
    # The copy in float32 has the padding of its parameter, and may not say so itself.
    rows = tensor.valid_rows if tensor.valid_rows is not None else like.valid_rows
    return tensor.shape if rows is None else (min(rows, tensor.shape[0]), *tensor.shape[1:])
