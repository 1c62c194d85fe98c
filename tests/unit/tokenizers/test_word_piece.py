# SPDX-License-Identifier: Apache-2.0
"""BERT's word pieces give the ids of transformers' BertTokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.core.errors import DataError
from tests.support.run_flags import run_config

WORDS = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", "hello", "Hello", "##s", "##lo", "hel",
    "naive", "naïve", "world", "World", "!", ",", "你", "##e", "##l", "##o", "İ", "12",
]  # fmt: skip
TEXTS = [
    "",
    "Hello, worlds!",
    "hello WORLD naïve 你好 zzz",
    "[CLS] a [SEP] [MASK]b",
    " \t x\ny\u00ad\x00 ",
    "İ ı 12 123",
]


@pytest.fixture
def vocab_file(tmp_path: Path) -> Path:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    return path


@pytest.mark.flags("--tokenizer-type", "--vocab-file", "--tokenizer-hf-no-include-special-tokens")
@pytest.mark.parametrize("lower_case", [True, False])
def test_as_transformers(lower_case: bool, vocab_file: Path) -> None:
    from megatron.training.recipes.vocabulary import build_tokenizer

    transformers = pytest.importorskip("transformers")
    expected = transformers.BertTokenizer(vocab=str(vocab_file), do_lower_case=lower_case)
    kind = "BertWordPieceLowerCase" if lower_case else "BertWordPieceCase"
    tokenizer = build_tokenizer(run_config(f"--tokenizer-type {kind} --vocab-file {vocab_file} --vocab-size 200"))
    bare = build_tokenizer(
        run_config(
            f"--tokenizer-type {kind} --vocab-file {vocab_file} --vocab-size 200 "
            "--tokenizer-hf-no-include-special-tokens"
        )
    )
    assert tokenizer.vocab_size == len(expected) == len(WORDS)
    assert (tokenizer.bos, tokenizer.eod, tokenizer.pad) == (2, 3, 0)
    for text in TEXTS:
        ids = tokenizer.tokenize(text)
        assert ids == expected.encode(text), text
        assert ids == [2, *bare.tokenize(text), 3]


def test_case_matters(vocab_file: Path) -> None:
    from megatron.core.tokenizers.build import build_tokenizer

    lower, either = (
        build_tokenizer(f"BertWordPiece{kind}", vocab_file=str(vocab_file)) for kind in ("LowerCase", "Case")
    )
    assert lower.tokenize("Hello") == lower.tokenize("hello") == either.tokenize("hello") != either.tokenize("Hello")
    assert lower.unique_identifiers != either.unique_identifiers


@pytest.mark.flags("--tokenizer-special-tokens", "--vocab-extra-ids")
def test_more_special_tokens(vocab_file: Path) -> None:
    from megatron.training.recipes.vocabulary import build_tokenizer

    tokenizer = build_tokenizer(
        run_config(
            f"--tokenizer-type BertWordPieceCase --vocab-file {vocab_file} --vocab-size 200 --vocab-extra-ids 1 "
            "--tokenizer-special-tokens <one> <two>"
        )
    )
    size = len(WORDS)
    assert tokenizer.tokenize("<two>a<extra_id_0>") == [2, size + 1, WORDS.index("a"), size + 2, 3]
    assert tokenizer.vocab_size == size + 3


@pytest.mark.parametrize("content", [b"", b"a\nb\n", b"\xff\xfe\n[UNK]\n"])
def test_J13_unusable_vocabulary(content: bytes, tmp_path: Path) -> None:
    from megatron.core.tokenizers.build import build_tokenizer

    (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(DataError, match=r"vocab\.txt: not a usable"):
        build_tokenizer("BertWordPieceCase", vocab_file=str(tmp_path / "vocab.txt"))
