# SPDX-License-Identifier: Apache-2.0
"""Damaged .bin/.idx files, by their rows of the fault catalogue (I1 to I9)."""

from __future__ import annotations

import errno
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets.blend import parse_blend, parse_split
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.errors import ConfigError, DataError, MegatronError, StorageError
from tests.faults.fuzz_indexed_dataset import fuzz
from tests.faults.small_datasets import build_gpt, write_dataset

LENGTHS = [5, 0, 3, 8, 2, 6]  # one sequence per document
COUNT = len(LENGTHS)
LENGTHS_AT, POINTERS_AT = 34, 34 + 4 * COUNT
DOCUMENTS_AT = POINTERS_AT + 8 * COUNT
BOTH_MODES = pytest.mark.parametrize("mmap", [True, False], ids=["mmap", "pread"])


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "tiny", LENGTHS)


def idx(prefix: Path) -> Path:
    return prefix.with_suffix(".idx")


def edit(prefix: Path, at: int, format: str, value: Any) -> None:
    data = bytearray(idx(prefix).read_bytes())
    struct.pack_into(format, data, at, value)
    idx(prefix).write_bytes(data)


def refused(prefix: Path, *words: str, mmap: bool = True) -> str:
    """Opening raises a DataError of one sentence that has all the words."""
    with pytest.raises(DataError) as caught:
        IndexedDataset(str(prefix), mmap=mmap)
    text = str(caught.value)
    assert caught.value.exit_code == 2
    for word in (str(prefix), *words):
        assert word in text, text
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("at", "format", "value", "words"),
    [
        (0, "4s", b"PK\x03\x04", ["magic at byte 0", "MMIDIDX"]),
        (9, "<Q", 2, ["version at byte 9 is 2, expected 1"]),
        (17, "<B", 0, ["dtype code at byte 17 is 0, expected 1 to 8"]),
        (17, "<B", 9, ["dtype code at byte 17 is 9"]),
        (17, "<B", 4, ["sequence_pointers[1]", "expected 20"]),
        (17, "<B", 1, ["sequence_pointers[1]", "expected 5"]),
    ],
)
def test_I1_header(prefix: Path, at: int, format: str, value: Any, words: list[str]) -> None:
    edit(prefix, at, format, value)
    refused(prefix, *words)


def test_I2_truncated_everywhere(prefix: Path) -> None:
    data = idx(prefix).read_bytes()
    for size in range(len(data)):
        idx(prefix).write_bytes(data[:size])
        refused(prefix, f"have {size}", "expected")


@pytest.mark.parametrize("junk", [1, COUNT, 8, 1000])
def test_I2_trailing_junk(prefix: Path, junk: int) -> None:
    size = idx(prefix).stat().st_size
    with open(idx(prefix), "ab") as file:
        file.write(b"\x00" * junk)
    refused(prefix, f"expected {size} bytes", f"have {size + junk}")


@pytest.mark.parametrize("at", [18, 26], ids=["sequences", "documents"])
@pytest.mark.parametrize("value", [0, 1, COUNT + 2, 2**31, 2**63 - 1, 2**64 - 1])
def test_I3_hostile_counts_allocate_nothing(prefix: Path, at: int, value: int) -> None:
    import resource

    edit(prefix, at, "<Q", value)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(prefix, "expected")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


def test_I3_dataset_without_sequences(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(str(tmp_path / "empty.bin")) as builder:
        builder.add_document([], [])
        builder.finalize(str(tmp_path / "empty.idx"))
    refused(tmp_path / "empty", "no sequences")


@pytest.mark.parametrize(
    ("at", "format", "value", "words"),
    [
        (LENGTHS_AT + 4 * 2, "<i", -3, [f"sequence_lengths[2] at byte {LENGTHS_AT + 8} is -3"]),
        (LENGTHS_AT + 4 * 2, "<i", 4, [f"sequence_pointers[3] at byte {POINTERS_AT + 24} is 16, expected 18"]),
        (LENGTHS_AT + 4 * 5, "<i", 7, [".bin: expected 50 bytes", "have 48"]),
        (LENGTHS_AT + 4 * 5, "<i", 2**31 - 1, [".bin: expected"]),
        (POINTERS_AT, "<q", 2, ["sequence_pointers[0]", "is 2, expected 0"]),
        (POINTERS_AT + 8 * 3, "<q", 15, ["sequence_pointers[3]", "is 15, expected 16"]),
        (POINTERS_AT + 8 * 4, "<q", 2, ["sequence_pointers[4]", "is 2, expected 32"]),
        (POINTERS_AT + 8 * 5, "<q", 2**62, ["sequence_pointers[5]", f"is {2**62}"]),
        (POINTERS_AT + 8 * 5, "<q", -8, ["sequence_pointers[5]", "is -8"]),
        (DOCUMENTS_AT, "<q", 1, ["document_indices[0]", "is 1, expected 0"]),
        (DOCUMENTS_AT + 8 * 2, "<q", 5, ["document_indices[3]", "is 3, expected at least 5"]),
        (DOCUMENTS_AT + 8 * 2, "<q", -1, ["document_indices[2]", "is -1"]),
        (DOCUMENTS_AT + 8 * COUNT, "<q", 5, [f"document_indices[{COUNT}]", f"expected the sequence count {COUNT}"]),
        (DOCUMENTS_AT + 8 * COUNT, "<q", 7, [f"document_indices[{COUNT}]", "is 7"]),
    ],
)
def test_I4_fields(prefix: Path, at: int, format: str, value: Any, words: list[str]) -> None:
    edit(prefix, at, format, value)
    refused(prefix, *words)


def test_I4_checked_across_chunks(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check works in pieces; an error at the seam of two is found."""
    monkeypatch.setattr("megatron.core.datasets.indexed_format._CHUNK", 2)
    IndexedDataset(str(prefix))
    edit(
        prefix,
        POINTERS_AT + 8 * 4,
        "<q",
        30,
    )
    refused(prefix, "sequence_pointers[4]", "is 30, expected 32")
    edit(prefix, POINTERS_AT + 8 * 4, "<q", 32)
    edit(prefix, DOCUMENTS_AT + 8 * 2, "<q", 3)
    edit(prefix, DOCUMENTS_AT + 8 * 3, "<q", 2)
    refused(prefix, "document_indices[3]", "is 2, expected at least 3")


@BOTH_MODES
@pytest.mark.parametrize("change", [-48, -2, -1, 1, 2])
def test_I5_bin_of_another_size(prefix: Path, mmap: bool, change: int) -> None:
    os.truncate(prefix.with_suffix(".bin"), 48 + change)
    refused(prefix, ".bin: expected 48 bytes", f"have {48 + change}", mmap=mmap)


@BOTH_MODES
@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_I5_missing_file_and_directory(prefix: Path, mmap: bool, suffix: str) -> None:
    prefix.with_suffix(suffix).unlink()
    refused(prefix, f"{suffix}: no such file", mmap=mmap)
    prefix.with_suffix(suffix).mkdir()
    refused(prefix, f"{suffix}: not an ordinary file", mmap=mmap)


READ_AFTER_CUT = """
import os, sys
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.errors import StorageError
dataset = IndexedDataset(sys.argv[1], mmap=sys.argv[2] == "True")
os.truncate(sys.argv[1] + ".bin", 4)
try:
    print(dataset[5].sum())
except StorageError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@BOTH_MODES
def test_I7_bin_cut_while_open(tmp_path: Path, mmap: bool) -> None:
    """The policy: sizes are compared before each access, so the process ends with a sentence and not by SIGBUS."""
    prefix = write_dataset(tmp_path / "big", [20_000] * 6)
    run = subprocess.run(
        [sys.executable, "-c", READ_AFTER_CUT, str(prefix), str(mmap)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert run.returncode == StorageError.exit_code == 74, (run.returncode, run.stderr)
    assert "had 240000 bytes when it was opened, has 4" in run.stdout


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (["0.3", "a", "0.7"], "3 entries"),
        (["0.3", "a", "b", "c"], "'b' stands where a weight is expected"),
        (["0.3", "a", "0.7", "0.1"], "'0.1' stands where a prefix is expected"),
        (["nan", "a", "0.5", "b"], "weight of a is nan"),
        (["inf", "a", "0.5", "b"], "weight of a is inf"),
        (["-1", "a", "0.5", "b"], "weight of a is -1"),
        (["0", "a", "0", "b"], "weight of a is 0"),
        ([], "--data-path is empty"),
        (["a", " "], "--data-path is empty"),
    ],
)
def test_I9_blend(items: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        parse_blend(items)
    assert "--data-path" in str(caught.value)


@pytest.mark.parametrize("text", ["", "a,b,c", "1,2,3,4", "-1,2", "nan,1", "inf,1,0", "0,0,0", "1;2;3"])
def test_I9_split(text: str) -> None:
    with pytest.raises(ConfigError, match="--split is "):
        parse_split(text)


def test_I9_missing_prefix_is_found_before_any_work(prefix: Path, tmp_path: Path) -> None:
    blend = ([str(prefix), str(tmp_path / "absent")], [0.5, 0.5])
    with pytest.raises(DataError, match=r"absent\.idx: no such file"):
        build_gpt(prefix, tmp_path / "cache", blend=blend)
    for suffix in (".bin", ".idx"):
        with pytest.raises(DataError, match=rf"no such file; .*; drop the suffix and give {prefix}$"):
            build_gpt(prefix, tmp_path / "cache", blend=([str(prefix) + suffix], None))
    assert not (tmp_path / "cache").exists()


def test_I9_split_without_documents(prefix: Path) -> None:
    """Samples of a split that has no documents: refused at once. None wanted: fine."""
    with pytest.raises(DataError, match="valid split has no documents .*4 samples are wanted .*--split 99,1,0"):
        build_gpt(prefix, split="99,1,0", sizes=(4, 4, 0))
    train, valid, test = build_gpt(prefix, split="99,1,0", sizes=(4, 0, 0))
    assert len(train) >= 4 and valid is None and test is None


def test_I9_split_whose_documents_are_empty(tmp_path: Path) -> None:
    write_dataset(tmp_path / "hollow", [9, 9, 0, 0])
    with pytest.raises(DataError, match="valid split has 2 documents with 0 tokens"):
        build_gpt(tmp_path / "hollow", split="50,50,0", sizes=(4, 4, 0))


# ---- writing ----


def test_half_written_dataset_has_no_final_name(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), IndexedDatasetBuilder(str(tmp_path / "x.bin")) as builder:
        builder.add_document([1, 2, 3], [3])
        assert [path.name.startswith("x.bin.tmp-") for path in tmp_path.iterdir()] == [True]
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_failed_finalize_leaves_nothing_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    builder = IndexedDatasetBuilder(str(tmp_path / "x.bin"))
    builder.add_document([1, 2, 3], [3])
    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(StorageError, match="Input/output error"):
            builder.finalize(str(tmp_path / "x.idx"))
    assert list(tmp_path.iterdir()) == []


def test_token_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    for tokens in ([1, 65_536], [-1, 5], np.array([70_000], dtype=np.int64)):
        with (
            pytest.raises(DataError, match="does not fit the token type uint16"),
            IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=np.uint16) as builder,
        ):
            builder.add_document(tokens, [len(tokens)])


def test_output_directory_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="create the output directory"):
        IndexedDatasetBuilder(str(tmp_path / "absent" / "x.bin"))


def test_float_tokens_are_no_gpt_data(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(str(tmp_path / "f.bin"), dtype=np.float32) as builder:
        builder.add_document([0.5] * 20, [20])
        builder.finalize(str(tmp_path / "f.idx"))
    with pytest.raises(DataError, match="float32, expected an integer type"):
        build_gpt(tmp_path / "f", tmp_path / "cache")


def test_merging_other_token_types_is_refused(prefix: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match="uint16 cannot be appended"),
        IndexedDatasetBuilder(str(tmp_path / "merged.bin"), dtype=np.int32) as builder,
    ):
        builder.add_index(str(prefix))


@pytest.mark.parametrize("seed", [1, 2])
def test_fuzz(tmp_path: Path, seed: int) -> None:
    """2,400 random injuries: refused exactly when an independent reader finds the pair unsound."""
    tally = fuzz(tmp_path, 1200, seed)
    assert sum(tally.values()) == 1200
    assert min(tally["refused"], tally["accepted"]) > 10


def test_errors_are_for_users() -> None:
    assert issubclass(DataError, MegatronError) and issubclass(StorageError, MegatronError)
