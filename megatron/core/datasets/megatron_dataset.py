# SPDX-License-Identifier: Apache-2.0
"""The base of a dataset that serves one split of one source: how it is made, described and cached."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.blend import DataSplit
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.indexed_format import get_bin_path, get_idx_path
from megatron.core.datasets.object_storage import is_object

_DESCRIPTION_VERSION = 1  # raise it when the same description would give other arrays


class MegatronDataset(ABC):
    """Samples from the documents `indices` of a low-level dataset.

    dataset       where tokens are read: an IndexedDataset or its mock
    dataset_path  its prefix; None for mock data
    indices       int32 [documents]: the documents of this split
    num_samples   how many samples are wanted; None: what one pass over the documents gives
    index_split   training, validation or test
    """

    def __init__(
        self,
        dataset: Any,
        dataset_path: str | None,
        indices: npt.NDArray[np.int32],
        num_samples: int | None,
        index_split: DataSplit,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        self.dataset = dataset
        self.dataset_path = dataset_path
        # The indices of a blend's datasets would stay in memory; a split's are consecutive.
        is_range = len(indices) > 0 and bool((np.diff(indices) == 1).all())
        self._indices = range(int(indices[0]), int(indices[0]) + len(indices)) if is_range else indices
        self.num_samples = num_samples
        self.index_split = index_split
        self.config = config
        self.unique_description = json.dumps(self.describe(), indent=4)

    @property
    def indices(self) -> npt.NDArray[np.int32]:
        """int32 [documents]: the documents of this split."""
        if isinstance(self._indices, range):
            return np.arange(self._indices.start, self._indices.stop, dtype=np.int32)
        return self._indices

    def of_documents(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The values of this split's documents, from one value for each document of the source."""
        if isinstance(self._indices, range):
            return values[self._indices.start : self._indices.stop]
        return values[self._indices]

    def describe(self) -> dict[str, Any]:
        """Everything that determines the indices of this dataset, in a form that can be written as JSON."""
        config = self.config
        tokenizer = None if config.tokenizer is None else dict(config.tokenizer.unique_identifiers)
        return {
            "class": type(self).__name__,
            "dataset_path": self.dataset_path,
            "num_samples": self.num_samples,
            "index_split": self.index_split.name,
            "random_seed": config.random_seed,
            "sequence_length": config.sequence_length,
            "split": config.split,
            "split_matrix": config.split_matrix,
            "tokenizer": tokenizer,
            "fingerprint": self.dataset.fingerprint(),
            "version": _DESCRIPTION_VERSION,
        }

    def cache_directory(self) -> str | None:
        """Return where the indices are kept: the configured directory, else one next to the data; None for mock
        data."""
        if self.dataset_path is None:
            return None
        directory = f"{type(self).__name__}_indices"
        if is_object(self.dataset_path):
            beside = os.path.join(self.config.object_storage_cache_path or ".", directory)
        else:
            beside = os.path.join(os.path.dirname(self.dataset_path), "cache", directory)
        return self.config.path_to_cache or beside

    @staticmethod
    def source_files(dataset_path: str) -> list[str]:
        """The files of a prefix; all of all datasets must be there before work on the first one starts."""
        return [get_idx_path(dataset_path), get_bin_path(dataset_path)]

    @staticmethod
    @abstractmethod
    def build_low_level_dataset(dataset_path: str | None, config: BlendedMegatronDatasetConfig) -> Any:
        """Open the tokens of a prefix."""

    @staticmethod
    @abstractmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """Return how many documents a split can be cut from."""

    @abstractmethod
    def __len__(self) -> int:
        """Samples that can be served; may be more than were asked for."""

    @abstractmethod
    def __getitem__(self, index: int | None) -> dict[str, Any]:
        """Sample `index`; None gives a sample that counts for nothing (its loss mask is 0)."""

    @abstractmethod
    def locate(self, index: int) -> str:
        """Return where sample `index` comes from, for messages."""


@runtime_checkable
class PackedDocuments(Protocol):
    """A dataset whose samples are packed documents, which can also be had one by one."""

    def document_lengths(self, index: int) -> list[int]:
        """Tokens of each document in sample `index`, which are not read for it; padding is none of them."""
        ...

    def document(self, index: int, number: int) -> dict[str, Any]:
        """One of these documents: tokens, labels, position_ids int64 [t], loss_mask float32 [t]."""
        ...

    def locate(self, index: int) -> str:
        """Return where sample `index` comes from, for messages."""
        ...
