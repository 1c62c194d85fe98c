# SPDX-License-Identifier: Apache-2.0
"""Tokenizers against the reference's ids, and what their files and flags may not be."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.core.errors import ConfigError, DataError
from megatron.core.tokenizers.build import build_tokenizer, pad_vocab_size
from tests.preprocess_runs import DATA, gpt2_flags

REFERENCE: dict[str, dict[str, Any]] = json.loads((DATA / "tokenizers" / "tokenizers.json").read_text())
HF_DIRECTORY = DATA / "tok" / "hf_bpe1k"


def flags_to_arguments(flags: list[str]) -> dict[str, str]:
    names = [name.removeprefix("--").replace("-", "_") for name in flags[::2]]
    return dict(zip(names, flags[1::2], strict=True))


@pytest.fixture
def tokenizer_directory(tmp_path: Path) -> Path:
    """A copy of the reference tokenizer that a test may change."""
    return Path(shutil.copytree(HF_DIRECTORY, tmp_path / "model"))


def configure(directory: Path, **config: object) -> None:
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config})
    )


def check_reference(name: str, arguments: dict[str, Any]) -> None:
    tokenizer = build_tokenizer(**arguments)
    reference = REFERENCE[name]
    assert tokenizer.vocab_size == reference["vocab_size"]
    assert (tokenizer.eod, tokenizer.pad) == (reference["eod"], reference["pad"])
    assert tokenizer.bos == (None if name == "null" else reference["bos"])
    for case in reference["enc"]:
        assert tokenizer.tokenize(case["text"]) == case["ids"]
        assert tokenizer.detokenize(case["ids"]) == case["detok"]
    texts = [case["text"] for case in reference["enc"]]
    assert tokenizer.tokenize_batch(texts) == [case["ids"] for case in reference["enc"]]


@pytest.mark.flags("--tokenizer-type", "--tokenizer-model")
@pytest.mark.parametrize("model", [HF_DIRECTORY, HF_DIRECTORY / "tokenizer.json"])
def test_huggingface_reference(model: Path) -> None:
    check_reference("hf", {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(model)})


@pytest.mark.flags("--tokenizer-type", "--vocab-file", "--merge-file")
def test_gpt2_reference(tmp_path: Path) -> None:
    arguments = flags_to_arguments(gpt2_flags(tmp_path))
    check_reference("g2", arguments)
    # Without --tokenizer-type, it is this one.
    check_reference("g2", arguments | {"tokenizer_type": None})


@pytest.mark.flags("--tokenizer-type", "--vocab-size")
def test_null_reference() -> None:
    check_reference("null", {"tokenizer_type": "NullTokenizer", "vocab_size": 100000})


def test_null_ids() -> None:
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=50, null_tokenizer_eod_id=7, null_tokenizer_pad_id=3)
    assert (tokenizer.eod, tokenizer.pad, tokenizer.max_id) == (7, 3, 49)


@pytest.mark.parametrize("text", ["1 x", "-1", "50", "1_0", "١", "99999999999999999999", "1.5"])
def test_null_refuses(text: str) -> None:
    with pytest.raises(DataError, match=r"NullTokenizer reads token ids|outside --vocab-size 50"):
        build_tokenizer("NullTokenizer", vocab_size=50).tokenize(text)


@pytest.mark.flags("--make-vocab-size-divisible-by")
@pytest.mark.parametrize("case", json.loads((DATA / "padded_vocab.json").read_text()).values())
def test_padded_vocab_size(case: dict[str, int]) -> None:
    assert pad_vocab_size(case["vocab"], case["divisible_by"], case["tp"]) == case["result"]


@pytest.mark.parametrize("config", [
    {"eos_token": "<|endoftext|>"},
    {"eos_token": {"__type": "AddedToken", "content": "<|endoftext|>"}, "pad_token": "<|pad|>", "bos_token": "<|bos|>"},
    {"eos_token": "<|endoftext|>", "additional_special_tokens": ["<|im|>", "<|pad|>"]},
    {"sep_token": "<|sep|>", "cls_token": "<|cls|>", "mask_token": "<|mask|>"},
    {"eos_token": "<|im|>", "unk_token": "<|unk|>"},
    {"tokenizer_class": "GPT2Tokenizer"},
])  # fmt: skip
def test_special_tokens_as_transformers(config: dict[str, Any], tokenizer_directory: Path) -> None:
    """Sizes, ids and the effect of special tokens are those of transformers' AutoTokenizer."""
    transformers = pytest.importorskip("transformers")
    configure(tokenizer_directory, **config)
    expected = transformers.AutoTokenizer.from_pretrained(str(tokenizer_directory))
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tokenizer_directory))
    assert tokenizer.vocab_size == len(expected)
    assert tokenizer.max_id == max(expected.get_vocab().values())
    assert tokenizer.eod == (expected.eos_token_id if expected.eos_token_id is not None else expected.sep_token_id)
    assert tokenizer.bos == (expected.bos_token_id if expected.bos_token_id is not None else expected.cls_token_id)
    assert tokenizer.pad == expected.pad_token_id
    for text in ("", "Hi <|pad|>x <|im|> y<|bos|><|sep|> z <|endoftext|>", "naïve\n\n"):
        assert tokenizer.tokenize(text) == expected.encode(text)


def test_special_tokens_of_a_template(tokenizer_directory: Path) -> None:
    """A post-processor adds its tokens to every text, the empty one too, unless told not to."""
    path = tokenizer_directory / "tokenizer.json"
    content = json.loads(path.read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    path.write_text(json.dumps(content))
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(path))
    plain = build_tokenizer(
        "HuggingFaceTokenizer", tokenizer_model=str(path), tokenizer_hf_no_include_special_tokens=True
    )
    assert tokenizer.tokenize("") == [0] and plain.tokenize("") == []
    assert tokenizer.tokenize("Hello") == [0, *plain.tokenize("Hello")]
    assert tokenizer.unique_identifiers != plain.unique_identifiers


def test_truncation_and_padding_in_the_file_are_ignored(tokenizer_directory: Path) -> None:
    path = tokenizer_directory / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(content))
    assert len(build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(path)).tokenize("Hello world")) == 7


@pytest.mark.parametrize(("arguments", "message"), [
    ({"tokenizer_type": "SFTTokenizer"}, "needs --tokenizer-model"),
    ({"tokenizer_type": "SentencePieceTokenizer"}, "needs --tokenizer-model"),
    ({"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": "/no/x"}, "--tokenizer-model /no/x: no such file"),
    ({"tokenizer_type": "TikTokenizer"}, "needs --tokenizer-model"),
    pytest.param(
        {"tokenizer_type": "TikTokenizer", "tokenizer_model": "/no/x"}, "--tokenizer-model /no/x: no such file",
        marks=pytest.mark.skipif(importlib.util.find_spec("tiktoken") is None, reason="needs the package tiktoken"),
    ),
    ({"tokenizer_type": "BertWordPieceCase"}, "needs --vocab-file"),
    ({"tokenizer_type": "BertWordPieceCase", "vocab_file": "/no/x"}, "--vocab-file /no/x: no such file"),
    ({"tokenizer_type": "NullTokenizer", "vocab_size": 9, "vocab_extra_ids": 2}, "--vocab-extra-ids has no meaning"),
    ({"tokenizer_type": "MultimodalTokenizer"}, "is not supported"),
    ({"tokenizer_type": "Nonsense"}, "Nonsense is not one of its values; give one of HuggingFaceTokenizer"),
    ({"tokenizer_type": "NullTokenizer"}, "needs --vocab-size"),
    ({"tokenizer_type": "NullTokenizer", "vocab_size": 0}, "0 is out of range; give a whole number of at least 1"),
    ({"tokenizer_type": "NullTokenizer", "vocab_size": 9, "null_tokenizer_eod_id": 9}, "outside --vocab-size 9"),
    ({"tokenizer_type": "HuggingFaceTokenizer"}, "needs --tokenizer-model"),
    ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "x"}, "needs --merge-file"),
    ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "/no/x", "merge_file": "/no/y"}, "--vocab-file /no/x: no"),
    ({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "org/model"}, "hf download org/model"),
])  # fmt: skip
def test_J13_flags_that_name_no_tokenizer(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_tokenizer(**arguments)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": 3}', '{"version": "1.0"}'])
def test_J13_corrupt_tokenizer_json(content: str, tokenizer_directory: Path) -> None:
    (tokenizer_directory / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=r"tokenizer\.json: not a usable tokenizer file"):
        build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tokenizer_directory))


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"eos_token": 3}', '{"eos_token": ""}', '{"additional_special_tokens": "x"}']
)
def test_J13_corrupt_tokenizer_config(content: str, tokenizer_directory: Path) -> None:
    (tokenizer_directory / "tokenizer_config.json").write_text(content)
    with pytest.raises(DataError, match=r"usable tokenizer file|expected a JSON object|must be"):
        build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tokenizer_directory))


def test_J13_corrupt_gpt2_files(tmp_path: Path) -> None:
    arguments = flags_to_arguments(gpt2_flags(tmp_path))
    (tmp_path / "merges.txt").write_text("one two three\n")
    with pytest.raises(DataError, match=r"vocab\.json or .*merges\.txt: not a usable tokenizer file"):
        build_tokenizer(**arguments)


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; sys.argv = ['x', '--help']; import runpy\n"
        "try: runpy.run_path('tools/preprocess_data.py', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "bad = {'torch', 'transformers', 'pandas'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=DATA.parents[2], stdout=subprocess.DEVNULL)
