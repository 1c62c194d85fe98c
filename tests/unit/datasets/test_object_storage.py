# SPDX-License-Identifier: Apache-2.0
"""Datasets in object storage: the same samples as from a disk. fsspec's file system in memory stands in for s3://."""

from __future__ import annotations

import importlib
import multiprocessing
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from megatron.core.datasets import object_storage
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.object_storage import ObjectFile
from megatron.core.errors import ConfigError, DataError, StorageError
from megatron.training.recipes.gpt_data import build_gpt_datasets
from tests.faults.small_datasets import Tokenizer, write_dataset
from tests.support.run_flags import run_config

URL = "memory://bucket/corpus"
RUN = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 2 --train-iters 5 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 1000 --split 1,0,0"
)


@pytest.fixture
def prefix(tmp_path: Path) -> Iterator[Path]:
    """A dataset on disk, and the same one as objects."""
    prefix = write_dataset(tmp_path / "corpus", [30, 0, 17, 45, 8] * 20)
    memory = fsspec.filesystem("memory")
    for suffix in (".bin", ".idx"):
        memory.pipe_file(f"/bucket/corpus{suffix}", Path(f"{prefix}{suffix}").read_bytes())
    yield prefix
    memory.rm("/bucket", recursive=True)


def samples(flags: str) -> list[Any]:
    dataset = build_gpt_datasets(run_config(flags, RUN), Tokenizer(), (40, 0, 0))[0]  # type: ignore[arg-type]
    return [dataset[i]["tokens"].tolist() for i in range(40)]


@pytest.mark.flags("--object-storage-cache-path")
def test_objects_give_the_samples_of_files(prefix: Path, tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    assert samples(f"--data-path {URL} --object-storage-cache-path {copies}") == samples(f"--data-path {prefix}")
    (copy,) = copies.glob("*.idx")
    assert copy.read_bytes() == Path(f"{prefix}.idx").read_bytes()
    assert list((copies / "GPTDataset_indices").glob("*.npy")), "sample indices go there, too"
    blend = (
        f"--data-path 1 {URL} 2 {prefix} --object-storage-cache-path {copies} --data-cache-path {tmp_path / 'cache'}"
    )
    assert len(samples(blend)) == 40
    with pytest.raises(ConfigError, match="needed: a local directory for copies of index files"):
        samples(f"--data-path {URL}")


def test_tokens_are_read_by_blocks(prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_storage, "BLOCK_BYTES", 64)
    monkeypatch.setattr(object_storage, "_BLOCKS_KEPT", 3)
    fetched: list[int] = []
    fetch = ObjectFile._fetch
    monkeypatch.setattr(ObjectFile, "_fetch", lambda self, a, b: fetched.append(a) or fetch(self, a, b))
    ours, theirs = IndexedDataset(URL, index_directory=str(tmp_path / "copies")), IndexedDataset(str(prefix))
    for i in np.random.RandomState(0).permutation(len(theirs)).tolist():
        np.testing.assert_array_equal(ours[i], theirs[i])
        assert len(ours._bin._blocks) <= 3  # type: ignore[union-attr]
    before = len(fetched)
    assert all((ours.get(0, 2, 5) == theirs.get(0, 2, 5)).all() for _ in range(5)) and len(fetched) <= before + 1
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(ours))[3], theirs[3])
    assert ours.fingerprint() == theirs.fingerprint()


def _tokens(dataset: IndexedDataset, results: Any) -> None:
    results.put((dataset[0].tolist(), len(dataset._bin._blocks)))  # type: ignore[union-attr]


def test_a_process_after_a_fork_reads_for_itself(prefix: Path, tmp_path: Path) -> None:
    """Connections cannot be shared."""
    dataset = IndexedDataset(URL, index_directory=str(tmp_path / "copies"))
    expected = dataset[0].tolist()
    dataset[len(dataset) - 1]
    opened = dataset._bin._process  # type: ignore[union-attr]
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    process = fork.Process(target=_tokens, args=(dataset, results))
    process.start()
    assert results.get(timeout=60) == (expected, 1)
    process.join(60)
    assert dataset._bin._process == opened  # type: ignore[union-attr]


def test_a_changed_object_is_copied_anew(prefix: Path, tmp_path: Path) -> None:
    copies = str(tmp_path / "copies")
    assert len(IndexedDataset(URL, index_directory=copies)) == len(IndexedDataset(str(prefix)))
    other = write_dataset(tmp_path / "other", [3, 4])
    for suffix in (".bin", ".idx"):
        fsspec.filesystem("memory").pipe_file(f"/bucket/corpus{suffix}", Path(f"{other}{suffix}").read_bytes())
    assert IndexedDataset(URL, index_directory=copies).sequence_lengths.tolist() == [3, 4]
    assert len(list(Path(copies).iterdir())) == 2


def test_I5_objects_that_are_missing_or_cut(prefix: Path, tmp_path: Path) -> None:
    copies = str(tmp_path / "copies")
    memory = fsspec.filesystem("memory")
    dataset = IndexedDataset(URL, index_directory=copies)
    memory.pipe_file("/bucket/corpus.bin", b"xy")
    with pytest.raises(StorageError, match=r"memory://bucket/corpus.bin: bytes 0 to \d+ came as 2"):
        dataset[0]
    with pytest.raises(DataError, match=r"corpus.bin: expected \d+ bytes for the sequences .* have 2"):
        IndexedDataset(URL, index_directory=copies)
    with pytest.raises(DataError, match="memory://bucket/none.idx: no such object"):
        IndexedDataset("memory://bucket/none", index_directory=copies)
    with pytest.raises(DataError, match="memory://bucket/none.idx: no such object"):
        samples(f"--data-path {URL} memory://bucket/none --object-storage-cache-path {copies}")


def test_protocols_that_cannot_be_used(prefix: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nope://a/b.idx: cannot be used .*nope.*; give a local path"):
        IndexedDataset("nope://a/b", index_directory=str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="--object-storage-cache-path .*/file/x: copying memory://bucket/corpus.idx"):
        IndexedDataset(URL, index_directory=str(tmp_path / "file" / "x"))
    with pytest.raises(ConfigError, match="conversations are read from a disk only"):
        samples(f"--data-path {URL}.bin --sft --object-storage-cache-path {tmp_path}")


class Profiles(MemoryFileSystem):
    """Stands in for the multi-storage client: its protocol, over objects in memory."""

    protocol = "msc"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("msc://").lstrip("/")


@pytest.mark.flags("--enable-msc")
def test_profiles_of_the_multi_storage_client(prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = f"--data-path msc://bucket/corpus --object-storage-cache-path {tmp_path / 'copies'}"
    with pytest.raises(ConfigError, match="msc://bucket/corpus.idx: cannot be used .* pip install 'multi-storage-cl"):
        samples(f"{data} --enable-msc")
    monkeypatch.setitem(importlib.import_module("fsspec.registry")._registry, "msc", Profiles)
    assert samples(f"{data} --enable-msc") == samples(f"--data-path {prefix}")
    with pytest.raises(ConfigError, match="msc://bucket/corpus is read through .*; add --enable-msc"):
        samples(data)
    (tmp_path / "blend.json").write_text('{"train": ["msc://bucket/corpus"]}')
    with pytest.raises(ConfigError, match="add --enable-msc"):
        run = RUN.replace("--split 1,0,0", f"--per-split-data-args-path {tmp_path}/blend.json")
        build_gpt_datasets(run_config("", run), Tokenizer(), (40, 0, 0))  # type: ignore[arg-type]


@pytest.mark.parametrize("flag", ["--save-interval 5 --save", "--load", "--pretrained-checkpoint"])
def test_checkpoints_are_not_objects(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag.split()[-1]} s3://bucket/run is in object storage"):
        run_config(f"{flag} s3://bucket/run", f"{RUN} --mock-data")
