#!/usr/bin/env python
"""How fast sample indices and blends are built in numpy against the same rules in C++, and how fast samples are read.

    python benchmarks/index_building.py                        # 500,000 documents, 1,000,000 blended samples
    python benchmarks/index_building.py --documents 10000000 --samples 10000000

Documents have 1 to 1997 random tokens (999 in the mean), samples 4096. The loops are compiled with g++ -O3 where it
exists. Every round runs each variant once, in turn; a figure is the best of its rounds, in CPU seconds of this process.
Ratios (ours / C++) are the result; seconds depend on the machine.
"""

# ruff: noqa: E402 (the path is put right before the imports)

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not

import argparse
import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from megatron.core.datasets.blending_order import build_blending_indices
from megatron.core.datasets.index_builders import (
    build_document_index,
    build_sample_index,
    build_shuffle_index,
    plan_epochs,
)
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

LOOPS = r"""
#include <cstdint>
extern "C" {
// Walk over the documents; rows of (position, offset), one for each start of a sample.
void sample_index(const int32_t* sizes, const int32_t* documents, int64_t samples, int32_t length, int32_t* rows) {
    int64_t position = 0;
    int32_t offset = 0;
    rows[0] = rows[1] = 0;
    for (int64_t i = 1; i <= samples; i++) {
        int32_t left = length + 1;
        for (;;) {
            int32_t rest = sizes[documents[position]] - offset;
            if (left <= rest) { offset += left - 1; break; }
            left -= rest;
            position++;
            offset = 0;
        }
        rows[2 * i] = (int32_t)position;
        rows[2 * i + 1] = offset;
    }
}
// Each step takes from the dataset that is furthest behind its share.
void blend(const double* weights, int32_t n, int64_t size, int16_t* dataset, int64_t* sample, int64_t* drawn) {
    for (int64_t s = 0; s < size; s++) {
        double step = s > 1 ? (double)s : 1.0, most = weights[0] * step - drawn[0];
        int32_t best = 0;
        for (int32_t d = 1; d < n; d++) {
            double behind = weights[d] * step - drawn[d];
            if (behind > most) { most = behind; best = d; }
        }
        dataset[s] = (int16_t)best;
        sample[s] = drawn[best]++;
    }
}
}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=500_000)
    parser.add_argument("--samples", type=int, default=1_000_000, help="samples of each blend")
    parser.add_argument("--sequence-length", type=int, default=4096, help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        loops = compiled_loops(Path(name))
        print_conditions(loops is not None)
        compare_sample_index(arguments, loops)
        for n in (2, 10, 100):
            compare_blend(n, arguments, loops)
        measure_reading(Path(name), arguments)


def compare_sample_index(arguments: argparse.Namespace, loops: ctypes.CDLL | None) -> None:
    length = arguments.sequence_length
    sizes = np.random.default_rng(0).integers(1, 1998, arguments.documents, dtype=np.int32)
    documents = np.arange(arguments.documents, dtype=np.int32)
    tokens = int(sizes.sum(dtype=np.int64))
    samples = (tokens - 1) // length
    print(f"\n{arguments.documents:,} documents, {tokens:,} tokens, {samples:,} samples of {length}")
    order = build_document_index(documents, plan_epochs(tokens, None, length, 1), np.random.RandomState(1))
    rows = np.empty((samples + 1, 2), dtype=np.int32)

    def ours() -> Any:
        return build_sample_index(sizes, order, length)

    def theirs() -> Any:
        assert loops is not None
        loops.sample_index(pointer(sizes), pointer(order), ctypes.c_int64(samples), length, pointer(rows))
        return rows

    def shuffles() -> Any:
        random = np.random.RandomState(1)
        build_document_index(documents, plan_epochs(tokens, None, length, 1), random)
        return build_shuffle_index(samples, samples, random)

    variants = {"numpy": ours, "shuffles": shuffles} | ({"C++": theirs} if loops else {})
    best = rounds(variants, arguments.rounds)
    report("sample index", best)
    if loops is not None:
        assert (ours() == theirs()).all(), "the two disagree"
        report("with both shuffles", {name: best[name] + best["shuffles"] for name in ("numpy", "C++")})


def compare_blend(n: int, arguments: argparse.Namespace, loops: ctypes.CDLL | None) -> None:
    weights = np.random.RandomState(n).dirichlet(np.ones(n))
    size = arguments.samples
    dataset, sample = np.empty(size, dtype=np.int16), np.empty(size, dtype=np.int64)

    def ours() -> Any:
        return build_blending_indices(weights, size)

    def theirs() -> Any:
        assert loops is not None
        drawn = np.zeros(n, dtype=np.int64)
        loops.blend(pointer(weights), n, ctypes.c_int64(size), pointer(dataset), pointer(sample), pointer(drawn))
        return dataset, sample

    report(
        f"blend of {n} datasets", rounds({"numpy": ours, "C++": theirs} if loops else {"numpy": ours}, arguments.rounds)
    )
    if loops is not None:
        assert all((a == b).all() for a, b in zip(ours(), theirs(), strict=True)), "the two disagree"


def measure_reading(folder: Path, arguments: argparse.Namespace) -> None:
    """Tokens per second of dataset[i] in one process, without collating."""
    from megatron.core.datasets.blend import Split
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    length = arguments.sequence_length
    prefix = str(folder / "data")
    random = np.random.default_rng(0)
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16) as builder:
        for size in random.integers(1, 1998, 5000).tolist():
            builder.add_document(random.integers(0, 50_000, size, dtype=np.uint16), [size])
        builder.finalize(f"{prefix}.idx")
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=length, blend=([prefix], None), split="1", create_attention_mask=False
    )
    low_level = GPTDataset.build_low_level_dataset(prefix, config)
    dataset = GPTDataset(low_level, prefix, np.arange(5000, dtype=np.int32), None, Split.train, config)
    best = rounds({"read": lambda: [len(dataset[i]["tokens"]) for i in range(len(dataset))]}, arguments.rounds)["read"]
    print(f"\nreading {len(dataset):,} samples of {length}: {len(dataset) * length / best / 1e6:.1f} million tokens/s")


def rounds(variants: dict[str, Callable[[], Any]], count: int) -> dict[str, float]:
    """The best CPU seconds of each variant."""
    best = dict.fromkeys(variants, float("inf"))
    for _ in range(count):
        for name, run in variants.items():
            started_at = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - started_at)
    return best


def report(what: str, best: dict[str, float]) -> None:
    ratio = f"ratio {best['numpy'] / best['C++']:.2f}" if "C++" in best else "(no g++: no ratio)"
    print(f"{what:24s} {ratio}   " + "   ".join(f"{name} {seconds:.3f} s" for name, seconds in best.items()))


def compiled_loops(folder: Path) -> ctypes.CDLL | None:
    compiler = shutil.which("g++")
    if compiler is None:
        return None
    (folder / "loops.cpp").write_text(LOOPS)
    library = folder / "loops.so"
    subprocess.run([compiler, "-O3", "-shared", "-fPIC", "-o", library, folder / "loops.cpp"], check=True)
    return ctypes.CDLL(str(library))


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def print_conditions(has_compiler: bool) -> None:
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ]
        cpu = names[0] if names else cpu
    print(f"command: {' '.join([Path(sys.executable).name, *sys.argv])}")
    print(f"machine: {cpu}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {platform.platform()}")
    print(
        f"versions: Python {platform.python_version()}, numpy {np.__version__}, g++ {'yes' if has_compiler else 'no'}"
    )


if __name__ == "__main__":
    main()
