# SPDX-License-Identifier: Apache-2.0
"""tools/merge_datasets.py: the bytes of one go, in the order of names, and what it refuses."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.cli import generate, merge_datasets, preprocess_data, verify_dataset
from megatron.core.datasets.checksums import get_sum_path, write_checksums
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.merging import merge, order_surprise, prefixes_in
from megatron.core.errors import ConfigError, DataError
from tests.faults.small_datasets import write_dataset
from tests.preprocess_runs import DATA, ROOT, run_tool

TOOL = str(ROOT / "tools" / "merge_datasets.py")


def run_merge(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def content(prefix: Path | str) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def test_merging_parts_is_preprocessing_all_at_once(tmp_path: Path) -> None:
    """The reference corpus in three parts, each preprocessed alone, becomes the reference's own dataset."""
    lines = (DATA / "corpus" / "public_small.jsonl").read_bytes().splitlines(keepends=True)
    parts = tmp_path / "parts"
    parts.mkdir()
    for number, some in enumerate((lines[:7], lines[7:30], lines[30:])):
        (tmp_path / f"{number}.jsonl").write_bytes(b"".join(some))
        run = run_tool(tmp_path / f"{number}.jsonl", parts / f"part{number}")
        assert run.code == 0, run.err
    done = run_merge("--input", parts, "--output-prefix", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "3 datasets" in done.stdout
    facts = json.loads((DATA / "preprocess" / "manifest.json").read_text())["hf_small_noeod"]["files"]
    for suffix in ("bin", "idx"):
        digest = hashlib.sha256((tmp_path / f"out.{suffix}").read_bytes()).hexdigest()
        assert digest == facts[f"out_text_document.{suffix}"]["sha256"]
    assert not list(tmp_path.glob("out.lock")) + list(tmp_path.glob("*.tmp*"))


def test_documents_that_are_empty_or_of_several_sequences(tmp_path: Path) -> None:
    documents = [([1, 2, 3], [2, 1]), ([], []), ([4], [1]), ([5, 6], [1, 1]), ([], [])]
    for name, some in {"whole": documents, "a": documents[:2], "b": documents[2:]}.items():
        with IndexedDatasetBuilder(f"{tmp_path / name}.bin", np.int32) as builder:
            for tokens, lengths in some:
                builder.add_document(tokens, lengths)
            builder.finalize(f"{tmp_path / name}.idx")
    merge([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "ab"))
    assert content(tmp_path / "ab") == content(tmp_path / "whole")


def test_modes_of_multimodal_datasets(tmp_path: Path) -> None:
    for name in "ab":
        with IndexedDatasetBuilder(f"{tmp_path / name}.bin", np.int32, multimodal=True) as builder:
            builder.add_document([1, 2], [1, 1], [0, 1])
            builder.finalize(f"{tmp_path / name}.idx")
    done = run_merge("--input", tmp_path, "--output-prefix", tmp_path / "ab", "--multimodal")
    assert done.returncode == 0, done.stderr
    modes = IndexedDataset(str(tmp_path / "ab"), multimodal=True).sequence_modes
    assert modes is not None and modes.tolist() == [0, 1, 0, 1]


def test_order_is_that_of_names_or_that_given(tmp_path: Path) -> None:
    prefixes = {name: write_dataset(tmp_path / name, [size]) for name, size in (("p2", 2), ("p10", 10), ("p1", 1))}
    (tmp_path / "notes.txt").write_text("left alone")
    found = prefixes_in(str(tmp_path))
    assert [Path(prefix).name for prefix in found] == ["p1", "p10", "p2"]
    assert "p10 comes before p2" in str(order_surprise(found))
    assert order_surprise(["p1", "p2", "p3"]) is None

    (tmp_path / "out").mkdir()
    done = run_merge("--input", prefixes["p2"], prefixes["p10"], "--output-prefix", tmp_path / "out" / "given")
    assert done.returncode == 0, done.stderr
    assert IndexedDataset(str(tmp_path / "out" / "given")).sequence_lengths.tolist() == [2, 10]


@pytest.mark.parametrize("removed", [".bin", ".idx"])
def test_half_a_dataset_is_refused(tmp_path: Path, removed: str) -> None:
    write_dataset(tmp_path / "a", [3]).with_suffix(removed).unlink()
    with pytest.raises(DataError, match=re.escape(f"a{removed} is missing beside its other half")):
        prefixes_in(str(tmp_path))


def test_nothing_to_merge_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no .bin/.idx dataset"):
        prefixes_in(str(tmp_path))
    done = run_merge("--input", tmp_path / "absent", "--output-prefix", tmp_path / "out")
    assert done.returncode == 2 and "absent.idx: no such file" in done.stderr and "Traceback" not in done.stderr


def test_token_types_must_agree(tmp_path: Path) -> None:
    a = write_dataset(tmp_path / "a", [3])
    with IndexedDatasetBuilder(f"{tmp_path / 'b'}.bin", np.int32) as builder:
        builder.add_document([1], [1])
        builder.finalize(f"{tmp_path / 'b'}.idx")
    with pytest.raises(DataError, match="b.idx: token type is int32, but uint16 in .*a.idx"):
        merge([str(a), str(tmp_path / "b")], str(tmp_path / "out"))
    assert not list(tmp_path.glob("out*"))


def test_output_in_the_way(tmp_path: Path) -> None:
    a, out = write_dataset(tmp_path / "a", [3]), write_dataset(tmp_path / "out", [4])
    write_checksums(str(out))
    with pytest.raises(ConfigError, match="is one of the datasets to merge"):
        merge([str(a)], str(tmp_path / "." / "a"), overwrite=True)
    with pytest.raises(ConfigError, match="out.bin exists; pass --overwrite"):
        merge([str(a)], str(out))
    merge([str(a), str(a)], str(out), overwrite=True)
    assert IndexedDataset(str(out)).sequence_lengths.tolist() == [3, 3]
    assert not Path(get_sum_path(str(out))).exists(), "checksums of the former files are gone"


def test_I4_a_damaged_part_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    a, b = write_dataset(tmp_path / "a", [3]), write_dataset(tmp_path / "b", [5])
    b.with_suffix(".bin").write_bytes(b"12")
    done = run_merge("--input", a, b, "--output-prefix", tmp_path / "out")
    assert done.returncode == 2 and "b.bin: expected 10 bytes" in done.stderr
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("empty", ["", " "])
def test_an_empty_path_is_refused_by_the_tools(empty: str) -> None:
    """An unset shell variable; for Path() it would be the current directory."""
    for flag, others in (("--input", ["--output-prefix", "a"]), ("--output-prefix", ["--input", "a"])):
        with pytest.raises(ConfigError, match=f"{flag}: '{empty}' is empty"):
            merge_datasets.make_parser().parse_args([*others, flag, empty])
        with pytest.raises(ConfigError, match=f"{flag}: '{empty}' is empty"):
            preprocess_data.make_parser().parse_args([*others, "--workers", "1", flag, empty])
    with pytest.raises(ConfigError, match=f"--input: '{empty}' is empty"):
        verify_dataset.make_parser().parse_args(["--input", empty])
    with pytest.raises(ConfigError, match=f"--load: '{empty}' is empty"):
        generate.parse_arguments(["--load", empty, "--prompt", "a"])
