# SPDX-License-Identifier: Apache-2.0
"""Tiny token datasets for the fault tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder


@dataclass
class Tokenizer:
    eod: int = 0
    pad: int | None = None
    vocab_size: int = 1000
    unique_identifiers: dict[str, Any] = field(default_factory=dict)


def write_dataset(prefix: Path, lengths: list[int], seed: int = 0) -> Path:
    random = np.random.RandomState(seed)
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16) as builder:
        for length in lengths:
            builder.add_document(random.randint(1, 1000, size=length), [length])
        builder.finalize(f"{prefix}.idx")
    return prefix


def build_gpt(prefix: Path, cache: Path | None = None, **options: Any) -> list[Any]:
    sizes = options.pop("sizes", (4, 0, 0))
    defaults = {
        "random_seed": 1,
        "sequence_length": 4,
        "blend": ([str(prefix)], None),
        "split": "1,0,0",
        "tokenizer": Tokenizer(),
        "path_to_cache": None if cache is None else str(cache),
    }
    config = GPTDatasetConfig(**(defaults | options))
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
