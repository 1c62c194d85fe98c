# SPDX-License-Identifier: Apache-2.0
"""Build the sample indices of a training run ahead of it, on one machine without a GPU.

    WORLD_SIZE=64 python tools/build_dataset_cache.py <the flags of pretrain_gpt.py>

The flags are the job's: number of samples, seed, sequence length, blend and split all decide what is built. With
the same --data-cache-path (or, without it, the same data directories) the job then finds everything. Where nothing says
--global-batch-size, it follows from the number of processes, so give that as WORLD_SIZE. Building again costs nothing.
--dataloader-fast-cache-load is for the job and changes nothing here; with --per-dataset-sequences-path that file is
written, too.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
import warnings
from typing import Any

from megatron.core.errors import ConfigError, StorageError, command_line
from megatron.training.flags.read import read_run_config
from megatron.training.launch.launch import add_world_size


def describe(name: str, dataset: Any) -> str:
    """One line about a split: how many samples, of how many datasets."""
    parts = getattr(dataset, "datasets", [dataset])
    of = parts[0].dataset_path if len(parts) == 1 else f"{len(parts)} datasets"
    return f"{name:10s} {len(dataset)} samples of {of}"


@command_line
def main() -> int:
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(__doc__.strip())
        return 0
    config = read_run_config([item for item in sys.argv[1:] if item != "--traceback"], add_world_size(os.environ))
    if config.data.mock_data:
        raise ConfigError("--mock-data has no files and keeps no indices; give the job's --data-path")

    from megatron.core.datasets.sequence_counts import indexed_datasets_in, write_sequence_counts
    from megatron.training.data.loading import SPLITS
    from megatron.training.data.samples import count_needed_samples
    from megatron.training.recipes.gpt_data import build_gpt_datasets
    from megatron.training.recipes.vocabulary import build_tokenizer

    counts_path = config.data.per_dataset_sequences_path
    data = dataclasses.replace(
        config.data,
        # These would take the indices for granted, which are only built here.
        dataloader_fast_cache_load=False,
        dataloader_defer_npy_index_mmap=False,
        per_dataset_sequences_path=None,
    )
    config = dataclasses.replace(config, data=data)
    started_at = time.monotonic()
    # A cache that cannot be written is a warning in training, which goes on in memory; here it is the one thing to do.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        built = build_gpt_datasets(config, build_tokenizer(config), count_needed_samples(config))
    problems = [str(warning.message) for warning in caught if "index cache" in str(warning.message)]
    if problems:
        raise StorageError(f"nothing was kept for the job: {problems[0]}")
    by_split = [datasets if isinstance(datasets, list) else [datasets] for datasets in built]
    if counts_path is not None:
        found = indexed_datasets_in(dataset for datasets in by_split for dataset in datasets)
        write_sequence_counts(counts_path, found)
    for name, datasets in zip(SPLITS, by_split, strict=True):
        for dataset in datasets:
            print(describe(name, dataset) if dataset is not None else f"{name:10s} none")
    where = config.data.data_cache_path or "cache/ beside each dataset"
    print(f"the indices are in {where} ({time.monotonic() - started_at:.1f} s)")
    return 0
