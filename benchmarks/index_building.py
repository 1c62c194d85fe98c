#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""How fast sample indices and blends are built in numpy, against the same rules as plain loops in C++.

    python benchmarks/index_building.py                        # 500,000 documents, 1,000,000 blended samples
    python benchmarks/index_building.py --documents 10000000 --samples 10000000

Documents have 1 to 1997 random tokens (999 in the mean), samples 4096. The loops are compiled with g++ -O3 where it
exists; they give the same bits, shuffles included. "End to end" is a GPTDataset from files whose indices are not cached
yet: open and check the index file, build, write the cache; for C++ the loops build instead of numpy. Every round runs
each variant once, in turn; a figure is the best of its rounds, in CPU seconds of this process. Ratios (ours / C++) are
the result; seconds depend on the machine. Memory is the peak of what numpy and Python allocate, mapped files apart.
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
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from megatron.core.datasets.blend import DataSplit
from megatron.core.datasets.blending_order import build_blending_indices
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.index_builders import (
    build_document_index,
    build_sample_index,
    build_shuffle_index,
    plan_epochs,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.indexed_format import HEADER, MAGIC, VERSION, DType, get_bin_path, get_idx_path

# The same for both variants: results must agree to the bit before their times are compared.
SEED = 1

LOOPS = r"""
#include <cstdint>
#include <vector>
// The Mersenne Twister and numpy.random.RandomState's way to draw a number up to a limit, and to shuffle.
struct Twister {
    uint32_t state[624];
    int next_word = 624;
    explicit Twister(uint32_t seed) {
        state[0] = seed;
        for (int i = 1; i < 624; i++) state[i] = 1812433253u * (state[i - 1] ^ (state[i - 1] >> 30)) + i;
    }
    uint32_t word() {
        if (next_word == 624) {
            for (int i = 0; i < 624; i++) {
                uint32_t y = (state[i] & 0x80000000u) | (state[(i + 1) % 624] & 0x7fffffffu);
                state[i] = state[(i + 397) % 624] ^ (y >> 1) ^ ((y & 1) ? 0x9908b0dfu : 0);
            }
            next_word = 0;
        }
        uint32_t y = state[next_word++];
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c5680u;
        y ^= (y << 15) & 0xefc60000u;
        return y ^ (y >> 18);
    }
    uint32_t up_to(uint32_t limit) {
        uint32_t mask = limit, drawn;
        for (int shift = 1; shift < 32; shift *= 2) mask |= mask >> shift;
        while ((drawn = word() & mask) > limit) {}
        return drawn;
    }
    template <class T> void shuffle(T* values, int64_t count) {
        for (int64_t i = count - 1; i > 0; i--) {
            int64_t j = up_to((uint32_t)i);
            T value = values[i];
            values[i] = values[j];
            values[j] = value;
        }
    }
};
extern "C" {
int64_t tokens(const int32_t* sizes, int32_t count) {
    int64_t sum = 0;
    for (int32_t i = 0; i < count; i++) sum += sizes[i];
    return sum;
}
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
// All three indices of one epoch.
void indices(const int32_t* sizes, int32_t count, int64_t samples, int32_t length, uint32_t seed, int32_t* documents,
             int32_t* rows, uint32_t* order) {
    Twister random(seed);
    for (int32_t i = 0; i < count; i++) documents[i] = i;
    random.shuffle(documents, count);
    sample_index(sizes, documents, samples, length, rows);
    for (int64_t i = 0; i < samples; i++) order[i] = (uint32_t)i;
    random.shuffle(order, samples);
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
        loops = compile_loops(Path(name))
        print_conditions(loops is not None)
        compare_indices(arguments, loops, Path(name))
        print(f"\n{arguments.samples:,} blended samples")
        for n in (2, 10, 100):
            compare_blend(f"{n} datasets", np.random.RandomState(n).dirichlet(np.ones(n)), arguments, loops)
        compare_blend("100, uneven", np.random.RandomState(100).dirichlet(np.full(100, 0.1)), arguments, loops)
        # Very uneven weights: the rarest dataset is drawn once in 2^40 samples, the first every other time.
        halves = 2.0 ** -np.arange(1, 41)
        compare_blend("40, each half as much", halves / halves.sum(), arguments, loops)


class Dataset:
    """Documents of random lengths on disk, and the two ways to build their indices."""

    def __init__(self, folder: Path, documents: int, length: int, loops: ctypes.CDLL | None) -> None:
        self.folder, self.documents, self.length, self.loops = folder, documents, length, loops
        self.prefix = str(folder / f"data{documents}")
        self.tokens = write_lengths(self.prefix, documents)
        self.samples = (self.tokens - 1) // length
        self.lengths = IndexedDataset(self.prefix).sequence_lengths

    def build_with_numpy(self) -> dict[str, Any]:
        """Build the indices as GPTDataset does it."""
        # One generator for documents and samples, in this order, as GPTDataset draws.
        random = np.random.RandomState(SEED)
        plan = plan_epochs(int(self.lengths.sum(dtype=np.int64)), None, self.length, 1)
        order = build_document_index(np.arange(self.documents, dtype=np.int32), plan, random)
        rows = build_sample_index(self.lengths, order, self.length)
        shuffled = build_shuffle_index(len(rows) - 1, len(rows) - 1, random)
        return {"document_index": order, "sample_index": rows, "shuffle_index": shuffled}

    def build_with_loops(self) -> dict[str, Any]:
        """Build the indices with the C++ loops."""
        assert self.loops is not None
        lengths = pointer(self.lengths)
        samples = (self.loops.tokens(lengths, self.documents) - 1) // self.length
        order, shuffled = np.empty(self.documents, np.int32), np.empty(samples, np.uint32)
        rows = np.empty((samples + 1, 2), np.int32)
        # Memory is allocated by numpy, outside of what the loops do.
        results = [pointer(array) for array in (order, rows, shuffled)]
        self.loops.indices(lengths, self.documents, ctypes.c_int64(samples), self.length, SEED, *results)
        return {"document_index": order, "sample_index": rows, "shuffle_index": shuffled}

    def build_class_with_loops(self) -> type[GPTDataset]:
        """A GPTDataset of the same name, as the name is part of what the cache is found by."""
        return type("GPTDataset", (GPTDataset,), {"_build_indices": lambda _: self.build_with_loops()})

    def build_end_to_end(self, dataset_class: type[GPTDataset]) -> None:
        """Open a dataset on an empty cache, as training does first of all."""
        # A new one each time: a second pass over the same cache would only read.
        cache = tempfile.mkdtemp(dir=self.folder)
        config = GPTDatasetConfig(
            random_seed=SEED,
            sequence_length=self.length,
            blend=([self.prefix], None),
            split="1",
            path_to_cache=cache,
        )
        low_level = GPTDataset.build_low_level_dataset(self.prefix, config)
        documents = np.arange(self.documents, dtype=np.int32)
        dataset_class(low_level, self.prefix, documents, None, DataSplit.train, config)
        shutil.rmtree(cache)


def compare_indices(arguments: argparse.Namespace, loops: ctypes.CDLL | None, folder: Path) -> None:
    """Print times and memory of building the indices, for three sizes."""
    for documents in (arguments.documents // 4, arguments.documents // 2, arguments.documents):
        dataset = Dataset(folder, documents, arguments.sequence_length, loops)
        print(f"\n{documents:,} documents, {dataset.tokens:,} tokens, {dataset.samples:,} samples of {dataset.length}")
        builders = {"numpy": dataset.build_with_numpy} | ({"C++": dataset.build_with_loops} if loops else {})
        best = rounds(builders, arguments.rounds)
        report("indices", best)
        wholes = {"numpy": partial(dataset.build_end_to_end, GPTDataset)}
        if loops is not None:
            wholes["C++"] = partial(dataset.build_end_to_end, dataset.build_class_with_loops())
        best_whole = rounds(wholes, arguments.rounds)
        report("end to end", best_whole)
        if loops is not None:
            pairs = zip(dataset.build_with_numpy().values(), dataset.build_with_loops().values(), strict=True)
            assert all((a == b).all() for a, b in pairs), "the two disagree"
        # In a pass of its own: tracing slows allocation down, and would spoil the times.
        tracemalloc.start()
        dataset.build_end_to_end(GPTDataset)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        print(
            f"numpy: {best['numpy'] / documents * 1e9:.1f} ns per document, end to end "
            f"{best_whole['numpy'] / documents * 1e9:.1f}; peak memory {peak_bytes / 2**20:.0f} MiB "
            f"({peak_bytes / documents:.1f} bytes per document)"
        )


def write_lengths(prefix: str, documents: int) -> int:
    """A dataset of which only the lengths matter: .bin is a hole of the right size. Returns the number of tokens."""
    lengths = np.random.default_rng(0).integers(1, 1998, documents, dtype=np.int32)
    ends = np.cumsum(lengths, dtype=np.int64)
    with open(get_idx_path(prefix), "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, DType.code_from_dtype(np.uint16), documents, documents + 1))
        for values in (lengths, (ends - lengths) * 2, np.arange(documents + 1, dtype=np.int64)):
            file.write(values.data)
    with open(get_bin_path(prefix), "wb") as file:
        # 2 bytes a token; a sparse file takes no room on the disk.
        file.truncate(2 * int(ends[-1]))
    return int(ends[-1])


def compare_blend(what: str, weights: np.ndarray, arguments: argparse.Namespace, loops: ctypes.CDLL | None) -> None:
    """Print the times of building one blend."""
    n, size = len(weights), arguments.samples
    dataset, sample = np.empty(size, dtype=np.int16), np.empty(size, dtype=np.int64)

    def ours() -> Any:
        return build_blending_indices(weights, size)

    def theirs() -> Any:
        assert loops is not None
        drawn = np.zeros(n, dtype=np.int64)
        loops.blend(pointer(weights), n, ctypes.c_int64(size), pointer(dataset), pointer(sample), pointer(drawn))
        return dataset, sample

    report(f"blend of {what}", rounds({"numpy": ours, "C++": theirs} if loops else {"numpy": ours}, arguments.rounds))
    if loops is not None:
        assert all((a == b).all() for a, b in zip(ours(), theirs(), strict=True)), "the two disagree"


def rounds(variants: dict[str, Callable[[], Any]], count: int) -> dict[str, float]:
    """Return the best CPU seconds of each variant."""
    best = dict.fromkeys(variants, float("inf"))
    for _ in range(count):
        # In turn within a round, so that a machine that slows down slows all variants down.
        for name, run in variants.items():
            started_at = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - started_at)
    return best


def report(what: str, best: dict[str, float]) -> None:
    """Print the times of the variants and their ratio."""
    ratio = f"ratio {best['numpy'] / best['C++']:.2f}" if "C++" in best else "(no g++: no ratio)"
    print(f"{what:30s} {ratio}   " + "   ".join(f"{name} {seconds:.3f} s" for name, seconds in best.items()))


def compile_loops(folder: Path) -> ctypes.CDLL | None:
    """Compile the C++ loops; None where there is no g++."""
    compiler = shutil.which("g++")
    if compiler is None:
        return None
    (folder / "loops.cpp").write_text(LOOPS)
    library = folder / "loops.so"
    subprocess.run([compiler, "-O3", "-shared", "-fPIC", "-o", library, folder / "loops.cpp"], check=True)
    loops = ctypes.CDLL(str(library))
    loops.tokens.restype = ctypes.c_int64
    return loops


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    """Return the array's memory as C takes it."""
    return ctypes.c_void_p(array.ctypes.data)


def print_conditions(has_compiler: bool) -> None:
    """Print machine, versions and command."""
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
