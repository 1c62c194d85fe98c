# SPDX-License-Identifier: Apache-2.0
"""Settings of a dataset: the part that holds for every kind of dataset and blend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron.core.datasets.blend import Blend, SplitMatrix, parse_split, split_matrix
from megatron.core.datasets.index_cache import CachePolicy
from megatron.core.datasets.sequence_counts import SequenceCounts
from megatron.core.errors import ConfigError

MOCK_SPLIT = "1,1,1"


class DatasetTokenizer(Protocol):
    """Methods that datasets ask of a tokenizer."""

    @property
    def eod(self) -> int | None: ...
    @property
    def pad(self) -> int | None: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def unique_identifiers(self) -> Mapping[str, Any]: ...


@dataclass(kw_only=True)
class BlendedMegatronDatasetConfig:
    """Choice of data, its split, and the place of its indices. Without `blend` and `blend_per_split`: mock data."""

    random_seed: int
    """Seed of every shuffle."""
    sequence_length: int
    """Tokens per sample."""
    blend: Blend | None = None
    """Dataset prefixes and their weights (None: by size), split by `split`."""
    blend_per_split: list[Blend | None] | None = None
    """A blend for each of training, validation and test; instead of `blend` and `split`."""
    split: str | None = None
    """Shares of training, validation and test documents, as 99,1,0."""
    split_matrix: SplitMatrix | None = field(default=None, init=False)
    """`split` as ranges of 0..1."""
    num_dataset_builder_threads: int = 1
    """Threads that build the datasets of a blend."""
    path_to_cache: str | None = None
    """Directory of built indices; None: `cache/GPTDataset_indices` next to each dataset."""
    mmap_bin_files: bool = True
    """Map .bin files into memory instead of reading from them."""
    object_storage_cache_path: str | None = None
    """Local directory for copies of the index files of datasets in object storage."""
    fast_cache_load: bool = False
    """Take cached indices as they are; they must have been built."""
    defer_npy_index_mmap: bool = False
    """With fast_cache_load: map cached indices when they are first used."""
    sequence_counts: Mapping[str, SequenceCounts] | None = None
    """With fast_cache_load: what the index files say, by prefix; they are opened at the first sample."""
    mock: bool = field(default=False, init=False)
    """True when there is no data to read."""
    tokenizer: DatasetTokenizer | None = None
    """Gives the end-of-document and padding ids, and a part of the cache key."""
    mid_level_dataset_surplus: float = 0.005
    """Share of extra samples built for each dataset of a weighted blend."""
    multiple_validation_sets: bool = False
    """The validation datasets stay apart instead of being blended."""
    full_validation: bool = False
    """The validation datasets are one pass over their documents, whatever size is asked for."""
    sequences_per_dataset: Mapping[str, int] | None = None
    """Upstream's field in place of `sequence_counts`; refused, since it says too little of an index file."""

    def __post_init__(self) -> None:
        if self.sequences_per_dataset is not None:
            raise ConfigError(
                "sequences_per_dataset says too little to leave index files closed; leave it out, or give "
                "sequence_counts=read_sequence_counts(PATH) of a file that tools/build_dataset_cache.py wrote"
            )
        if self.sequence_length < 1:
            raise ConfigError(f"--seq-length is {self.sequence_length}, expected at least 1 token")
        per_split = self.blend_per_split is not None and any(blend is not None for blend in self.blend_per_split)
        if per_split:
            if self.blend is not None or self.split is not None:
                raise ConfigError(
                    "--train-data-path, --valid-data-path and --test-data-path stand for themselves; "
                    "drop --data-path and --split"
                )
            if len(self.blend_per_split or []) != 3:
                raise ConfigError("blend_per_split needs three entries: training, validation, test")
            return
        self.mock = self.blend is None
        if self.mock:
            self.split = MOCK_SPLIT
        if self.split is None:
            raise ConfigError(
                "--data-path needs --split, the shares of training, validation and test documents, as 99,1,0"
            )
        self.split_matrix = split_matrix(parse_split(self.split))

    @property
    def cache_policy(self) -> CachePolicy:
        """Treatment of cached indices at the start."""
        return CachePolicy(self.fast_cache_load, self.defer_npy_index_mmap)
