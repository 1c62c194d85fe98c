# SPDX-License-Identifier: Apache-2.0
"""Code and metadata beside a tokenizer: nothing is run unless the user says so, and a metadata file is believed."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from megatron.core.errors import ConfigError, DataError
from megatron.core.tokenizers.build import build_tokenizer
from tests.preprocess_runs import DATA
from tests.support.run_flags import run_config

CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast
Path({marker!r}).write_text("code was run")

class OwnTokenizer(PreTrainedTokenizerFast):
    def encode(self, text, add_special_tokens=True, **settings):
        return [7] * add_special_tokens + super().encode(text[::-1], add_special_tokens=False)
"""


@pytest.fixture
def with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tokenizer whose code leaves a mark when it is run; it has no tokenizer.json of its own."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    directory = tmp_path / "model"
    shutil.copytree(DATA / "tok" / "hf_bpe1k", directory)
    (directory / "tokenization_own.py").write_text(CODE.format(marker=str(tmp_path / "marker")))
    config = {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", "tokenization_own.OwnTokenizer"]},
        "eos_token": "<|endoftext|>",
        "chat_template": "{{ messages[0].content }}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.flags("--trust-remote-code")
def test_L15_code_is_run_only_when_asked_for(with_code: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from megatron.training.recipes import vocabulary

    flags = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {with_code} --vocab-size 1000"
    plain = vocabulary.build_tokenizer(run_config(flags))
    assert not (tmp_path / "marker").exists()
    assert plain.tokenize("abc") == build_tokenizer(
        "HuggingFaceTokenizer", tokenizer_model=str(DATA / "tok" / "hf_bpe1k")
    ).tokenize("abc")
    trusted = vocabulary.build_tokenizer(run_config(f"{flags} --trust-remote-code"))
    assert (tmp_path / "marker").read_text() == "code was run"
    assert trusted.tokenize("abc") == [7, *plain.tokenize("cba")]
    assert (trusted.vocab_size, trusted.eod, trusted.max_id) == (plain.vocab_size, plain.eod, plain.max_id)
    assert trusted.apply_chat_template([{"content": "abc"}]) == plain.tokenize("cba")
    assert trusted.detokenize(plain.tokenize("naïve")) == "naïve"
    bare = vocabulary.build_tokenizer(
        run_config(f"{flags} --trust-remote-code --tokenizer-hf-no-include-special-tokens")
    )
    assert bare.tokenize("abc") == plain.tokenize("cba")


@pytest.mark.flags("--trust-remote-code")
def test_L15_code_alone_is_refused(with_code: Path, tmp_path: Path) -> None:
    (with_code / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="is Python code, which runs only with --trust-remote-code"):
        build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(with_code))
    assert not (tmp_path / "marker").exists()


def test_broken_code(with_code: Path) -> None:
    pytest.importorskip("transformers")
    (with_code / "tokenization_own.py").write_text("raise KeyError('broken')")
    with pytest.raises(DataError, match="its own code fails"):
        build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(with_code), trust_remote_code=True)


@pytest.mark.flags("--trust-remote-code")
def test_trust_changes_nothing_without_code() -> None:
    arguments = {"tokenizer_model": str(DATA / "tok" / "hf_bpe1k")}
    plain, trusted = (
        build_tokenizer("HuggingFaceTokenizer", trust_remote_code=trust, **arguments) for trust in (False, True)
    )
    assert type(plain) is type(trusted) and plain.unique_identifiers == trusted.unique_identifiers


@pytest.mark.parametrize("kind", ["HuggingFaceTokenizer", "SentencePieceTokenizer", "TikTokenizer"])
def test_X2_no_network_for_any_name(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_socket(*arguments: Any, **settings: Any) -> Any:
        raise AssertionError("a tokenizer wanted the network")

    monkeypatch.setattr(socket, "socket", no_socket)
    for name in ("gpt2", "meta-llama/Llama-2-7b-hf", "https://example.org/tokenizer.json"):
        with pytest.raises(ConfigError, match="no such file"):
            build_tokenizer(kind, tokenizer_model=name, trust_remote_code=True)


def metadata(folder: Path, content: object) -> Path:
    path = folder / "tokenizer_metadata.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.flags("--tokenizer-metadata")
@pytest.mark.parametrize("is_directory", [False, True])
def test_metadata_names_library_and_template(is_directory: bool, tmp_path: Path) -> None:
    from megatron.training.flags.read import read_run_config
    from megatron.training.recipes import vocabulary

    path = metadata(tmp_path, {"library": "sentencepiece", "chat_template": "{{ messages[0].content }}!"})
    model = str(DATA / "tok" / "sp_bpe800.model")
    named = str(tmp_path if is_directory else path)
    tokenizer = build_tokenizer(metadata_path=named, tokenizer_model=model)
    assert type(tokenizer).__name__ == "SentencePieceTokenizer"
    assert tokenizer.render_chat([{"content": "hi"}]) == "hi!"
    own = build_tokenizer(metadata_path=named, tokenizer_model=model, chat_template="{{ 1 }}")
    assert own.render_chat([]) == "1"
    base = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 64 --max-position-embeddings 64"
    flags = f"{base} --micro-batch-size 1 --train-iters 1 --lr 0.01 --mock-data --tokenizer-metadata {named}"
    config = read_run_config([*flags.split(), "--tokenizer-model", model], {})
    assert vocabulary.build_tokenizer(config).vocab_size == 800


@pytest.mark.flags("--tokenizer-metadata")
@pytest.mark.parametrize(("content", "message"), [
    ({"library": "byte-level"}, "library 'byte-level' is not one of huggingface"),
    ({"library": ["sentencepiece"]}, "is not one of"),
    ({}, "library None is not one of"),
    ({"library": "tiktoken"}, "NullTokenizer is no tokenizer of library 'tiktoken'"),
    ({"library": "null-text", "class_path": "own.Tokenizer"}, "class_path 'own.Tokenizer' is code, which is never run"),
])  # fmt: skip
def test_metadata_that_is_refused(content: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        build_tokenizer("NullTokenizer", vocab_size=9, metadata_path=str(metadata(tmp_path, content)))


@pytest.mark.flags("--tokenizer-metadata")
@pytest.mark.parametrize("content", ["", "[]", "[" * 100_000, '{"library": "null-text", "chat_template": 3}'])
def test_J13_corrupt_metadata(content: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer_metadata\.json: "):
        build_tokenizer("NullTokenizer", vocab_size=9, metadata_path=str(metadata(tmp_path, content)))
