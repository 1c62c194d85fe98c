# SPDX-License-Identifier: Apache-2.0
"""TikTokenizer against the reference's ids; its special tokens, sizes and broken vocabularies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.core.errors import ConfigError, DataError
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.tiktoken import SPECIAL_TOKENS
from tests.preprocess_runs import DATA
from tests.support.run_flags import run_config
from tests.unit.tokenizers.test_tokenizers import check_reference

pytest.importorskip("tiktoken")
MODEL = DATA / "tok" / "tiktoken_vocab.json"
BASE: dict[str, Any] = {
    "tokenizer_type": "TikTokenizer",
    "tokenizer_model": str(MODEL),
    "vocab_size": 1019,
    "tiktoken_num_special_tokens": 20,
    "tiktoken_pattern": "v1",
}


@pytest.mark.flags("--tokenizer-type", "--tokenizer-model", "--vocab-size", "--tiktoken-num-special-tokens")
def test_reference() -> None:
    check_reference("tik", BASE)


@pytest.mark.flags("--vocab-size")
def test_without_a_size_the_whole_file() -> None:
    check_reference("tik", BASE | {"vocab_size": None})
    tokenizer = build_tokenizer(**BASE | {"vocab_size": 600})
    assert (tokenizer.vocab_size, tokenizer.max_id) == (600, 599)
    assert max(tokenizer.tokenize((DATA / "corpus" / "public_small.jsonl").read_text()[:100_000])) < 600


@pytest.mark.flags("--tiktoken-pattern")
def test_patterns_cut_differently() -> None:
    from megatron.training.recipes.vocabulary import build_tokenizer

    flags = (
        f"--tokenizer-type TikTokenizer --tokenizer-model {MODEL} --tiktoken-num-special-tokens 20 --vocab-size 1019"
    )
    usual, v1, v2 = (
        build_tokenizer(run_config(f"{flags} {more}"))
        for more in ("", "--tiktoken-pattern v1", "--tiktoken-pattern v2")
    )
    text = (DATA / "corpus" / "public_small.jsonl").read_text()[:200_000]
    assert v1.tokenize(text) != v2.tokenize(text) == usual.tokenize(text)
    assert v1.detokenize(v1.tokenize(text)) == v2.detokenize(v2.tokenize(text)) == text
    assert v1.unique_identifiers != v2.unique_identifiers == usual.unique_identifiers


@pytest.mark.flags("--tiktoken-num-special-tokens")
def test_special_tokens_come_first() -> None:
    tokenizer = build_tokenizer(**BASE)
    text = "".join(SPECIAL_TOKENS) + "<SPECIAL_7><SPECIAL_19><SPECIAL_20>a"
    ids = tokenizer.tokenize(text)
    assert ids[:9] == [*range(8), 19] and min(ids[9:]) >= 20 and ids[-1] == 20 + ord("a")
    assert tokenizer.detokenize([*ids, 1_000_000, -1]) == text
    usual = build_tokenizer(**BASE | {"tiktoken_num_special_tokens": 1000, "vocab_size": None})
    assert usual.tokenize("a") == [1000 + ord("a")] and usual.vocab_size == 1999


@pytest.mark.flags("--tokenizer-special-tokens", "--vocab-extra-ids", "--tiktoken-special-tokens")
@pytest.mark.parametrize("spelling", ["--tokenizer-special-tokens", "--tiktoken-special-tokens"])
def test_own_special_tokens(spelling: str) -> None:
    from megatron.training.recipes.vocabulary import build_tokenizer, compute_padded_vocab_size

    names = ["<s>", "</s>", "<im_start>", "<unk>", "<mask>", "<pad>", "<cls>", "<sep>"]
    config = run_config(
        f"--tokenizer-type TikTokenizer --tokenizer-model {MODEL} --tiktoken-num-special-tokens 10 --vocab-size 512 "
        f"--vocab-extra-ids 2 --make-vocab-size-divisible-by 1 {spelling} {' '.join(names)}"
    )
    tokenizer = build_tokenizer(config)
    assert (tokenizer.bos, tokenizer.eod, tokenizer.pad) == (0, 1, 5)
    assert tokenizer.tokenize("<im_start><extra_id_1><extra_id_0><SPECIAL_9>") == [2, 513, 512, 9]
    assert tokenizer.vocab_size == compute_padded_vocab_size(config, tokenizer) == 514


@pytest.mark.flags("--tiktoken-num-special-tokens", "--tokenizer-special-tokens", "--vocab-size")
@pytest.mark.parametrize(("changes", "message"), [
    ({"vocab_size": 100}, "--vocab-size 100 leaves 80 tokens"),
    ({"vocab_size": 10}, "--vocab-size 10 leaves 0 tokens"),
    ({"special_tokens": ["<s>"]}, "--tokenizer-special-tokens lacks <unk> </s>"),
    ({"special_tokens": [*SPECIAL_TOKENS, "<s>"]}, "names a token twice"),
    ({"special_tokens": [*SPECIAL_TOKENS, "a", "b"], "tiktoken_num_special_tokens": 8}, "8 is less than the 9 named"),
])  # fmt: skip
def test_J13_sizes_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_tokenizer(**BASE | changes)


def entries(count: int = 256) -> list[dict[str, Any]]:
    return json.loads(MODEL.read_text())[:count]


@pytest.mark.parametrize("content", [
    "", "{", "3", "[3]", "[{}]", "[" * 100_000, json.dumps({"rank": 0}), json.dumps(entries()[1:]),
    json.dumps([*entries(), {"rank": 256, "token_bytes": "?"}]),
    json.dumps([*entries(), {"rank": 256, "token_bytes": "AA=="}]),
])  # fmt: skip
def test_J13_corrupt_vocabulary(content: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(DataError, match=r"bad\.json: not a usable vocabulary"):
        build_tokenizer(**BASE | {"tokenizer_model": str(tmp_path / "bad.json")})


def test_J6_text_that_the_library_cannot_take() -> None:
    with pytest.raises(DataError, match="tiktoken cannot encode the text"):
        build_tokenizer(**BASE).tokenize(" " * 1_500_000 + "x")
