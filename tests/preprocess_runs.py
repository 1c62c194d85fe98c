# SPDX-License-Identifier: Apache-2.0
"""Runs of tools/preprocess_data.py for tests: inputs, flags of the reference tokenizers, and what came of it."""

from __future__ import annotations

import gzip
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "golden" / "data"
TOOL = ROOT / "tools" / "preprocess_data.py"
HF_FLAGS = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(DATA / "tok" / "hf_bpe1k")]
SP_FLAGS = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(DATA / "tok" / "sp_bpe800.model")]
TIK_FLAGS = ["--tokenizer-type", "TikTokenizer", "--tokenizer-model", str(DATA / "tok" / "tiktoken_vocab.json")]
NLTK_DATA = {"NLTK_DATA": str(DATA / "tok" / "nltk_data")}
NULL_FLAGS = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]


@dataclass(frozen=True)
class Run:
    """A finished run."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def error(self) -> str:
        """The one `error:` line; fails if there is another number of them, or a traceback."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and "Traceback" not in self.err, self.err
        return lines[0]


def command(
    source: Path | str, prefix: Path | str, flags: Sequence[str] = (), tokenizer: Sequence[str] = HF_FLAGS
) -> list[str]:
    """The command line; later flags win over `--workers 1`."""
    basic = ["--input", str(source), "--output-prefix", str(prefix), "--workers", "1"]
    return [sys.executable, str(TOOL), *basic, *tokenizer, *flags]


def run_tool(
    source: Path | str,
    prefix: Path | str,
    *flags: str,
    tokenizer: Sequence[str] = HF_FLAGS,
    environment: Mapping[str, str] | None = None,
    file_size_limit: int | None = None,
    timeout: float = 60,
) -> Run:
    """Run the tool to its end."""

    def limit() -> None:
        if file_size_limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_size_limit, file_size_limit))

    started_at = time.monotonic()
    done = subprocess.run(
        command(source, prefix, flags, tokenizer),
        capture_output=True,
        text=True,
        timeout=timeout,
        preexec_fn=limit,
        env=dict(os.environ) | dict(environment or {}),
    )
    return Run(done.returncode, done.stdout, done.stderr, time.monotonic() - started_at)


def gpt2_flags(folder: Path) -> list[str]:
    """Flags of the GPT-2 tokenizer, unpacked into a folder."""
    for name in ("vocab.json", "merges.txt"):
        (folder / name).write_bytes(gzip.decompress((DATA / "tok" / "gpt2" / f"{name}.gz").read_bytes()))
    files = ["--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt")]
    return ["--tokenizer-type", "GPT2BPETokenizer", *files]


def write_lines(path: Path, *documents: object) -> Path:
    """A .jsonl file; bytes and text are taken as lines, anything else becomes JSON."""
    lines = [
        document
        if isinstance(document, bytes)
        else (document if isinstance(document, str) else json.dumps(document)).encode()
        for document in documents
    ]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path
