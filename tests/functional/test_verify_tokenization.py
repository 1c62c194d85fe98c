# SPDX-License-Identifier: Apache-2.0
"""tools/verify_tokenization.py: good datasets are equal to their text, and the first difference is named."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from tests.preprocess_runs import DATA, HF_FLAGS, NLTK_DATA, NULL_FLAGS, ROOT, SP_FLAGS, Run, run_tool, write_lines

SMALL = DATA / "corpus" / "public_small.jsonl"


def verify(source: Path, prefix: Path, *flags: str) -> Run:
    import os

    command = [sys.executable, str(ROOT / "tools" / "verify_tokenization.py"), "--input", str(source)]
    done = subprocess.run(
        [*command, "--output-prefix", str(prefix), *flags],
        capture_output=True,
        text=True,
        timeout=120,
        env=dict(os.environ) | NLTK_DATA,
    )
    return Run(done.returncode, done.stdout, done.stderr, 0)


@pytest.mark.parametrize("flags", [
    "--append-eod",
    "--json-keys text title",
    "--partitions 2",
    "--partitions 3 --keep-sequential-samples --append-eod",
])  # fmt: skip
def test_equal(flags: str, tmp_path: Path) -> None:
    workers = "3" if "3" in flags else "2"
    assert run_tool(SMALL, tmp_path / "out", *flags.split(), "--workers", workers).code == 0
    run = verify(SMALL, tmp_path / "out", *flags.split(), "--workers", workers, *HF_FLAGS)
    assert run.code == 0, run.err
    assert "out_text_document: equal" in run.out and "56 documents" in run.out
    keys = 2 if "title" in flags else 1
    assert f"gives back {56 * keys} of {56 * keys} texts" in run.out


def test_sentences_of_another_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("nltk")
    flags = ["--split-sentences", "--append-eod"]
    assert run_tool(SMALL, tmp_path / "out", *flags, tokenizer=SP_FLAGS, environment=NLTK_DATA).code == 0
    run = verify(SMALL, tmp_path / "out", *flags, *SP_FLAGS, "--documents", "9")
    assert run.code == 0 and "out_text_sentence: equal" in run.out and "9 documents" in run.out, run.err


@pytest.mark.parametrize(("made", "verified", "words"), [
    ("--append-eod", "", "sequence 0: token 1 of 2: found [99] '99', the text makes its end"),
    ("", "--append-eod", "found its end, the text makes [99]"),
    ("--json-keys a", "--json-keys a --max-line-bytes 5", "longer than --max-line-bytes 5"),
])  # fmt: skip
def test_other_flags(made: str, verified: str, words: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"text": "1", "a": "2"}, {"text": "3 4", "a": "5"})
    assert run_tool(source, tmp_path / "out", *made.split(), tokenizer=NULL_FLAGS).code == 0
    run = verify(source, tmp_path / "out", *verified.split(), *NULL_FLAGS)
    assert run.code == 2 and words in run.error
    assert run.error.startswith(f"error: {source}:1: ")


def test_other_texts(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"text": "1 2"}, b"", {"text": "3 4 5 6"}, {"text": ["7", "8"]})
    assert run_tool(source, tmp_path / "out", tokenizer=NULL_FLAGS).code == 0
    assert verify(source, tmp_path / "out", *NULL_FLAGS).code == 0
    for lines, words in (
        (
            [{"text": "1 2"}, {"text": "3 4 9 6"}],
            f":2: document 1 of {tmp_path}/out_text_document, sequence 0: token 2",
        ),
        ([{"text": "1 2"}], "has 3 documents, the input has 1 for it"),
        ([{"text": "1 2"}, {"text": "3 4 5 6"}, {"text": ["7"]}], ":3: document 2"),
        ([{"text": "1 2"}, {"text": "3 4 5 6"}, {"text": ["7", "8"]}, {"text": "9"}], ":4: document 3"),
        ([b"{"], ":1: invalid JSON"),
    ):
        other = write_lines(tmp_path / "other.jsonl", *lines)
        run = verify(other, tmp_path / "out", *NULL_FLAGS)
        assert run.code == 2 and words in run.error
    run = verify(
        write_lines(tmp_path / "one.jsonl", {"text": "1 2"}), tmp_path / "out", *NULL_FLAGS, "--documents", "1"
    )
    assert run.code == 0, run.err
    run = verify(source, tmp_path / "none", *NULL_FLAGS)
    assert run.code == 2 and "none_text_document" in run.error


def test_skipped_lines(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"text": "1"}, b"{", {"text": 5}, {"text": "2"})
    assert run_tool(source, tmp_path / "out", "--on-bad-line", "skip", tokenizer=NULL_FLAGS).code == 0
    run = verify(source, tmp_path / "out", "--on-bad-line", "skip", *NULL_FLAGS)
    assert run.code == 0 and "2 unusable lines were left out" in run.err and "2 documents" in run.out


def test_whole_that_is_not_its_parts(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", *[{"text": f"{number} 1"} for number in range(6)])
    flags = ["--partitions", "2", "--workers", "2"]
    assert run_tool(source, tmp_path / "out", *flags, tokenizer=NULL_FLAGS).code == 0
    assert verify(source, tmp_path / "out", *flags, *NULL_FLAGS).code == 0
    prefix = str(tmp_path / "out_text_document")
    whole = IndexedDataset(prefix)
    sequences = [whole[number] for number in range(len(whole))]
    sequences[4] = np.array([9, 9], dtype=sequences[4].dtype)
    with IndexedDatasetBuilder(f"{tmp_path}/changed.bin", whole.dtype) as builder:
        for tokens in sequences:
            builder.add_document(tokens, [len(tokens)])
        builder.finalize(f"{tmp_path}/changed.idx")
    for ending in (".bin", ".idx"):
        shutil.copy(tmp_path / f"changed{ending}", prefix + ending)
    run = verify(source, tmp_path / "out", *flags, *NULL_FLAGS)
    assert run.code == 2 and "sequence 4 differs from sequence 1 of" in run.error


def test_bad_flags(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"text": "1"})
    for flags, words in (
        (["--documents", "0"], "--documents 0 must be at least 1"),
        (["--docments", "1"], "did you mean"),
    ):
        run = verify(source, tmp_path / "out", *flags, *NULL_FLAGS)
        assert run.code == 2 and words in run.error
