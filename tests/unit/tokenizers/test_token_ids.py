# SPDX-License-Identifier: Apache-2.0
"""Token ids that no dataset can hold are refused before a library reads them: it would abort the process, or leave the
token out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron.core.errors import DataError
from megatron.core.tokenizers import huggingface
from megatron.core.tokenizers.build import build_tokenizer
from megatron.training.recipes.vocabulary import build_tokenizer as build_for_run
from tests.preprocess_runs import DATA
from tests.support.run_flags import run_config

TOKENIZER = DATA / "tok" / "hf_bpe1k"


def write_files(directory: Path, number: Any, where: str) -> None:
    """A tokenizer.json, vocab.json and merges.txt, in one of which a token has this id."""
    content = json.loads((TOKENIZER / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    if where == "added_tokens":
        content["added_tokens"][0]["id"] = number
    else:
        vocabulary[list(vocabulary)[500]] = number
    shutil.copytree(TOKENIZER, directory, dirs_exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(content))
    (directory / "vocab.json").write_text(json.dumps(vocabulary))
    (directory / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))


@pytest.mark.parametrize("number", [2**31, 2**32 - 1, 2**40, -1, 1.5, "7", True, None], ids=repr)
def test_ids_that_are_no_ids(number: Any, tmp_path: Path) -> None:
    told = r"the token '.*' has the id .*; ids are whole numbers from 0 to 2147483647"
    for where in ("vocab", "added_tokens"):
        write_files(tmp_path, number, where)
        with pytest.raises(DataError, match=told):
            build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    write_files(tmp_path, number, "vocab")
    files = f"--vocab-file {tmp_path / 'vocab.json'} --merge-file {tmp_path / 'merges.txt'}"
    with pytest.raises(DataError, match=told):
        # Beside --mock-data, too, where no text is read.
        build_for_run(run_config(f"--tokenizer-type GPT2BPETokenizer {files} --vocab-size 1000"))


@pytest.mark.parametrize("where", ["vocab", "added_tokens", "vocab.json"])
def test_the_library_is_not_handed_an_id_that_ends_the_process(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Library:
        @staticmethod
        def from_file(*files: str) -> None:
            pytest.fail(f"the library is handed {files}")

    monkeypatch.setattr(huggingface.tokenizers, "Tokenizer", Library)
    monkeypatch.setattr(huggingface.tokenizers.models, "BPE", Library)
    write_files(tmp_path, 2**31, where)
    with pytest.raises(DataError, match="has the id 2147483648; ids are whole numbers from 0 to 2147483647"):
        if where == "vocab.json":
            huggingface.gpt2_bpe_tokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
        else:
            build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))


@pytest.mark.parametrize("added", [5, True, 1.5, "x", [5]], ids=repr)
def test_added_tokens_that_are_no_list_of_tokens(added: Any, tmp_path: Path) -> None:
    write_files(tmp_path, 1, "vocab")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"added_tokens": added}))
    with pytest.raises(DataError, match="tokenizer.json: not a usable tokenizer file"):
        build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))


@pytest.mark.parametrize("prefix", ["x", "8", "1e4", "é 🙂", ""])
def test_a_prefix_that_merges_do_not_have(prefix: str, tmp_path: Path) -> None:
    """The library cuts as many bytes from a merge's second part, and ends the process where it has fewer."""
    write_files(tmp_path, 1, "vocab")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["continuing_subword_prefix"] = prefix
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    if not prefix:
        assert build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path)).tokenize("a")
        return
    with pytest.raises(DataError, match="continuing_subword_prefix is .*, and the merge .* does not have it"):
        build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))


def test_the_largest_id(tmp_path: Path) -> None:
    write_files(tmp_path, 2**31 - 1, "vocab")
    assert build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path)).max_id == 2**31 - 1
