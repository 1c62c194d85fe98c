# SPDX-License-Identifier: Apache-2.0
"""Our checkpoints as a converter reads and writes them: whole tensors by their names, one at a time."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.agreement import on_first_rank
from megatron.core.dist_checkpointing.directory import TRACKER_NAME, iteration_directory
from megatron.core.dist_checkpointing.durable import storage_errors, sync_directory, write_file
from megatron.core.dist_checkpointing.finding import FoundCheckpoint
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, verify_files
from megatron.core.dist_checkpointing.mapping import OPTIMIZER_PREFIX, RNG_PREFIX, ShardedTensor
from megatron.core.dist_checkpointing.safe_pickle import read_metadata
from megatron.core.dist_checkpointing.state_dicts import load_tensors_metadata
from megatron.core.dist_checkpointing.torch_dist import METADATA_NAME
from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.paths import explain_no_directory, explain_unmakeable_directory
from megatron.core.placement import Placement
from megatron.core.process_groups_config import Group, SingleRankGroup
from megatron.core.upstream_checkpoints.diagnosis import explain_other_content
from megatron.training.checkpoint.adapter_saves import find_base
from megatron.training.checkpoint.documents import CONFIG, STATE
from megatron.training.config.container import RunConfig
from megatron.training.recipes.hf_config import read_json
from megatron.training.run import Progress

ALONE = SingleRankGroup()
"""The group of a conversion by one process."""


@dataclass(frozen=True)
class DeferredTensor(ShardedTensor):
    """A full tensor that is made only when it is written; `data` has its shape and dtype (device `meta`)."""

    make: Callable[[], Tensor] = lambda: torch.empty(0)

    @classmethod
    def of(cls, placement: Placement, dtype: torch.dtype, make: Callable[[], Tensor]) -> DeferredTensor:
        """Return the parameter with this placement, which `make` makes in this dtype."""
        data = torch.empty(placement.local_shape, dtype=dtype, device="meta")
        described = ShardedTensor.from_placement(data, placement)
        return cls(**vars(described), make=make)

    def block(self, index: int) -> Tensor:
        """The tensor itself: it is one block."""
        return self.make()


def write_checkpoint(
    root: Path,
    tensors: Mapping[str, ShardedTensor],
    config: RunConfig,
    attachments: Mapping[str, Path],
    group: Group = ALONE,
) -> Path:
    """Save a model as iteration 0 of the directory `root`: weights and settings, without an optimizer.

    attachments: name in the checkpoint -> file to copy. group: processes that all call this with all tensors, of which
    each makes and writes an equal share. Returns the checkpoint's directory. Raises StorageError.
    """
    # A checkpoint that was never trained: a run starts afresh what is None.
    state = {"progress": Progress(0).state_dict(), "optimizer": None, "scheduler": None}
    return serialization.save(
        dict(tensors), root, 0, documents={STATE: state, CONFIG: config.to_dict()}, attachments=attachments, group=group
    )


class OpenCheckpoint:
    """A checkpoint of ours: its settings, the names of its weights, and each weight on demand."""

    def __init__(self, root: Path, iteration: int | None = None, group: Group = ALONE) -> None:
        """root: a directory of checkpoints, of which the latest is taken, or one of them. Every file is verified.

        group: processes that open it together, and verify a share each. Raises CheckpointError.
        """
        found = serialization.find(root, iteration, group)
        if found is None:
            what, remedy = "holds no checkpoint", "give a directory that --save has written"
            if obstacle := explain_no_directory(root):
                what = obstacle
            else:
                what, remedy = explain_other_content(root) or (what, remedy)
            raise CheckpointError(f"{root} {what}; {remedy}")
        self.found: FoundCheckpoint = found
        self.path: Path = found.path
        self.valid_rows: Mapping[str, int] = serialization.read_valid_rows(found.path)
        contents = load_tensors_metadata(found.path)
        self.contents: Mapping[str, ShardedTensor] = {
            key: tensor for key, tensor in contents.items() if not key.startswith((OPTIMIZER_PREFIX, RNG_PREFIX))
        }
        # Read once: the table is as long as the checkpoint has tensors, and each of these is read by itself.
        self._places = dict.fromkeys(self.contents, (found, read_metadata(found.path / METADATA_NAME)))
        # The weights of one with adapters only are in another.
        if (base := find_base(found, group)) is not None:
            rest = OpenCheckpoint(base.path, group=group)
            self.valid_rows = {**rest.valid_rows, **self.valid_rows}
            self.contents = {**rest.contents, **self.contents}
            self._places = rest._places | self._places
        self.has_optimizer = any(key.startswith(OPTIMIZER_PREFIX) for key in contents)

    def read_config(self) -> RunConfig:
        """The settings, for one process. Raises CheckpointError where this release cannot use them."""
        try:
            config = RunConfig.from_dict(serialization.read_document(self.path, CONFIG))
            return config.with_groups(model=config.model.on_one_process())
        except (ConfigError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{self.path / CONFIG}.json holds settings that cannot be used: {error}") from error

    def read_saved_layout(self) -> tuple[int, int]:
        """Tensor-parallel and pipeline-parallel size of the run that saved it."""
        model = serialization.read_document(self.path, CONFIG).get("model", {})
        return model.get("tensor_model_parallel_size", 1), model.get("pipeline_model_parallel_size", 1)

    def read(self, key: str) -> Tensor:
        """Return a weight without its padding rows, in the dtype it was saved in. Raises CheckpointError."""
        stored = self.contents[key]
        tensor = torch.empty(stored.global_shape, dtype=stored.dtype)
        whole = ShardedTensor.whole(key, tensor)
        # One weight at a time, so that the model need not fit into memory; the others are not missed.
        found, table = self._places[key]
        serialization.load({key: whole}, found, ALONE, may_have_more=True, contents=table)
        return tensor[: self.valid_rows.get(key, len(tensor))] if tensor.dim() else tensor

    def read_shape(self, key: str) -> tuple[int, ...]:
        """Shape of a weight without its padding rows."""
        shape = self.contents[key].global_shape
        return (self.valid_rows.get(key, shape[0]), *shape[1:]) if shape else shape

    def list_attachments(self, directory: str) -> dict[str, Path]:
        """Files that the checkpoint carries in one of its directories, by their names there."""
        prefix = f"{directory}/"
        return {
            name.removeprefix(prefix): self.path / name
            for name in self.found.manifest.files
            if name.startswith(prefix) and "/" not in name.removeprefix(prefix)
        }


@contextlib.contextmanager
def fresh_directory(path: Path, asked_by: str = "--output-path", group: Group = ALONE) -> Iterator[Path]:
    """A directory to write into, which gets the name `path` when the block ends, and is removed when it fails.

    asked_by: what named the path, for errors. group: processes that write into it together. Raises ConfigError where
    `path` is anything but missing or an empty directory.
    """
    temporary = on_first_rank(group, lambda: _make_beside(path, asked_by))
    try:
        yield temporary
        on_first_rank(group, lambda: _rename(temporary, path.absolute()))
    except BaseException:
        if group.rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextlib.contextmanager
def staged_directory(beside: Path, group: Group = ALONE) -> Iterator[Path]:
    """An empty directory on the disk of the path `beside`, where the result will be, of all processes of `group`; it
    goes when the block ends. Raises ConfigError, on all, where `beside` is anything but missing or an empty directory.
    """

    def make() -> Path:
        # Now, and not only when the result gets its name: what comes first may take hours.
        _refuse_used(beside, "--output-path")
        with storage_errors(f"making a directory beside {beside}"):
            return Path(tempfile.mkdtemp(prefix=f"{beside.name}.tmp-", dir=beside.absolute().parent))

    path = on_first_rank(group, make)
    try:
        yield path
    finally:
        if group.rank() == 0:
            shutil.rmtree(path, ignore_errors=True)


def _refuse_used(path: Path, asked_by: str) -> None:
    problem = explain_unmakeable_directory(path)
    if problem is None and path.is_dir() and next(path.iterdir(), None) is not None:
        problem = "is not empty; give a directory that does not exist yet"
    if problem is not None:
        raise ConfigError(f"{asked_by} {path} {problem}")


def _make_beside(path: Path, asked_by: str) -> Path:
    _refuse_used(path, asked_by)
    # Next to its final name, because a rename is atomic only within a file system.
    path = path.absolute()
    temporary = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")
    with storage_errors(f"making {temporary}"):
        temporary.mkdir()
    return temporary


def _rename(temporary: Path, path: Path) -> None:
    with storage_errors(f"writing {path}"):
        sync_directory(temporary)
        os.rename(temporary, path)  # POSIX replaces an empty directory, and refuses any other
        sync_directory(path.parent)


def read_carried(checkpoint: OpenCheckpoint, directory: str, name: str) -> dict[str, Any] | None:
    """The fields of a JSON file that the checkpoint carries; None where it has no such file."""
    path = checkpoint.list_attachments(directory).get(name)
    return None if path is None else read_json(path)


def refuse_layout(config: RunConfig, tensor_ranks: int, stages: int) -> None:
    """Raise ConfigError where a checkpoint's model cannot be divided like this."""
    # Sequence parallelism and the like were of the saving run, and are gone with its layout.
    model = config.model.on_one_process(
        tensor_model_parallel_size=tensor_ranks, pipeline_model_parallel_size=stages,
        pipeline_dtype=config.model.params_dtype,
    )  # fmt: skip
    if problems := list(model.problems()):
        raise ConfigError(problems)


def copy_checkpoint(checkpoint: OpenCheckpoint, output: Path) -> None:
    """Copy a checkpoint, optimizer and all, into the new directory of checkpoints `output`, and verify the copy."""
    with fresh_directory(output) as temporary, storage_errors(f"writing {output}"):
        iteration = checkpoint.found.manifest.iteration
        copy = iteration_directory(temporary, iteration)
        # Only what the manifest names: somebody may have put a link or a pipe next to it.
        for name in (*checkpoint.found.manifest.files, MANIFEST_NAME):
            file = copy / name
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint.path / name, file)
            # The bytes are still with the operating system, from where a power cut would take them.
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
        for directory in (copy, *(entry for entry in copy.rglob("*") if entry.is_dir())):
            sync_directory(directory)
        write_file(temporary / TRACKER_NAME, str(iteration).encode())
        verify_files(copy, checkpoint.found.manifest)
