# SPDX-License-Identifier: Apache-2.0
"""SentencePiece tokenizers against the reference's ids, with added tokens, kept spaces and broken files."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import sentencepiece

from megatron.core.errors import ConfigError, DataError
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.encoders import PlainEncoder, choose_encoder
from tests.preprocess_runs import DATA
from tests.support.run_flags import run_config
from tests.unit.tokenizers.test_tokenizers import check_reference

MODEL = DATA / "tok" / "sp_bpe800.model"
TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")


def trained(path: Path, **settings: object) -> str:
    """A tiny model with the library's usual settings: repeated spaces are dropped."""
    model = io.BytesIO()
    words = ["hello", "world", "we", "are", "words", "of", "a", "tiny", "corpus"]
    sentences = [f"{one} {two}" for one in words for two in words]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, vocab_size=60, model_type="bpe",
        user_defined_symbols=["<sep>"], minloglevel=2, num_threads=1, **settings,
    )  # fmt: skip
    path.write_bytes(model.getvalue())
    return str(path)


@pytest.mark.flags("--tokenizer-type", "--tokenizer-model")
@pytest.mark.parametrize("tokenizer_type", TYPES)
def test_reference(tokenizer_type: str) -> None:
    check_reference("sp", {"tokenizer_type": tokenizer_type, "tokenizer_model": str(MODEL)})


def test_directory_that_holds_the_model(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(MODEL.read_bytes())
    check_reference("sp", {"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": str(tmp_path)})


@pytest.mark.flags(
    "--tokenizer-sentencepiece-ignore-extra-whitespaces", "--no-tokenizer-sentencepiece-ignore-extra-whitespaces"
)
@pytest.mark.parametrize("text", ["hello  world", " hello world  ", "hello world"])
def test_extra_spaces(text: str, tmp_path: Path) -> None:
    from megatron.training.recipes.vocabulary import build_tokenizer

    model = trained(tmp_path / "tiny.model")
    base = f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {model}"
    usual = build_tokenizer(run_config(f"{base} --tokenizer-sentencepiece-ignore-extra-whitespaces"))
    keeping = build_tokenizer(run_config(f"{base} --no-tokenizer-sentencepiece-ignore-extra-whitespaces"))
    assert usual.detokenize(usual.tokenize(text)) == " ".join(text.split())
    assert keeping.detokenize(keeping.tokenize(text)) == text
    assert usual.tokenize("hello world") == keeping.tokenize("hello world")
    assert usual.unique_identifiers != keeping.unique_identifiers


@pytest.mark.flags("--tokenizer-special-tokens", "--tokenizer-sentencepiece-legacy")
def test_special_tokens_in_legacy_mode(tmp_path: Path) -> None:
    from megatron.training.recipes.vocabulary import build_tokenizer

    model = trained(tmp_path / "tiny.model")
    base = f"--tokenizer-type Llama2Tokenizer --tokenizer-model {model}"
    plain = build_tokenizer(run_config(base))
    special = "--tokenizer-special-tokens <one> <sep> <two>"
    tokenizer = build_tokenizer(run_config(f"{base} {special} --tokenizer-sentencepiece-legacy"))
    size = plain.vocab_size
    assert (tokenizer.vocab_size, tokenizer.max_id) == (size + 2, size + 1), "<sep> is a piece of the model already"
    known = sentencepiece.SentencePieceProcessor(model_file=model).piece_to_id("<sep>")
    hello, world = plain.tokenize("hello"), plain.tokenize("world")
    assert tokenizer.tokenize("<one>hello<two><sep>world") == [size, *hello, size + 1, known, *world]
    # A separator alone behind an added token is dropped, as between two words without one.
    assert plain.tokenize("<sep>")[0] != known
    text = "<one>hello world<two>"
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert tokenizer.tokenize("") == []
    with pytest.raises(ConfigError, match="--tokenizer-special-tokens needs --tokenizer-sentencepiece-legacy"):
        build_tokenizer(run_config(f"{base} {special}"))


@pytest.mark.flags("--vocab-extra-ids")
def test_extra_ids() -> None:
    tokenizer = build_tokenizer("SentencePieceTokenizer", tokenizer_model=str(MODEL), vocab_extra_ids=3)
    assert (tokenizer.vocab_size, tokenizer.max_id) == (803, 802)
    assert tokenizer.tokenize("<extra_id_2><extra_id_0>") == [802, 800]
    assert tokenizer.detokenize([802, 5000, 800]) == "<extra_id_2><extra_id_0>"


@pytest.mark.parametrize("content", [b"", b"\x00" * 100, b"not a model", MODEL.read_bytes()[:5000], b"{}"])
def test_J13_corrupt_model(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad.model").write_bytes(content)
    with pytest.raises(DataError, match=r"bad\.model: not a usable SentencePiece model"):
        build_tokenizer("SentencePieceTokenizer", tokenizer_model=str(tmp_path / "bad.model"))


def test_preprocessing_uses_the_model_itself() -> None:
    tokenizer = build_tokenizer("SentencePieceTokenizer", tokenizer_model=str(MODEL))
    assert isinstance(choose_encoder(tokenizer, ["some text"]), PlainEncoder)
