# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint carries of each kind of tokenizer is enough to build the same one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron.core.tokenizers.build import tokenizer_from
from megatron.training.checkpoint.tokenizer_assets import list_tokenizer_files, use_saved_files
from megatron.training.config.data import TokenizerConfig
from tests.preprocess_runs import DATA, gpt2_flags

TEXT = "Hello world, naïve [MASK] a b"


def write_metadata(folder: Path, library: str) -> Path:
    (folder / "tokenizer_metadata.json").write_text(json.dumps({"library": library}))
    return folder


def configs(folder: Path) -> dict[str, TokenizerConfig]:
    gpt2 = gpt2_flags(folder)
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\n")
    (folder / "sp").mkdir()
    shutil.copy(DATA / "tok" / "sp_bpe800.model", folder / "sp" / "tokenizer.model")
    shutil.copytree(DATA / "tok" / "hf_bpe1k", folder / "hf")
    (folder / "hf" / "chat_template.jinja").write_text("own {{ messages[0].content }}")
    (folder / "chat.txt").write_text("given {{ messages[0].content }}")
    hf = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder / "hf")}
    return {
        "gpt2": TokenizerConfig(vocab_file=gpt2[3], merge_file=gpt2[5]),
        "bert": TokenizerConfig(tokenizer_type="BertWordPieceCase", vocab_file=str(folder / "vocab.txt")),
        "sp": TokenizerConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(folder / "sp")),
        "sp file": TokenizerConfig(
            tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(folder / "sp" / "tokenizer.model")
        ),
        "tik": TokenizerConfig(
            tokenizer_type="TikTokenizer",
            tokenizer_model=str(DATA / "tok" / "tiktoken_vocab.json"),
            tiktoken_num_special_tokens=20,
        ),
        "hf": TokenizerConfig(**hf),
        "hf template": TokenizerConfig(**hf, chat_template=str(folder / "chat.txt")),
        "hf text": TokenizerConfig(**hf, chat_template="text {{ messages[0].content }}"),
        "metadata": TokenizerConfig(
            tokenizer_model=str(folder / "sp"), metadata_path=str(write_metadata(folder / "sp", "sentencepiece"))
        ),
        "null": TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=9),
    }


@pytest.mark.parametrize(
    "kind", ["gpt2", "bert", "sp", "sp file", "tik", "hf", "hf template", "hf text", "metadata", "null"]
)
def test_same_tokenizer_from_the_checkpoint(kind: str, tmp_path: Path) -> None:
    if kind == "tik":
        pytest.importorskip("tiktoken")
    source = tmp_path / "source"
    source.mkdir()
    config = configs(source)[kind]
    before = tokenizer_from(config)
    checkpoint = tmp_path / "checkpoint"
    (checkpoint / "tokenizer").mkdir(parents=True)
    for name, path in list_tokenizer_files(config).items():
        shutil.copy(path, checkpoint / name)
    shutil.rmtree(source)
    after = tokenizer_from(use_saved_files(config, checkpoint))
    assert after.unique_identifiers == before.unique_identifiers
    text = TEXT if kind != "null" else "1 2"
    assert after.tokenize(text) == before.tokenize(text)
    assert after.chat_template == before.chat_template
    assert (after.chat_template is None) == (not kind.startswith("hf"))


def test_L15_a_checkpoint_cannot_have_code_run(tmp_path: Path) -> None:
    config = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="x", trust_remote_code=True)
    assert not use_saved_files(config, tmp_path).trust_remote_code
