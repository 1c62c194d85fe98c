# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that upstream wrote, `torch_dist` or `torch` of any layout, as the source of a conversion: their weights
and settings become a checkpoint of ours, one tensor after the other."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron.core.dist_checkpointing.agreement import on_every_rank, with_everyone
from megatron.core.dist_checkpointing.directory import find_directory
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, read_manifest, verify_files
from megatron.core.dist_checkpointing.mapping import OPTIMIZER_PREFIX, RNG_PREFIX
from megatron.core.dist_checkpointing.safe_pickle import read_metadata
from megatron.core.dist_checkpointing.saved_boxes import BoxReader, LazyTensor
from megatron.core.dist_checkpointing.serialization import TENSORS_DOCUMENT
from megatron.core.dist_checkpointing.torch_dist import METADATA_NAME
from megatron.core.errors import CheckpointError, MegatronError, say
from megatron.core.placement import Placement
from megatron.core.process_groups_config import Group
from megatron.core.upstream_checkpoints.common_state import find_upstream_checkpoint
from megatron.core.upstream_checkpoints.names import translate_table
from megatron.core.upstream_checkpoints.rank_file import find_legacy_file
from megatron.core.upstream_checkpoints.rank_files import open_legacy
from megatron.hf.checkpoints import (
    ALONE,
    DeferredTensor,
    OpenCheckpoint,
    fresh_directory,
    staged_directory,
    write_checkpoint,
)
from megatron.hf.progress import ConversionProgress
from megatron.training.checkpoint.tokenizer_assets import list_tokenizer_files
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.container import RunConfig
from megatron.training.flags.read import read_run_config
from megatron.training.recipes.vocabulary import build_tokenizer, compute_vocab_size

_ANY_RUN = ("--use-checkpoint-args", "--no-load-optim", "--mock-data", "--micro-batch-size=1", "--global-batch-size=1",
            "--train-iters=1", "--lr=1")  # fmt: skip
"""Settings needed in addition to the model's."""
_VOCABULARY = ("embedding.word_embeddings.", "output_layer.")


@dataclass(frozen=True)
class UpstreamCheckpoint:
    """Weights and settings that upstream saved."""

    path: Path
    config: RunConfig
    tensors: Mapping[str, LazyTensor]
    """By our names."""
    vocab_size: int | None
    """Rows of the embedding that are no padding; None where the tokenizer's files are not at hand to tell."""
    note: str | None
    """Sentence to be said of it."""

    def read(self, key: str) -> Tensor:
        """A weight without its rows of padding. Raises CheckpointError."""
        tensor = self.tensors[key].read()
        return tensor[: self.vocab_size] if key.startswith(_VOCABULARY) else tensor

    def describe(self, key: str, on_read: Callable[[Tensor], None]) -> DeferredTensor:
        """The same as what is to be written; on_read: hears of its values."""

        def make() -> Tensor:
            values = self.read(key)
            on_read(values)
            return values

        stored = self.tensors[key]
        shape, rows = stored.shape, None
        if key.startswith(_VOCABULARY):
            rows = self.vocab_size
            shape = (shape[0] if rows is None else rows, *shape[1:])
        return DeferredTensor.of(Placement(key, shape, valid_rows=rows), stored.dtype, make)


def open_upstream(root: Path, iteration: int | None = None) -> UpstreamCheckpoint | None:
    """The checkpoint of upstream's in `root`, or of an iteration there, or a file of its; None where there is none.

    One with a manifest, which we have saved for upstream, is verified. Raises CheckpointError, ConfigError.
    """
    newest = find_directory(root, iteration)
    # Saves in a format of upstream's have a manifest, too: only ours have this document.
    if newest is not None and (newest / f"{TENSORS_DOCUMENT}.json").exists():
        return None
    path = find_upstream_checkpoint(root, iteration, or_ours=True)
    file = None
    if path is None and (file := find_legacy_file(root, iteration)) is not None:
        path = file.parent.parent
    if path is None:
        return None
    if (path / MANIFEST_NAME).is_file():
        verify_files(path, read_manifest(path))
    tensors = _list_weights(path) if file is None else open_legacy(file).tensors
    step = [] if iteration is None else ["--ckpt-step", str(iteration)]
    config = read_run_config([*_ANY_RUN, "--load", str(root), *step], {})
    weights = {key: tensor for key, tensor in tensors.items() if not key.startswith((OPTIMIZER_PREFIX, RNG_PREFIX))}
    vocab_size, note = _find_vocab_size(config, weights)
    return UpstreamCheckpoint(path, config.with_groups(checkpoint=CheckpointConfig()), weights, vocab_size, note)


def _list_weights(path: Path) -> dict[str, LazyTensor]:
    """The tensors of a torch_dist checkpoint under our names."""
    metadata = read_metadata(path / METADATA_NAME)
    table, reader = translate_table(metadata), BoxReader(path, metadata)
    return {
        key: LazyTensor(tuple(entry.size), entry.properties.dtype, functools.partial(table.read, reader, key))
        for key, entry in table.metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _find_vocab_size(config: RunConfig, weights: Mapping[str, LazyTensor]) -> tuple[int | None, str | None]:
    embedding = next((tensor for key, tensor in weights.items() if key.startswith(_VOCABULARY)), None)
    rows = 0 if embedding is None else embedding.shape[0]
    try:
        known = compute_vocab_size(config, build_tokenizer(config))
    except MegatronError as error:
        return None, f"how many of {rows} rows of the embedding are padding is not known, and all are kept: {error}"
    # A tokenizer with more tokens than there are rows is not the model's.
    return (known if known <= rows else None), None


def import_upstream(source: UpstreamCheckpoint, output: Path, *, verify: bool = True, group: Group = ALONE) -> Path:
    """Write the weights as a checkpoint directory `output`, as iteration 0; returns `output`.

    verify: read it again and compare, bit for bit. group: processes that all call this and do an equal share each.
    Raises CheckpointError, StorageError on all of them; `output` then does not exist.
    """
    with fresh_directory(output, group=group) as temporary:
        progress = ConversionProgress(
            "converting", sum(torch.Size(tensor.shape).numel() for tensor in source.tensors.values()), group
        )

        tensors = {key: source.describe(key, progress.advance) for key in source.tensors}
        write_checkpoint(temporary, tensors, source.config, list_tokenizer_files(source.config.tokenizer), group)
        progress.end()
        if verify:
            result = OpenCheckpoint(temporary, group=group)
            on_every_rank(group, lambda: _compare(source, result, list(source.tensors)[group.rank() :: group.size()]))
    return output


def _compare(source: UpstreamCheckpoint, result: OpenCheckpoint, keys: list[str]) -> None:
    for key in keys:
        theirs, ours = (
            values.contiguous().view(-1).view(torch.uint8) for values in (source.read(key), result.read(key))
        )
        # Bytes, not numbers: NaN differs from itself, and 0 equals -0.
        if not torch.equal(theirs, ours):
            raise CheckpointError(f"{key} is not as in {source.path}; this is a fault of the disk or of the program")


@contextlib.contextmanager
def as_ours(
    root: Path, iteration: int | None, beside: Path, *, verify: bool, group: Group = ALONE
) -> Iterator[tuple[Path, int | None]]:
    """Yield (directory, iteration) of a checkpoint of ours: as given, or, where they name one of upstream's, of a copy
    of its weights next to the path `beside`, which is removed when the block ends. Raises CheckpointError."""
    source = with_everyone(group, lambda: open_upstream(root, iteration))
    if source is None:
        yield root, iteration
        return
    if source.note is not None and group.rank() == 0:
        say(f"note: {source.note}")
    with staged_directory(beside, group) as staged:
        yield import_upstream(source, staged / "ours", verify=verify, group=group), None
