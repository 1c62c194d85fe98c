# SPDX-License-Identifier: Apache-2.0
"""Row J9 of the fault catalogue: compressed input that is damaged, cut off, mislabelled, unreadable, or a bomb."""

from __future__ import annotations

import gzip
import itertools
import json
import sys
from pathlib import Path

import pytest

from megatron.core import optional_deps
from megatron.core.datasets.preprocessing.input_files import find_inputs, read_blocks
from megatron.core.errors import ConfigError, DataError
from tests.faults.test_preprocess_bad_input import refused
from tests.preprocess_runs import run_tool


def test_J9_truncated_and_damaged_gzip(tmp_path: Path) -> None:
    good = gzip.compress(b"".join(json.dumps({"text": f"text {i} " * 20}).encode() + b"\n" for i in range(2000)))
    source = tmp_path / "in.jsonl.gz"
    source.write_bytes(good[: len(good) // 2])
    refused(run_tool(source, tmp_path / "out"), tmp_path, str(source), "truncated")
    middle = len(good) // 2
    source.write_bytes(good[:middle] + bytes(byte ^ 0xFF for byte in good[middle : middle + 64]) + good[middle + 64 :])
    refused(run_tool(source, tmp_path / "out"), tmp_path, str(source))


@pytest.mark.parametrize(("name", "content", "words"), [
    ("in.jsonl.gz", b'{"text": "a"}\n', "does not start like a gzip file"),
    ("in.jsonl", gzip.compress(b'{"text": "a"}\n', mtime=0), "is gzip-compressed but not named .gz"),
    ("in.jsonl", b"\x28\xb5\x2f\xfd1234", "is Zstandard-compressed but not named .zst"),
    ("in.jsonl.zst", b'{"text": "a"}\n', "does not start like a Zstandard file"),
    ("in.jsonl", b"\xfd7zXZ\x0012", "xz is not read"),
    ("in.jsonl.xz", b"?", ".xz is not read"),
    ("in.parquet", b"PAR1....", "Parquet is not read"),
])  # fmt: skip
def test_J9_other_formats(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    refused(run_tool(tmp_path / name, tmp_path / "out"), tmp_path, name, words)


def test_J9_truncated_and_damaged_zstandard(tmp_path: Path) -> None:
    """At any place, in either of two frames; a frame that ends early is no end of the file."""
    zstandard = pytest.importorskip("zstandard")
    text = b"".join(json.dumps({"text": f"text {i * i}"}).encode() + b"\n" for i in range(3000))
    compressor = zstandard.ZstdCompressor(write_checksum=True)
    frames = [compressor.compress(text), compressor.compress(text)]
    good = b"".join(frames)
    source = tmp_path / "in.jsonl.zst"
    source.write_bytes(good)
    assert b"".join(read_blocks(str(source), 1000)) == text * 2
    for end in {1, 2, 5, len(frames[0]) // 2, len(frames[0]) + 1, len(good) - 5, len(good) - 1}:
        source.write_bytes(good[:end])
        with pytest.raises(DataError, match="truncated"):
            list(read_blocks(str(source), 1000))
    middle = len(frames[0]) // 2
    source.write_bytes(good[:middle] + bytes(byte ^ 0xFF for byte in good[middle : middle + 64]) + good[middle + 64 :])
    refused(run_tool(source, tmp_path / "out"), tmp_path, str(source), "damaged")
    source.write_bytes(good + b"what is this?")
    refused(run_tool(source, tmp_path / "out"), tmp_path, str(source), "damaged")


def test_J9_zstandard_bomb(tmp_path: Path) -> None:
    """4 GB of one letter in a few hundred kilobytes: stopped at the longest line, in bounded memory."""
    zstandard = pytest.importorskip("zstandard")
    source = tmp_path / "in.jsonl.zst"
    megabytes = zstandard.ZstdCompressor(level=1).compress(b"a" * (64 << 20))
    source.write_bytes(zstandard.compress(b'{"text": "') + megabytes * 64)
    run = run_tool(source, tmp_path / "out", "--max-line-bytes", "10000000")
    refused(run, tmp_path, f"{source}:1: longer than --max-line-bytes 10000000")
    assert max(len(block) for block in itertools.islice(read_blocks(str(source), 1000), 20)) <= 64 << 20


def test_J9_without_zstandard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "in.jsonl.zst"
    source.write_bytes(b"\x28\xb5\x2f\xfd")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setattr(optional_deps, "available", lambda name: False)
    with pytest.raises(ConfigError, match=r"in\.jsonl\.zst needs the Python package zstandard.*pip install"):
        find_inputs(str(source))


def test_J9_gzip_bomb(tmp_path: Path) -> None:
    """1 GB of one letter in 1 MB: stopped at the longest line, in bounded memory."""
    source = tmp_path / "in.jsonl.gz"
    with gzip.open(source, "wb", compresslevel=9) as file:
        file.write(b'{"text": "')
        for _ in range(200):
            file.write(b"a" * (1 << 20))
    run = run_tool(source, tmp_path / "out", "--max-line-bytes", "10000000")
    refused(run, tmp_path, f"{source}:1: longer than --max-line-bytes 10000000")
