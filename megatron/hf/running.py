# SPDX-License-Identifier: Apache-2.0
"""Hugging Face directories for a run: its first weights from one (--load hf:DIR), its last ones into one (--save-hf).

A run does not know this module: pretrain_gpt.py hands it over as `Recipe.foreign_files`.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing.agreement import on_first_rank
from megatron.core.dist_checkpointing.directory import find_directory
from megatron.core.dist_checkpointing.durable import storage_errors, sync_directory
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, leave_out_padding
from megatron.core.dist_checkpointing.validation import KeyReport, fill_wanted
from megatron.core.errors import ConfigError
from megatron.core.paths import explain_unmakeable_directory
from megatron.core.process_groups_config import Group
from megatron.hf.adapters import AdapterDirectory
from megatron.hf.checkpoints import OpenCheckpoint, fresh_directory
from megatron.hf.conversion import CARRIED, Source, open_source, write_hf_directory
from megatron.hf.entries import Entry, list_entries
from megatron.hf.progress import ConversionProgress
from megatron.hf.settings import build_config_json
from megatron.hf.tensor_files import is_written_by_a_run
from megatron.hf.weight_stream import WeightStream
from megatron.training.checkpoint.tokenizer_assets import list_tokenizer_files
from megatron.training.config.checkpoint import find_hf_directory
from megatron.training.config.container import RunConfig
from megatron.training.recipes.families import FAMILIES
from megatron.training.recipes.family import Family
from megatron.training.recipes.hf_config import CONFIG_JSON, read_model_fields
from megatron.training.recipes.vocabulary import build_tokenizer

GENERATION_CONFIG = "generation_config.json"


class HuggingFaceFiles:
    """Reader and writer of Hugging Face directories for a recipe; see `ForeignFiles`."""

    def __init__(self, families: Sequence[Family] = FAMILIES) -> None:
        """families: known families; put yours first: (MINE, *FAMILIES)."""
        self._families = families

    def open(self, directory: Path, config: RunConfig) -> HuggingFaceModel:
        """Look at a directory, without reading weights. Raises CheckpointError or ConfigError."""
        # A run may leave out the MTP layers; the rest of the model is the same.
        predicts = config.model.mtp_num_layers is not None
        source = open_source(directory, asked_by="--load", families=self._families, with_prediction=predicts)
        return HuggingFaceModel(source)

    def open_adapter(self, directory: Path, config: RunConfig, vocab_size: int) -> AdapterDirectory:
        """Look at a directory that peft has saved. Raises CheckpointError or ConfigError."""
        base = config.with_groups(model=config.model.without_adapters())
        family, _ = describe_run(base, vocab_size, self._families)
        entries = list_entries(family, base, vocab_size)
        return AdapterDirectory(directory, config, entries, vocab_size, self._open_weights(config))

    def _open_weights(self, config: RunConfig) -> Callable[[Entry], torch.Tensor]:
        """Return a reader of the weights that a run begins with, whole, in the files that it has loaded."""

        @functools.cache
        def open_files() -> Source | OpenCheckpoint:
            for place in (config.checkpoint.load, config.checkpoint.pretrained_checkpoint):
                if (directory := find_hf_directory(place)) is not None:
                    return open_source(directory, asked_by="--load", families=self._families)
                if place is not None and find_directory(Path(place), None) is not None:
                    return OpenCheckpoint(Path(place))
            raise ConfigError(
                "--load-adapter: adapters of --lora-type dora need the weights that they were trained with; give "
                "--pretrained-checkpoint"
            )

        def read(entry: Entry) -> torch.Tensor:
            files = open_files()
            return files.read(entry.key) if isinstance(files, OpenCheckpoint) else entry.join(files.read)

        return read

    def list_attachments(self, config: RunConfig) -> dict[str, Path]:
        """Name in a checkpoint -> file: config.json and generation config of the model that the run started from."""
        origin = find_origin(config)
        names = () if origin is None else (CONFIG_JSON, GENERATION_CONFIG)
        return {
            f"{CARRIED}/{name}": origin / name for name in names if origin is not None and (origin / name).is_file()
        }

    def prepare_save(self, config: RunConfig, vocab_size: int, directory: Path) -> None:
        """Raise ConfigError for a model that no family computes, and for a directory that must not be replaced."""
        try:
            describe_run(config, vocab_size, self._families)
        except ConfigError as error:
            raise ConfigError(
                f"--save-hf {directory}: {error}; train a model that one of them computes, or leave --save-hf out"
            ) from None
        problem = explain_unmakeable_directory(directory)
        if problem is None and directory.is_dir() and any(directory.iterdir()) and not is_written_by_a_run(directory):
            problem = "holds files that no --save-hf has written; give a directory that does not exist yet"
        if problem is None and (origin := find_origin(config)) is not None and origin.resolve() == directory.resolve():
            problem = "is what the run starts from; give another directory"
        if problem is not None:
            raise ConfigError(f"--save-hf {directory} {problem}")
        try:
            os.rmdir(tempfile.mkdtemp(prefix=f"{directory.name}.try-", dir=directory.absolute().parent))
        except OSError as error:
            raise ConfigError(f"--save-hf {directory} cannot be made: {error.strerror or error}") from error

    def save(
        self, config: RunConfig, vocab_size: int, tensors: ShardedStateDict, group: Group, directory: Path
    ) -> None:
        """Write the model that the members of the group hold; it appears, in the place of an earlier one, when it is
        complete. Every member calls this. Raises StorageError or ConfigError on every member."""
        family, config_json = describe_run(config, vocab_size, self._families)
        entries = list_entries(family, config, vocab_size)
        weights = WeightStream(tensors, group, on_all_ranks=False)
        weights.check(entries)
        write_model(directory, entries, config_json, list_files(config), weights, asked_by="--save-hf", replaces=True)


def write_model(
    directory: Path,
    entries: list[Entry],
    config_json: Mapping[str, object],
    files: Mapping[str, Path],
    weights: WeightStream,
    *,
    asked_by: str,
    replaces: bool = False,
) -> None:
    """Write a Hugging Face directory with the weights of a stream, on its first rank; every rank calls this.

    asked_by: what named the directory, for errors. replaces: it may take the place of an earlier result of a run, and
    be replaced by a later one. Raises StorageError or ConfigError on every rank; then nothing has changed.
    """
    stream = weights.stream(entries)
    staged = directory.with_name(f"{directory.name}.new-{uuid.uuid4().hex[:8]}") if replaces else directory

    def write() -> None:
        try:
            with fresh_directory(staged, asked_by) as temporary:
                write_hf_directory(temporary, entries, config_json, files, stream, weights.get_dtype, by_a_run=replaces)
        finally:
            # The other ranks send what they hold, whatever happened to the file.
            for _ in stream:
                pass
        if replaces:
            with storage_errors(f"writing {directory}"):
                _replace(staged, directory)

    if not weights.receives:
        for _ in stream:
            pass
    on_first_rank(weights.group, write)


def _replace(staged: Path, directory: Path) -> None:
    """Give the new directory its name, and remove the one that had it."""
    earlier = directory.with_name(f"{directory.name}.old-{uuid.uuid4().hex[:8]}")
    if directory.exists():
        os.rename(directory, earlier)
    os.rename(staged, directory)
    sync_directory(directory.absolute().parent)
    shutil.rmtree(earlier, ignore_errors=True)


def describe_run(
    config: RunConfig, vocab_size: int, families: Sequence[Family] = FAMILIES
) -> tuple[Family, dict[str, Any]]:
    """Return the family of a run's model and its config.json: the one it started from where that still describes it.
    Raises ConfigError for a model that no family computes."""
    model = config.model
    if model.lora_rank is not None:
        raise ConfigError(
            "weights with adapters are written by python -m megatron convert --target hf, from a checkpoint of --save"
        )
    dtype = torch.bfloat16 if model.bf16 else torch.float16 if model.fp16 else torch.float32
    origin = find_origin(config)
    carried = (
        None if origin is None or not (origin / CONFIG_JSON).is_file() else read_model_fields(origin / CONFIG_JSON)
    )
    family, fields = build_config_json(config, vocab_size, dtype, carried, families)
    # A text that is continued by the result ends where documents of the training data did.
    if carried is None and config.tokenizer.tokenizer_type != "NullTokenizer":
        fields = {**fields, "eos_token_id": build_tokenizer(config).eod}
    return family, fields


def find_origin(config: RunConfig) -> Path | None:
    """The Hugging Face directory that a run's command line starts from, or what the checkpoint that it starts from
    carries of one."""
    checkpoint = config.checkpoint
    for place, step in ((checkpoint.load, checkpoint.ckpt_step), (checkpoint.pretrained_checkpoint, None)):
        if (directory := find_hf_directory(place)) is not None:
            return directory
        found = None if place is None else find_directory(Path(place), step)
        if found is not None and (found / CARRIED / CONFIG_JSON).is_file():
            return found / CARRIED
    return None


def list_files(config: RunConfig) -> dict[str, Path]:
    """Name in a Hugging Face directory -> file: the run's tokenizer, and the generation config of its origin."""
    files = {file.name: file for file in list_tokenizer_files(config.tokenizer).values()}
    origin = find_origin(config)
    if origin is not None and (origin / GENERATION_CONFIG).is_file():
        files[GENERATION_CONFIG] = origin / GENERATION_CONFIG
    return files


class HuggingFaceModel:
    """A Hugging Face directory whose weights a run is to start from; see `ForeignModel`."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.config = source.config
        self.notes = source.notes

    def load(self, tensors: ShardedStateDict, group: Group, *, may_lack: bool, may_have_more: bool) -> KeyReport:
        """Fill the tensors of all members of the group, converted to their dtypes; returns what was tolerated.

        Each member reads the parts of the files that its shards are made of, one parameter after the other. Raises
        CheckpointError on every member; tensors may then be half filled.
        """
        entries = {entry.key: entry for entry in self._source.entries}
        shapes = {key: tuple(entry.placement.logical_shape) for key, entry in entries.items()}
        rows = {key: shapes[key][0] for key, entry in entries.items() if entry.placement.valid_rows is not None}
        progress = ConversionProgress("loading", sum(tensor.data.numel() for tensor in tensors.values()))

        def fill(tensor: ShardedTensor, key: str) -> None:
            for index, block in enumerate(tensor.blocks):
                box, target = leave_out_padding(block.box, tensor.block(index), shapes[key])
                if target.numel():
                    target.copy_(entries[key].read_box(box, self._source.read_box))
            if group.rank() == 0:
                progress.advance(tensor.data)

        report = fill_wanted(
            tensors, shapes, fill, group, valid_rows=rows, may_lack=may_lack, may_have_more=may_have_more
        )
        progress.end()
        return report
