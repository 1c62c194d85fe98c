# SPDX-License-Identifier: Apache-2.0
"""Sentences as nltk's Punkt finds them, with kept white space, and parameters that cannot be used."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core import optional_deps
from megatron.core.datasets.preprocessing.documents import SentenceSplitter
from megatron.core.errors import ConfigError, DataError
from tests.preprocess_runs import NLTK_DATA, NULL_FLAGS, run_tool, write_lines

punkt = pytest.importorskip("nltk.tokenize.punkt")
FOLDER = Path(NLTK_DATA["NLTK_DATA"])
TEXT = "Hello there.\n\nHow are you?  Fine! (Yes.) See e.g. this. \nfoo!Bar.Baz 3.14 end. \n"


@pytest.fixture(autouse=True)
def local_data(monkeypatch: pytest.MonkeyPatch) -> None:
    import nltk.data

    monkeypatch.setattr(nltk.data, "path", [str(FOLDER)])


def test_white_space_between_sentences() -> None:
    parts = ["Hello there.", "How are you?", "Fine!", "(Yes.)", "See e.g. this.", "foo!Bar.Baz 3.14 end."]
    assert SentenceSplitter("english")(TEXT) == parts
    kept = ["Hello there.\n\n", "How are you?  ", "Fine! ", "(Yes.)", "See e.g. this. \n", "foo!Bar.Baz 3.14 end."]
    assert SentenceSplitter("english", keep_newlines=True)(TEXT) == kept


@pytest.mark.parametrize("keep_newlines", [False, True])
def test_texts_without_sentences(keep_newlines: bool) -> None:
    splitter = SentenceSplitter("english", keep_newlines=keep_newlines)
    assert splitter("") == splitter(" \n ") == []
    assert splitter("no end") == ["no end"]


def test_a_million_characters_at_a_time() -> None:
    text = "a" * 999_999 + "bb"
    assert [len(part) for part in SentenceSplitter("english")(text)] == [1_000_000, 1]


def naive(splitter: SentenceSplitter) -> Any:
    """Kept white space by a pattern that is easier to read, and takes quadratic time."""

    class Variables(punkt.PunktLanguageVars):
        _period_context_fmt = r"\S* %(SentEndChars)s \s* (?=(?P<after_tok> %(NonWord)s | (?P<next_tok>\S+) ))"

    return punkt.PunktSentenceTokenizer(splitter._punkt._params, lang_vars=Variables())


PIECES = [*" .?!\n)\"'(,-3aA", "  ", "Mr.", "e.g.", "The", "word", "...", "”", "3.14", "x.y", "U.S."]


@settings(max_examples=300)
@given(text=st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_kept_white_space_is_exact(text: str) -> None:
    splitter = SPLITTER
    assert splitter(text) == naive(splitter).tokenize(text)


def make_splitter() -> SentenceSplitter:
    import nltk.data

    before, nltk.data.path = nltk.data.path, [str(FOLDER)]
    try:
        return SentenceSplitter("english", keep_newlines=True)
    finally:
        nltk.data.path = before


SPLITTER = make_splitter()


def test_time_is_linear() -> None:
    """With a time that grows with the square of the length, this would reach the time limit of a test."""
    SPLITTER("a" * 3_000_000)
    SPLITTER("a." * 100_000)


def test_goes_to_other_processes() -> None:
    copy = pickle.loads(pickle.dumps(SPLITTER))
    assert copy(TEXT) == SPLITTER(TEXT)


@pytest.mark.parametrize("language", ["klingon", "../english", "english/", ""])
def test_J13_languages_that_are_not_there(language: str) -> None:
    with pytest.raises(ConfigError, match=r"--lang '?" + language):
        SentenceSplitter(language)


def test_J13_unusable_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nltk.data

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    folder = tmp_path / "tokenizers" / "punkt_tab" / "english"
    for name, content, message in (
        ("abbrev_types.txt", None, "missing"),
        ("sent_starters.txt", b"\xff", "not a usable file"),
        ("collocations.tab", b"one\n", r"collocations\.tab:1: expected two fields"),
        ("ortho_context.tab", b"the\tmany\n", "expected a number"),
    ):
        shutil.copytree(FOLDER / "tokenizers" / "punkt_tab" / "english", folder, dirs_exist_ok=True)
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            SentenceSplitter("english")


def test_J13_without_nltk(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "nltk.tokenize.punkt", None)
    monkeypatch.setattr(optional_deps, "available", lambda name: False)
    with pytest.raises(ConfigError, match=r"--split-sentences needs the Python package nltk.*pip install"):
        SentenceSplitter("english")


def test_sentences_become_sequences(tmp_path: Path) -> None:
    """Of each of several texts, with white space kept; the language is the flag's."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = tmp_path / "nltk"
    shutil.copytree(FOLDER, data)
    (data / "tokenizers" / "punkt_tab" / "english").rename(data / "tokenizers" / "punkt_tab" / "other")
    source = write_lines(tmp_path / "in.jsonl", {"text": ["1 2", "3"]}, {"text": ""}, {"text": "4"})
    environment = {"NLTK_DATA": str(data)}
    run = run_tool(source, tmp_path / "out", "--split-sentences", tokenizer=NULL_FLAGS, environment=environment)
    assert run.code == 2 and "--lang english" in run.error and "there are other" in run.error
    flags = ["--split-sentences", "--lang", "other", "--append-eod"]
    run = run_tool(source, tmp_path / "out", *flags, tokenizer=NULL_FLAGS, environment=environment)
    assert run.code == 0, run.err
    dataset = IndexedDataset(str(tmp_path / "out_text_sentence"))
    assert [dataset[number].tolist() for number in range(3)] == [[1, 2], [3, 99], [4, 99]]
    assert dataset.document_indices.tolist() == [0, 2, 2, 3]


def test_keep_newlines_flag(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    source = write_lines(tmp_path / "in.jsonl", {"text": TEXT})
    lengths = {}
    for flags in ([], ["--keep-newlines"]):
        prefix = tmp_path / f"out{len(flags)}"
        assert run_tool(source, prefix, "--split-sentences", *flags, environment=NLTK_DATA).code == 0
        lengths[len(flags)] = IndexedDataset(f"{prefix}_text_sentence").sequence_lengths.sum()
    assert lengths[1] > lengths[0]
    run = run_tool(source, tmp_path / "plain", "--keep-newlines", "--keep-sequential-samples")
    assert run.code == 0 and "--keep-newlines has no effect without --split-sentences" in run.err
    assert "--keep-sequential-samples has no effect without --partitions" in run.err
