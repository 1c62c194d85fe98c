# SPDX-License-Identifier: Apache-2.0
"""Reading and writing .bin/.idx."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

SEQUENCES = [[1, 2, 3], [4], [], [5, 6, 7, 8], [9, 10]]
BOTH_MODES = pytest.mark.parametrize("mmap", [True, False], ids=["mmap", "pread"])


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    with IndexedDatasetBuilder(str(tmp_path / "d.bin"), dtype=np.int32) as builder:
        builder.add_document([1, 2, 3, 4], [3, 1])
        builder.add_document([], [])
        builder.add_item([])
        builder.add_item(np.array([5, 6, 7, 8], dtype=np.int64))
        builder.end_document()
        builder.add_document((9, 10), [2])
        builder.finalize(str(tmp_path / "d.idx"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.bin", "d.idx"]
    return str(tmp_path / "d")


@BOTH_MODES
def test_reading(prefix: str, mmap: bool) -> None:
    dataset = IndexedDataset(prefix, mmap=mmap)
    assert [dataset[i].tolist() for i in range(len(dataset))] == SEQUENCES
    assert dataset[-1].tolist() == SEQUENCES[-1]
    assert [s.tolist() for s in dataset[1:4]] == SEQUENCES[1:4]
    assert [s.tolist() for s in dataset[::-2]] == SEQUENCES[::-2]
    assert dataset.get(3, offset=1, length=2).tolist() == [6, 7]
    assert dataset.get(3, offset=2).tolist() == [7, 8]
    assert dataset.get(3, offset=4, length=0).tolist() == []
    assert dataset.sequence_lengths.tolist() == [3, 1, 0, 4, 2]
    assert dataset.document_indices.tolist() == [0, 2, 2, 4, 5]
    assert dataset.dtype == np.int32 and dataset.sequence_modes is None
    assert (dataset._bin._mapped is not None) == mmap


@BOTH_MODES
@pytest.mark.parametrize(("index", "offset", "length"), [(3, 0, 5), (3, 5, None), (3, -1, 2), (3, 3, 2), (0, 0, 10)])
def test_reads_stay_inside_their_sequence(prefix: str, mmap: bool, index: int, offset: int, length: int | None) -> None:
    with pytest.raises(IndexError):
        IndexedDataset(prefix, mmap=mmap).get(index, offset, length)


@pytest.mark.parametrize("index", [5, -6])
def test_sequence_numbers_are_checked(prefix: str, index: int) -> None:
    with pytest.raises(IndexError):
        IndexedDataset(prefix)[index]


@BOTH_MODES
def test_survives_pickling(prefix: str, mmap: bool) -> None:
    again = pickle.loads(pickle.dumps(IndexedDataset(prefix, mmap=mmap)))
    assert [again[i].tolist() for i in range(len(again))] == SEQUENCES


@pytest.mark.parametrize("dtype", [member.name for member in DType])
def test_every_token_type(tmp_path: Path, dtype: str) -> None:
    with IndexedDatasetBuilder(str(tmp_path / "t.bin"), dtype=dtype) as builder:
        builder.add_document([1, 2, 100], [3])
        builder.finalize(str(tmp_path / "t.idx"))
    dataset = IndexedDataset(str(tmp_path / "t"))
    assert dataset[0].dtype == np.dtype(dtype) and dataset[0].tolist() == [1, 2, 100]


def test_type_follows_the_vocabulary() -> None:
    assert DType.optimal_dtype(65_499) is np.uint16
    assert DType.optimal_dtype(65_500) is np.int32
    assert DType.optimal_dtype(None) is np.int32


def test_modes(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(str(tmp_path / "m.bin"), multimodal=True) as builder:
        builder.add_document([1, 2, 3], [2, 1], modes=[0, 1])
        builder.add_item([4], mode=2)
        builder.end_document()
        builder.finalize(str(tmp_path / "m.idx"))
    dataset = IndexedDataset(str(tmp_path / "m"), multimodal=True)
    tokens, mode = dataset[1]
    assert tokens.tolist() == [3] and mode == 1
    sequences, modes = dataset[:]
    assert [s.tolist() for s in sequences] == [[1, 2], [3], [4]] and modes.tolist() == [0, 1, 2]


def test_merging(prefix: str, tmp_path: Path) -> None:
    with IndexedDatasetBuilder(str(tmp_path / "empty.bin")) as builder:
        builder.add_document([], [])
        builder.finalize(str(tmp_path / "empty.idx"))
    with IndexedDatasetBuilder(str(tmp_path / "merged.bin")) as builder:
        for part in (prefix, str(tmp_path / "empty"), prefix):
            builder.add_index(part)
        builder.finalize(str(tmp_path / "merged.idx"))
    merged = IndexedDataset(str(tmp_path / "merged"))
    assert [merged[i].tolist() for i in range(len(merged))] == SEQUENCES * 2
    assert merged.document_indices.tolist() == [0, 2, 2, 4, 5, 5, 7, 7, 9, 10]


def test_rewriting_replaces_the_pair(prefix: str) -> None:
    with IndexedDatasetBuilder(prefix + ".bin", dtype=np.uint16) as builder:
        builder.add_document([42], [1])
        builder.finalize(prefix + ".idx")
    assert [s.tolist() for s in IndexedDataset(prefix)[:]] == [[42]]


def test_first_token_outside(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = IndexedDataset(prefix)
    for scan_bytes in (4, 12, 1 << 20):  # whole file at once, or in pieces
        monkeypatch.setattr("megatron.core.datasets.indexed_dataset._SCAN_BYTES", scan_bytes)
        assert dataset.first_token_outside(11) is None
        assert dataset.first_token_outside(7) == (3, 2, 7)
        assert dataset.first_token_outside(1) == (0, 0, 1)
        assert dataset.first_token_outside(5) == (3, 0, 5)  # not in the empty sequence at the same place


def test_lengths_must_add_up(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(str(tmp_path / "x.bin")) as builder, pytest.raises(ValueError, match="sum to 2"):
        builder.add_document([1, 2, 3], [2])


def test_arrays_of_any_layout_can_be_written(tmp_path: Path) -> None:
    tokens: Any = np.arange(20, dtype=np.int64)[::2]
    with IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=np.uint16) as builder:
        builder.add_document(tokens, [10])
        builder.add_document(tokens.astype(np.uint16)[::-1], [10])
        builder.finalize(str(tmp_path / "x.idx"))
    dataset = IndexedDataset(str(tmp_path / "x"))
    assert dataset[0].tolist() == list(range(0, 20, 2)) and dataset[1].tolist() == list(range(18, -1, -2))
