# SPDX-License-Identifier: Apache-2.0
"""tools/verify_dataset.py: what it reports of good data, and what it says about bad data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets import inspection
from megatron.core.datasets.checksums import get_sum_path, verify_checksums
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.inspection import Lengths, check_vocabulary, document_tokens, inspect
from megatron.core.errors import DataError
from tests.faults.small_datasets import write_dataset
from tests.preprocess_runs import DATA, HF_FLAGS, NULL_FLAGS, ROOT, run_tool

TOOL = str(ROOT / "tools" / "verify_dataset.py")


def verify(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, *map(str, arguments)], capture_output=True, text=True, timeout=60)


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """Documents of 3 tokens in 2 sequences, none, 1 and 4 tokens; 9 ends two of them."""
    with IndexedDatasetBuilder(f"{tmp_path / 'several'}.bin", np.int32) as builder:
        for tokens, lengths in (([1, 2, 9], [2, 1]), ([], []), ([70], [1]), ([5, 9, 9, 9], [4])):
            builder.add_document(tokens, lengths)
        builder.finalize(f"{tmp_path / 'several'}.idx")
    return tmp_path / "several"


@pytest.mark.parametrize("tokens_at_once", [1, 3, 100])
def test_facts(several: Path, monkeypatch: pytest.MonkeyPatch, tokens_at_once: int) -> None:
    monkeypatch.setattr(inspection, "_TOKENS_AT_ONCE", tokens_at_once)
    facts = inspect(IndexedDataset(str(several)), eod=9)
    assert (facts.documents, facts.empty_documents, facts.sequences, facts.tokens) == (4, 1, 4, 8)
    assert facts.document_lengths == Lengths(0, 2, 2.0, 4) and facts.sequence_lengths == Lengths(1, 1, 2.0, 4)
    assert (facts.smallest_id, facts.largest_id, facts.distinct_ids, facts.documents_ending) == (1, 70, 5, 2)
    assert inspect(IndexedDataset(str(several))).documents_ending == 0


def test_documents_of_several_sequences(several: Path) -> None:
    dataset = IndexedDataset(str(several))
    assert [document_tokens(dataset, i).tolist() for i in range(4)] == [[1, 2, 9], [], [70], [5, 9, 9, 9]]
    with pytest.raises(DataError, match="document 4 does not exist; give 0 to 3"):
        document_tokens(dataset, 4)


def test_I8_a_token_outside_the_vocabulary_is_located(several: Path) -> None:
    check_vocabulary(IndexedDataset(str(several)), 71)
    with pytest.raises(DataError, match=r"several.bin: token 0 of sequence 2 \(document 2\) is 70, outside the voc"):
        check_vocabulary(IndexedDataset(str(several)), 70)


def test_report_of_a_real_corpus(tmp_path: Path) -> None:
    corpus = DATA / "corpus" / "public_small.jsonl"
    assert run_tool(corpus, tmp_path / "out", "--append-eod").code == 0
    done = verify("--input", tmp_path / "out_text_document", *HF_FLAGS, "--decode", "1", "--document", "2")
    assert done.returncode == 0, done.stderr
    lines = dict(line.strip().split("  ", 1) for line in done.stdout.splitlines() if line.startswith("  "))
    documents = lines["documents"].split(",")[0].strip()
    nonempty = int(documents) - int(lines["documents"].split()[1] if "," in lines["documents"] else 0)
    assert lines["end of document"].strip().startswith(f"{nonempty} of {nonempty} documents end with id 0")
    assert "the vocabulary has 1000" in lines["token ids"]
    assert "document 0 (" in done.stdout and "document 2 (" in done.stdout and "document 1 (" not in done.stdout
    first = json.loads(corpus.read_text().splitlines()[0])["text"]
    assert f"tokens): {first[:60]!r}"[:-1] in done.stdout


def test_ids_without_a_tokenizer(several: Path) -> None:
    done = verify("--input", several, "--decode", "9")
    assert "document 0 (3 tokens): [1, 2, 9]" in done.stdout and done.stdout.count("  document ") == 5


def test_vocabulary_of_the_tokenizers_flags(several: Path) -> None:
    assert verify("--input", several, *NULL_FLAGS).returncode == 0
    done = verify("--input", several, "--tokenizer-type", "NullTokenizer", "--vocab-size", "60")
    assert done.returncode == 2 and "is 70, outside the vocabulary of 60" in done.stderr
    assert "Traceback" not in done.stderr


def test_I6_checksums_are_written_and_compared(several: Path) -> None:
    assert "none (--write-sum makes them)" in verify("--input", several).stdout
    assert verify("--input", several, "--write-sum").returncode == 0 and verify_checksums(str(several))
    assert "agree with PREFIX.sum" in verify("--input", several).stdout

    data = bytearray(several.with_suffix(".bin").read_bytes())
    data[0] ^= 2
    several.with_suffix(".bin").write_bytes(data)
    done = verify("--input", several)
    assert done.returncode == 2 and "several.bin: bytes 0 to 32 have checksum" in done.stderr
    again = verify("--input", several, "--write-sum")
    assert again.returncode == 0 and "warning: checksums that do not agree are replaced" in again.stderr
    assert verify_checksums(str(several))


def test_checksums_are_written_only_for_good_data(several: Path) -> None:
    done = verify("--input", several, "--tokenizer-type", "NullTokenizer", "--vocab-size", "60", "--write-sum")
    assert done.returncode == 2 and not Path(get_sum_path(str(several))).exists()


def test_every_dataset_is_looked_at(several: Path, tmp_path: Path) -> None:
    good = write_dataset(tmp_path / "good", [3])
    done = verify("--input", tmp_path / "absent", several, good)
    assert done.returncode == 2
    assert "absent.idx: no such file" in done.stderr and done.stdout.count("structure is good") == 2


def test_bad_flags(several: Path) -> None:
    done = verify("--input", several, "--lr", "3")
    assert done.returncode == 2 and "unrecognized arguments: --lr 3" in done.stderr
    done = verify("--input", several, "--tokenizer-type", "MultimodalTokenizer")
    assert done.returncode == 2 and "--tokenizer-type MultimodalTokenizer is not" in done.stderr
    done = verify("--help")
    assert done.returncode == 0 and "--tokenizer-model" in done.stdout
