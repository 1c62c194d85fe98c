# SPDX-License-Identifier: Apache-2.0
"""tools/preprocess_data.py writes the same bytes as Megatron-LM's, for every case of the reference that it supports."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.preprocess_runs import DATA, HF_FLAGS, NLTK_DATA, SP_FLAGS, TIK_FLAGS, gpt2_flags, run_tool

MANIFEST: dict[str, dict[str, Any]] = json.loads((DATA / "preprocess" / "manifest.json").read_text())
NULL_100K = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100000"]


def check_files(case: str, folder: Path) -> None:
    """Every file of the case, and no other one, with the reference's bytes."""
    expected = MANIFEST[case]["files"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(expected)
    for name, facts in expected.items():
        content = (folder / name).read_bytes()
        assert len(content) == facts["bytes"], name
        assert hashlib.sha256(content).hexdigest() == facts["sha256"], name


@pytest.mark.flags("--tokenizer-type", "--tokenizer-model")
@pytest.mark.parametrize(
    ("case", "flags"),
    [
        ("hf_small_noeod", ""),
        ("hf_small_2keys", "--append-eod --json-keys text title --workers 2"),
        ("hf_small_2keys", "--append-eod --json-keys text title --workers 3"),
        ("hf_small_part2", "--append-eod --partitions 2 --workers 2"),
    ],
)
def test_huggingface(case: str, flags: str, tmp_path: Path) -> None:
    run = run_tool(DATA / "corpus" / "public_small.jsonl", tmp_path / "out", *flags.split())
    assert run.code == 0, run.err
    assert "tiktoken encoder, verified" in run.err
    check_files(case, tmp_path)


@pytest.mark.flags("--vocab-file", "--merge-file", "--tokenizer-type")
def test_gpt2(tmp_path: Path) -> None:
    (tmp_path / "tok").mkdir()
    (tmp_path / "out").mkdir()
    source = DATA / "corpus" / "public_small.jsonl"
    run = run_tool(source, tmp_path / "out" / "out", "--append-eod", tokenizer=gpt2_flags(tmp_path / "tok"))
    assert run.code == 0, run.err
    check_files("gpt2_small_eod", tmp_path / "out")


@pytest.mark.flags("--vocab-size", "--tokenizer-type")
def test_null(tmp_path: Path) -> None:
    source = DATA / "corpus" / "public_null.jsonl"
    run = run_tool(source, tmp_path / "out", "--append-eod", tokenizer=NULL_100K)
    assert run.code == 0, run.err
    check_files("null_100k_eod", tmp_path)


@pytest.mark.flags("--tokenizer-type", "--tokenizer-model")
def test_sentencepiece(tmp_path: Path) -> None:
    source = DATA / "corpus" / "public_small.jsonl"
    run = run_tool(source, tmp_path / "out", "--append-eod", tokenizer=SP_FLAGS)
    assert run.code == 0, run.err
    check_files("spbpe_small_eod", tmp_path)


@pytest.mark.flags("--tokenizer-type", "--vocab-size", "--tiktoken-num-special-tokens")
@pytest.mark.parametrize("pattern", [["--tiktoken-pattern", "v2"], []])
def test_tiktoken(pattern: list[str], tmp_path: Path) -> None:
    pytest.importorskip("tiktoken")
    source = DATA / "corpus" / "public_small.jsonl"
    sizes = ["--vocab-size", "900", "--tiktoken-num-special-tokens", "20"]
    run = run_tool(source, tmp_path / "out", "--append-eod", tokenizer=[*TIK_FLAGS, *sizes, *pattern])
    assert run.code == 0, run.err
    check_files("tik_v2_small_eod", tmp_path)


@pytest.mark.parametrize("workers", ["2", "4"])
def test_sequential_partitions(workers: str, tmp_path: Path) -> None:
    flags = ["--append-eod", "--partitions", "2", "--keep-sequential-samples", "--workers", workers]
    run = run_tool(DATA / "corpus" / "public_small.jsonl", tmp_path / "out", *flags)
    assert run.code == 0, run.err
    check_files("hf_small_part2_seq", tmp_path)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_sentences(workers: str, tmp_path: Path) -> None:
    """In one run, and without the reference's intermediate file."""
    pytest.importorskip("nltk")
    flags = ["--append-eod", "--split-sentences", "--workers", workers]
    run = run_tool(DATA / "corpus" / "public_small.jsonl", tmp_path / "out", *flags, environment=NLTK_DATA)
    assert run.code == 0, run.err
    check_files("hf_small_splitsent", tmp_path)


@pytest.mark.parametrize("workers", ["1", "4"])
def test_full_corpus(golden_dir: Path, workers: str, tmp_path: Path) -> None:
    run = run_tool(golden_dir / "corpus" / "public.jsonl", tmp_path / "out", "--append-eod", "--workers", workers)
    assert run.code == 0, run.err
    check_files("hf_full_eod", tmp_path)


def test_without_fast_encoder(tmp_path: Path) -> None:
    """A tokenizer that cannot be converted takes the library's own path, with the same ids."""
    model = tmp_path / "model"
    shutil.copytree(DATA / "tok" / "hf_bpe1k", model)
    content = json.loads((model / "tokenizer.json").read_text())
    # The same rule, written in a way that the table of known patterns does not hold.
    regex = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+|\Z\z"""
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, bytes_only]}
    (model / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "out").mkdir()
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(model / "tokenizer.json")]
    run = run_tool(DATA / "corpus" / "public_small.jsonl", tmp_path / "out" / "out", tokenizer=tokenizer)
    assert run.code == 0, run.err
    assert "no faster encoder: its pre-tokenizer has an unknown regular expression" in run.err
    check_files("hf_small_noeod", tmp_path / "out")


def test_zstandard_and_several_files(tmp_path: Path) -> None:
    """Compressed (in two frames and with a skippable one between them) and cut into files: the same dataset."""
    zstandard = pytest.importorskip("zstandard")
    lines = (DATA / "corpus" / "public_small.jsonl").read_bytes().splitlines(keepends=True)
    source = tmp_path / "in"
    source.mkdir()
    (source / "c.jsonl").write_bytes(b"".join(lines[40:]))
    skippable = b"\x50\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc"
    frames = [zstandard.compress(b"".join(part)) for part in (lines[:10], lines[10:30])]
    (source / "a.jsonl.zst").write_bytes(frames[0] + skippable + frames[1])
    (source / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[30:40])))
    (tmp_path / "out").mkdir()
    run = run_tool(source / "*.jsonl*", tmp_path / "out" / "out", tokenizer=HF_FLAGS)
    assert run.code == 0, run.err
    check_files("hf_small_noeod", tmp_path / "out")


def test_gzip_and_several_files(tmp_path: Path) -> None:
    """Compressed (in two members) and cut into files, the corpus gives the same dataset."""
    lines = (DATA / "corpus" / "public_small.jsonl").read_bytes().splitlines(keepends=True)
    source = tmp_path / "in"
    source.mkdir()
    (source / "b.jsonl").write_bytes(b"".join(lines[40:]))
    (source / "a.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[:10])) + gzip.compress(b"".join(lines[10:40])))
    (tmp_path / "out").mkdir()
    run = run_tool(source / "*.jsonl*", tmp_path / "out" / "out", tokenizer=HF_FLAGS)
    assert run.code == 0, run.err
    check_files("hf_small_noeod", tmp_path / "out")
