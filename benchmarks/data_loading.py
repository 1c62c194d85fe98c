#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""How many tokens one loader process delivers: samples read, checked against the vocabulary and stacked to batches.

    python benchmarks/data_loading.py
    python benchmarks/data_loading.py --documents 100000 --datasets 100

Documents have 1 to 1997 random tokens (999 in the mean). A figure is the best of its rounds, each a pass over the same
samples in an order of the dataset's own; it counts what a loader process does by itself (CPU seconds of this process),
without the transfer to the trainer. "Kept" is what Python and numpy still hold of a pass when its batches are gone.
"""

# ruff: noqa: E402 (the path is put right before the imports)

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not

import argparse
import gc
import os
import platform
import tempfile
import time
import tracemalloc
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.training.data.loading import CheckedDataset, collate

VOCABULARY = 50_000
EOD = 0
CASES: dict[str, dict[str, Any]] = {
    "one dataset": {},
    "pread": {"mmap_bin_files": False},
    "position ids reset": {"reset_position_ids": True},
    "loss masked at ends": {"eod_mask_loss": True},
    "document bounds": {"inter_document_masking": True},
}


@dataclass
class Tokenizer:
    """As much of a tokenizer as a dataset asks for."""

    eod: int = EOD
    pad: int | None = None
    vocab_size: int = VOCABULARY
    unique_identifiers: dict[str, Any] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=20_000, help="of all datasets together")
    parser.add_argument("--datasets", type=int, default=10, help="datasets of the blend")
    parser.add_argument("--sequence-length", type=int, default=4096, help="tokens")
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print(f"command: {' '.join([Path(sys.executable).name, *sys.argv])}")
    print(f"machine: {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {platform.platform()}")
    print(f"versions: Python {platform.python_version()}, numpy {np.__version__}, torch {torch.__version__}")
    # One loader process does its own work only; threads of torch would be counted as its CPU time.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        prefixes = [f"{name}/data{i}" for i in range(arguments.datasets)]
        for seed, prefix in enumerate(prefixes):
            write(prefix, arguments.documents // arguments.datasets, seed)
        for what, options in CASES.items():
            measure(what, prefixes[:1], arguments, options)
        measure(f"blend of {len(prefixes)}", prefixes, arguments, {})


def write(prefix: str, documents: int, seed: int) -> None:
    """Write a dataset of random documents; the last token of each is EOD."""
    random = np.random.default_rng(seed)
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16) as builder:
        for size in random.integers(1, 1998, documents).tolist():
            tokens = random.integers(1, VOCABULARY, size, dtype=np.uint16)
            tokens[-1] = EOD
            builder.add_document(tokens, [size])
        builder.finalize(f"{prefix}.idx")


def measure(what: str, prefixes: list[str], arguments: argparse.Namespace, options: dict[str, Any]) -> None:
    """Print the tokens per second of batches from these datasets, as pretrain_gpt.py makes them."""
    length, batch_size = arguments.sequence_length, arguments.micro_batch_size
    tokens = 999 * arguments.documents * len(prefixes) // arguments.datasets
    samples = max(batch_size, tokens // length // batch_size * batch_size)
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=length,
        blend=(prefixes, [1.0 + i for i in range(len(prefixes))] if len(prefixes) > 1 else None),
        split="1,0,0",
        create_attention_mask=False,
        tokenizer=Tokenizer(),
        **options,
    )
    built = BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config).build()[0]
    dataset = CheckedDataset(built, "train", VOCABULARY)

    def one_pass() -> None:
        for first in range(0, samples, batch_size):
            collate([dataset[i] for i in range(first, first + batch_size)])

    best = float("inf")
    for _ in range(arguments.rounds):
        started_at = time.process_time()
        one_pass()
        best = min(best, time.process_time() - started_at)
    tracemalloc.start()
    one_pass()
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    one_pass()
    gc.collect()
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    print(
        f"{what:20s} {samples * length / best / 1e6:6.1f} million tokens/s, {best / samples * 1e6:5.0f} us per sample "
        f"of {length}; kept {kept / samples:.2f} bytes per sample"
    )


if __name__ == "__main__":
    main()
