# SPDX-License-Identifier: Apache-2.0
"""Several datasets as one, interleaved by weight."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.blend import normalize
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.blending_order import build_blending_indices, build_exhaustive_blending_indices
from megatron.core.datasets.index_cache import Arrays, IndexCache
from megatron.core.datasets.megatron_dataset import MegatronDataset, PackedDocuments
from megatron.core.errors import DataError

_MOST_DATASETS = 2**15 - 1  # dataset_index is int16


class BlendedDataset:
    """`size` samples drawn from several datasets in proportion to `weights`; all of their samples when size is None.

    With size None the weights are the numbers of samples to take from each dataset.
    blended[i] is a sample of one of the datasets, with `dataset_id` added.
    """

    def __init__(
        self,
        datasets: Sequence[MegatronDataset],
        weights: Sequence[float],
        size: int | None,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        if len(datasets) > _MOST_DATASETS:
            raise DataError(
                f"a blend of {len(datasets)} datasets is too large, the limit is {_MOST_DATASETS}; merge some of them"
            )
        self.datasets = list(datasets)
        self.index_split = self.datasets[0].index_split
        self.weights = list(weights) if size is None else normalize(weights)
        self.size = size
        self.config = config
        self.unique_description = self._describe()
        cache = IndexCache(
            config.path_to_cache,
            f"{type(self).__name__}-{self.index_split.name}",
            self.unique_description,
            ("dataset_index", "dataset_sample_index"),
            config.cache_policy,
        )
        self._arrays = cache.load_or_build(self._build_indices)
        # Counting the draws touches every page of the index, which a trusted start is meant to avoid.
        if not config.cache_policy.is_trusted:
            self._check_supply()

    @cached_property
    def dataset_index(self) -> npt.NDArray[np.int16]:
        """Dataset that each sample comes from."""
        return self._arrays["dataset_index"]

    @cached_property
    def dataset_sample_index(self) -> npt.NDArray[np.int64]:
        """Number of the sample in that dataset."""
        return self._arrays["dataset_sample_index"]

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, index: int) -> dict[str, Any]:
        dataset_id = int(self.dataset_index[index])
        # The id lets a user's loss tell the sources apart.
        return {"dataset_id": dataset_id, **self.datasets[dataset_id][int(self.dataset_sample_index[index])]}

    def locate(self, index: int) -> str:
        """Return where sample `index` comes from, for messages."""
        return self.datasets[int(self.dataset_index[index])].locate(int(self.dataset_sample_index[index]))

    def document_lengths(self, index: int) -> list[int]:
        """See PackedDocuments; only where every dataset of the blend has packed documents."""
        dataset, own_index = self._source(index)
        return dataset.document_lengths(own_index)

    def document(self, index: int, number: int) -> dict[str, Any]:
        """See PackedDocuments; only where every dataset of the blend has packed documents."""
        dataset, own_index = self._source(index)
        return dataset.document(own_index, number)

    def _source(self, index: int) -> tuple[PackedDocuments, int]:
        dataset = self.datasets[int(self.dataset_index[index])]
        return cast(PackedDocuments, dataset), int(self.dataset_sample_index[index])

    def _describe(self) -> str:
        """JSON of everything that determines the order, the descriptions of the datasets included."""
        rest = {"split": self.index_split.name, "weights": self.weights, "size": self.size}
        text = json.dumps({"class": type(self).__name__, "datasets": []} | rest, indent=4)
        # Theirs are JSON already, and json.dumps would take seconds for a thousand of them.
        theirs = ",\n".join(dataset.unique_description for dataset in self.datasets).replace("\n", "\n" + " " * 8)
        return text.replace('"datasets": []', f'"datasets": [\n        {theirs}\n    ]', 1)

    def _build_indices(self) -> Arrays:
        if self.size is None:
            order = build_exhaustive_blending_indices(np.asarray(self.weights))
        else:
            order = build_blending_indices(np.asarray(self.weights), self.size)
        return {"dataset_index": order[0], "dataset_sample_index": order[1]}

    def _check_supply(self) -> None:
        """Every dataset must have the samples the blend takes from it."""
        # Found now instead of as an IndexError after weeks of training.
        taken = np.bincount(self.dataset_index, minlength=len(self.datasets))
        for dataset, needed in zip(self.datasets, taken.tolist(), strict=True):
            if needed > len(dataset):
                raise DataError(
                    f"{dataset.dataset_path}: the {self.index_split.name} blend takes {needed} samples of it, it was "
                    f"built with {len(dataset)}; raise --mid-level-dataset-surplus above "
                    f"{self.config.mid_level_dataset_surplus}"
                )
