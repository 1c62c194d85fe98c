# SPDX-License-Identifier: Apache-2.0
"""From prefixes, weights and sizes to the three datasets of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from megatron.core.datasets.blend import Blend, DataSplit, SplitMatrix, normalize, samples_per_dataset
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.indexed_format import file_size
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.errors import ConfigError, DataError
from megatron.core.open_files import allow_open_files

Dataset = MegatronDataset | BlendedDataset
Sizes = Sequence[int | None]

_FILES_PER_DATASET = 2 + 3 * len(DataSplit)  # .bin, .idx and the cached indices of each split stay mapped


class BlendedMegatronDatasetBuilder:
    """Builds [training, validation, test]; an entry is None where no samples are wanted or the split has no share.

    With config.multiple_validation_sets, validation is a list of datasets, each with the number of samples wanted.

    cls               the dataset class, such as GPTDataset or MockGPTDataset
    sizes             samples wanted for each split; None: one pass over its documents
    is_built_on_rank  says whether this process needs the data; where not, all entries are None
    """

    def __init__(
        self,
        cls: type[MegatronDataset],
        sizes: Sizes,
        is_built_on_rank: Callable[[], bool],
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        self.cls = cls
        self.sizes = list(sizes)
        if config.full_validation and self.sizes[DataSplit.valid.value] != 0:
            self.sizes[DataSplit.valid.value] = None
        self.is_built_on_rank = is_built_on_rank
        self.config = config

    def build(self) -> list[Any]:
        """The three datasets. Every process builds the same ones; the index cache lets one do the work."""
        if not self.is_built_on_rank():
            return [None] * len(DataSplit)
        if not self.config.multiple_validation_sets:
            return list(self._build_splits(self.sizes))
        valid = DataSplit.valid.value
        built: list[Any] = self._build_splits([0 if i == valid else size for i, size in enumerate(self.sizes)])
        sets = [] if self.sizes[valid] == 0 else self._build_validation_sets(self.sizes[valid])
        built[valid] = sets or None
        return built

    def _build_validation_sets(self, size: int | None) -> list[Dataset]:
        """The validation part of each dataset, in the order of the prefixes."""
        config = self.config
        sizes = [size if split is DataSplit.valid else 0 for split in DataSplit]
        if config.mock:
            return [dataset for dataset in self._build_splits(sizes) if dataset is not None]
        if config.blend is not None:
            matrix = config.split_matrix or [None] * len(DataSplit)
            prefixes = config.blend[0]  # it has the weights of training
        else:
            matrix = [(0.0, 1.0) if split is DataSplit.valid else None for split in DataSplit]
            prefixes, weights = (config.blend_per_split or [None] * len(DataSplit))[DataSplit.valid.value] or ([], None)
            if weights is not None:
                raise ConfigError(
                    "--multiple-validation-sets keeps the validation datasets apart, so weights say nothing; give "
                    "--valid-data-path prefixes only"
                )
        self._check_files([(prefixes, None)])
        parts = [self._build_one(prefix, matrix, sizes)[DataSplit.valid.value] for prefix in prefixes]
        return [part for part in parts if part is not None]

    def _build_splits(self, sizes: Sizes) -> list[Dataset | None]:
        """One dataset for each split that samples are wanted of."""
        config = self.config
        if config.mock:
            matrix = config.split_matrix or [None] * len(DataSplit)
            return list(self._build_one(None, matrix, sizes))
        if config.blend is not None:
            matrix = config.split_matrix or [None] * len(DataSplit)
            self._check_files([config.blend])
            return self._build_blend(config.blend, matrix, sizes)
        blends = config.blend_per_split or [None] * len(DataSplit)
        self._check_files([blend for blend in blends if blend is not None])
        built: list[Dataset | None] = [None] * len(DataSplit)
        for split, blend in zip(DataSplit, blends, strict=True):
            if blend is not None:
                whole: SplitMatrix = [(0.0, 1.0) if other is split else None for other in DataSplit]
                alone = (blend[0], None) if len(blend[0]) == 1 else blend  # one weight says nothing
                built[split.value] = self._build_blend(alone, whole, sizes)[split.value]
        return built

    def _build_blend(self, blend: Blend, matrix: SplitMatrix, sizes: Sizes) -> list[Dataset | None]:
        prefixes, weights = blend
        if len(prefixes) == 1 and weights is None:
            return list(self._build_one(prefixes[0], matrix, sizes))
        normalized = None if weights is None else normalize(weights)
        sizes_by_dataset = self._sizes_by_dataset(len(prefixes), normalized, matrix, sizes)
        threads = max(1, self.config.num_dataset_builder_threads)
        # Threads are enough: the work is numpy and file access, which release the interpreter lock.
        with ThreadPoolExecutor(max_workers=threads) as pool:
            columns = list(pool.map(self._build_one, prefixes, [matrix] * len(prefixes), sizes_by_dataset))
        return [
            self._blend_split(split, [column[split.value] for column in columns], normalized, sizes)
            for split in DataSplit
        ]

    def _blend_split(
        self, split: DataSplit, parts: list[MegatronDataset | None], weights: list[float] | None, sizes: Sizes
    ) -> Dataset | None:
        datasets = [part for part in parts if part is not None]
        if not datasets:
            return None
        wanted = sizes[split.value]
        if weights is not None:
            assert wanted is not None, "checked in _sizes_by_dataset"
            return BlendedDataset(datasets, weights, sum(samples_per_dataset(weights, wanted)), self.config)
        offered = [len(dataset) for dataset in datasets]
        # Without weights a blend serves each dataset's samples once, which may be fewer than requested.
        size = None if wanted is None else min(wanted, sum(offered))
        return BlendedDataset(datasets, offered, size, self.config)

    def _sizes_by_dataset(
        self, num_datasets: int, weights: list[float] | None, matrix: SplitMatrix, sizes: Sizes
    ) -> list[list[int | None]]:
        """For each dataset, the samples wanted of each split; None: what it has."""
        if weights is None:
            return [[0 if size == 0 else None for size in sizes] for _ in range(num_datasets)]
        by_split: list[list[int]] = []
        for split, size, share in zip(DataSplit, sizes, matrix, strict=True):
            if size is None and share is not None:
                raise ConfigError(
                    f"weights in --data-path need a number of {split.name} samples; give prefixes without weights "
                    "to use every dataset once"
                )
            by_split.append(samples_per_dataset(weights, size or 0, self.config.mid_level_dataset_surplus))
        return [list(row) for row in zip(*by_split, strict=True)]

    def _build_one(self, prefix: str | None, matrix: SplitMatrix, sizes: Sizes) -> list[MegatronDataset | None]:
        """Open one source and cut it into its splits."""
        low_level = self.cls.build_low_level_dataset(prefix, self.config)
        total = self.cls.numel_low_level_dataset(low_level)
        built: list[MegatronDataset | None] = []
        for split, share, size in zip(DataSplit, matrix, sizes, strict=True):
            if share is None or size == 0:
                built.append(None)
                continue
            # Rounded like upstream's, so that the same documents are held out for validation.
            begin, end = (int(round(bound * float(total))) for bound in share)
            if begin >= end:
                raise DataError(
                    f"{prefix or 'mock data'}: the {split.name} split has no documents (share {share[0]:g} to "
                    f"{share[1]:g} of {total}), but {'' if size is None else f'{size} '}samples are wanted of it; "
                    f"change --split {self.config.split}"
                )
            indices = np.arange(begin, end, dtype=np.int32)
            built.append(self.cls(low_level, prefix, indices, size, split, self.config))
        return built

    def _check_files(self, blends: Sequence[Blend]) -> None:
        """Every file of every blend must be there before the first is worked on, and all can be open at once."""
        # A blend of a thousand datasets needs more descriptors than most systems allow at first.
        allow_open_files(_FILES_PER_DATASET * sum(len(prefixes) for prefixes, _ in blends))
        for prefixes, _ in blends:
            for prefix in prefixes:
                for path in self.cls.source_files(prefix):
                    file_size(path)
