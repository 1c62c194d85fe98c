# SPDX-License-Identifier: Apache-2.0
"""I6: with PREFIX.sum beside a dataset, a flipped bit anywhere is found before its token is used."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets import checksums
from megatron.core.datasets.checksums import get_sum_path, verify_checksums, write_checksums
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.merging import merge
from megatron.core.errors import DataError
from tests.faults.small_datasets import build_gpt, write_dataset

LENGTHS = [5, 0, 300, 8, 20_000, 6]
BOTH_MODES = pytest.mark.parametrize("mmap", [True, False], ids=["mmap", "pread"])


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    path = write_dataset(tmp_path / "tiny", LENGTHS)
    write_checksums(str(path))
    return path


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def read_all(prefix: Path, mmap: bool) -> None:
    dataset = IndexedDataset(str(prefix), mmap=mmap)
    for i in range(len(dataset)):
        dataset[i]


@BOTH_MODES
def test_good_data_is_read_as_without_checksums(prefix: Path, mmap: bool) -> None:
    with_sums = IndexedDataset(str(prefix), mmap=mmap)[:]
    assert verify_checksums(str(prefix))
    Path(get_sum_path(str(prefix))).unlink()
    for ours, plain in zip(with_sums, IndexedDataset(str(prefix), mmap=mmap)[:], strict=True):
        np.testing.assert_array_equal(ours, plain)
    assert not verify_checksums(str(prefix))


@BOTH_MODES
@pytest.mark.parametrize("suffix", [".bin", ".idx", ".sum"])
def test_I6_a_flipped_bit_is_found(prefix: Path, suffix: str, mmap: bool) -> None:
    """300 places in each file, in turn; the file is as before after each."""
    path = prefix.with_suffix(suffix)
    good = path.read_bytes()
    places = random.Random(1).sample(range(8 * len(good)), min(300, 8 * len(good)))
    for bit in places:
        flip(path, bit)
        with pytest.raises(DataError):
            read_all(prefix, mmap)
        with pytest.raises(DataError):
            IndexedDataset(str(prefix), mmap=mmap)
            verify_checksums(str(prefix))
        path.write_bytes(good)
    read_all(prefix, mmap)


@BOTH_MODES
def test_I6_the_sentence_names_file_place_and_remedy(prefix: Path, mmap: bool) -> None:
    flip(prefix.with_suffix(".bin"), 8 * 20_000 + 1)
    dataset = IndexedDataset(str(prefix), mmap=mmap)
    dataset[0]
    with pytest.raises(DataError, match=r"tiny.bin: bytes 16384 to 32768 have checksum .*--write-sum") as caught:
        dataset[4]
    assert caught.value.exit_code == 2


def test_I6_an_index_flip_that_stays_consistent(tmp_path: Path) -> None:
    """A document boundary moves: structure holds, only the checksum knows."""
    prefix = write_dataset(tmp_path / "tiny", [5, 6, 7])
    write_checksums(str(prefix))
    path = prefix.with_suffix(".idx")
    data = bytearray(path.read_bytes())
    data[34 + 12 * 3 + 8] = 0  # document_indices[1]: 1 -> 0
    path.write_bytes(data)
    with pytest.raises(DataError, match="tiny.idx: bytes 0 to 102 have checksum"):
        IndexedDataset(str(prefix))
    Path(get_sum_path(str(prefix))).unlink()
    IndexedDataset(str(prefix))


def test_each_block_is_compared_once(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = IndexedDataset(str(prefix))
    compared: list[int] = []
    real = checksums.Checksums.compare
    monkeypatch.setattr(
        checksums.Checksums,
        "compare",
        lambda self, block, content: (compared.append(block), real(self, block, content)),
    )
    dataset[0], dataset[1], dataset[4], dataset[4], dataset[5]
    assert compared == [0, 1, 2]


def test_checksums_follow_into_worker_processes(prefix: Path) -> None:
    dataset = pickle.loads(pickle.dumps(IndexedDataset(str(prefix))))
    flip(prefix.with_suffix(".bin"), 3)
    with pytest.raises(DataError, match="checksum"):
        dataset[0]


def test_training_data_is_checked(prefix: Path, tmp_path: Path) -> None:
    flip(prefix.with_suffix(".bin"), 3)
    dataset = build_gpt(prefix, tmp_path / "cache", sequence_length=64, sizes=(300, 0, 0))[0]
    with pytest.raises(DataError, match="checksum"):
        for i in range(len(dataset)):
            dataset[i]


def test_merging_compares_its_parts(prefix: Path, tmp_path: Path) -> None:
    flip(prefix.with_suffix(".bin"), 3)
    with pytest.raises(DataError, match="tiny.bin: bytes 0 to 16384 have checksum"):
        merge([str(prefix)], str(tmp_path / "out"))
    assert not list(tmp_path.glob("out*"))


def test_checksums_of_other_data(prefix: Path, tmp_path: Path) -> None:
    other = write_dataset(tmp_path / "other", [3, 4])
    os.replace(get_sum_path(str(prefix)), get_sum_path(str(other)))
    with pytest.raises(DataError, match=r"other.sum: describes .*other.bin with 40638 bytes, it has 14"):
        IndexedDataset(str(other))


@pytest.mark.parametrize("size", [0, 10, 47, 50])
def test_cut_checksums(prefix: Path, size: int) -> None:
    os.truncate(get_sum_path(str(prefix)), size)
    with pytest.raises(DataError, match=r"tiny.sum: .*; copy it again, delete it, or write it anew"):
        IndexedDataset(str(prefix))


def test_writing_data_anew_removes_its_checksums(prefix: Path) -> None:
    write_dataset(prefix, LENGTHS, seed=5)
    assert not Path(get_sum_path(str(prefix))).exists()
