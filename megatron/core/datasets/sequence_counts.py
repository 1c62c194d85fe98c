# SPDX-License-Identifier: Apache-2.0
"""Counts from the index files of many datasets, in one JSON file: a job then starts without opening any of them.

{"PREFIX": {"sequences": …, "documents": …, "bin_bytes": …, "idx_blake2b": …}, …}, written by
tools/build_dataset_cache.py. It is taken on trust until a dataset is opened, at its first sample.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.indexed_format import Array
from megatron.core.errors import DataError, StorageError

_FLAG = "--per-dataset-sequences-path"
_REMEDY = "write it anew with tools/build_dataset_cache.py"


@dataclass(frozen=True)
class SequenceCounts:
    """Counts from one index file."""

    sequences: int
    documents: int
    bin_bytes: int
    idx_blake2b: str

    @classmethod
    def of(cls, dataset: IndexedDataset) -> SequenceCounts:
        """The counts of an open dataset; reads all of its index."""
        return cls(len(dataset), len(dataset.document_indices) - 1, **dataset.fingerprint())


class UnopenedDataset:
    """An IndexedDataset whose files are opened when something is read from it. Raises DataError if they differ then."""

    def __init__(self, path_prefix: str, counts: SequenceCounts, open_dataset: Callable[[], IndexedDataset]) -> None:
        self.path_prefix, self.counts = path_prefix, counts
        self._open_dataset = open_dataset

    def __len__(self) -> int:
        return self.counts.sequences

    def fingerprint(self) -> dict[str, Any]:
        """The same as IndexedDataset's."""
        return {"bin_bytes": self.counts.bin_bytes, "idx_blake2b": self.counts.idx_blake2b}

    def get(self, index: int, offset: int = 0, length: int | None = None) -> Any:
        """Tokens [offset, offset + length) of sequence `index`."""
        return self.opened.get(index, offset, length)

    @property
    def sequence_lengths(self) -> Array:
        """int32 [sequences], tokens."""
        return self.opened.sequence_lengths

    @cached_property
    def opened(self) -> IndexedDataset:
        """The dataset, opened at first use. Raises DataError where it is not what the counts say."""
        dataset = self._open_dataset()
        found = (len(dataset), len(dataset.document_indices) - 1, dataset.index.bin_bytes)
        expected = (self.counts.sequences, self.counts.documents, self.counts.bin_bytes)
        if found != expected:
            raise DataError(
                f"{self.path_prefix}: has {found[0]} sequences, {found[1]} documents and {found[2]} bytes of tokens, "
                f"the file of {_FLAG} says {expected[0]}, {expected[1]} and {expected[2]}; {_REMEDY}"
            )
        return dataset


def read_sequence_counts(path: str) -> dict[str, SequenceCounts]:
    """Prefix -> counts. Raises DataError for a file that is missing or no such file."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        return {str(prefix): SequenceCounts(**entry) for prefix, entry in content.items()}
    except OSError as error:
        raise DataError(f"{_FLAG} {path}: {error.strerror}; {_REMEDY}") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{_FLAG} {path}: is not what tools/build_dataset_cache.py writes ({str(error)[:100]}); {_REMEDY}"
        ) from error


def write_sequence_counts(path: str, datasets: Mapping[str, IndexedDataset]) -> None:
    """Write the file for the datasets by their prefix; it appears when it is whole."""
    content = {prefix: asdict(SequenceCounts.of(dataset)) for prefix, dataset in datasets.items()}
    temporary = f"{path}.tmp-{uuid.uuid4().hex}"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
        os.replace(temporary, path)
    except OSError as error:
        raise StorageError(f"{_FLAG} {path}: {error.strerror}; nothing was left under this name") from error


def indexed_datasets_in(datasets: Iterable[Any]) -> dict[str, IndexedDataset]:
    """The files of built datasets and blends, by prefix."""
    found: dict[str, IndexedDataset] = {}
    for dataset in datasets:
        for part in getattr(dataset, "datasets", [dataset]):
            if isinstance(getattr(part, "dataset", None), IndexedDataset):
                found[part.dataset_path] = part.dataset
    return found
