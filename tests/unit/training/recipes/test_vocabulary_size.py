# SPDX-License-Identifier: Apache-2.0
"""Rows of the embedding from the vocabulary's flags, and NullTokenizer's ids, as a run sees them."""

from __future__ import annotations

import pytest

from megatron.core.errors import ConfigError
from megatron.training.recipes.gpt import build_gpt_recipe
from megatron.training.recipes.vocabulary import build_tokenizer, compute_padded_vocab_size, compute_vocab_size
from tests.preprocess_runs import DATA
from tests.support.run_flags import run_config

HF = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {DATA / 'tok' / 'hf_bpe1k'}"


def rows(flags: str) -> int:
    config = run_config(flags)
    return compute_padded_vocab_size(config, build_tokenizer(config))


@pytest.mark.flags("--padded-vocab-size", "--no-pad-vocab-size", "--pad-vocab-size", "--make-vocab-size-divisible-by")
@pytest.mark.parametrize(("flags", "expected"), [
    ("--vocab-size 1000", 1024),
    ("--vocab-size 1000 --pad-vocab-size", 1024),
    ("--vocab-size 1000 --make-vocab-size-divisible-by 7", 1001),
    ("--vocab-size 1000 --no-pad-vocab-size", 1000),
    ("--vocab-size 1000 --disable-pad-vocab-size --make-vocab-size-divisible-by 7", 1000),
    ("--vocab-size 1000 --padded-vocab-size 1003", 1003),
    ("--vocab-size 1000 --padded-vocab-size 1003 --no-pad-vocab-size", 1003),
])  # fmt: skip
def test_rows(flags: str, expected: int) -> None:
    assert rows(flags) == expected


@pytest.mark.flags("--padded-vocab-size", "--no-pad-vocab-size")
@pytest.mark.parametrize(("flags", "message"), [
    ("--vocab-size 1000 --padded-vocab-size 998", "--padded-vocab-size 998 does not hold the 1000 tokens"),
    ("--vocab-size 1000 --padded-vocab-size 1001", "--padded-vocab-size 1001 cannot be divided among .* 1002"),
    ("--vocab-size 999 --no-pad-vocab-size", "--no-pad-vocab-size with a vocabulary of 999 cannot be divided"),
])  # fmt: skip
def test_rows_that_cannot_be(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config = run_config(f"{flags} --tensor-model-parallel-size 2", world_size=2)
        compute_padded_vocab_size(config, build_tokenizer(config))


@pytest.mark.flags("--vocab-size")
def test_size_beside_a_tokenizer_with_a_vocabulary() -> None:
    config = run_config(f"{HF} --vocab-size 1100")
    assert compute_vocab_size(config, build_tokenizer(config)) == 1100
    with pytest.raises(ConfigError, match="--vocab-size 900 does not hold the 1000 tokens of the tokenizer"):
        rows(f"{HF} --vocab-size 900")


@pytest.mark.flags("--vocab-extra-ids", "--tokenizer-special-tokens")
def test_added_tokens_of_huggingface() -> None:
    config = run_config(f"{HF} --vocab-size 1100 --vocab-extra-ids 2 --tokenizer-special-tokens <tool> <|endoftext|>")
    tokenizer = build_tokenizer(config)
    assert tokenizer.vocab_size == 1003
    assert tokenizer.tokenize("<tool><extra_id_1><|endoftext|>") == [1000, 1002, 0]
    with pytest.raises(ConfigError, match="--tokenizer-special-tokens names 'a' twice"):
        build_tokenizer(run_config(f"{HF} --vocab-size 1100 --tokenizer-special-tokens a b a"))


@pytest.mark.flags("--null-tokenizer-eod-id", "--null-tokenizer-pad-id", "--vocab-size")
def test_ids_of_the_null_tokenizer() -> None:
    tokenizer = build_tokenizer(run_config("--vocab-size 50 --null-tokenizer-eod-id 7 --null-tokenizer-pad-id 3"))
    assert (tokenizer.eod, tokenizer.pad) == (7, 3)
    with pytest.raises(ConfigError, match="--null-tokenizer-eod-id 50 is outside --vocab-size 50"):
        build_tokenizer(run_config("--vocab-size 50 --null-tokenizer-eod-id 50"))


def test_a_table_of_experts_holds_the_vocabulary() -> None:
    routed = "--num-experts 4 --moe-router-score-function sqrtsoftplus --moe-n-hash-layers 1 --vocab-size 100"
    with pytest.raises(ConfigError, match="--actual-vocab-size 99 has no experts for the last of 100 tokens; give 100"):
        build_gpt_recipe(run_config(f"{routed} --actual-vocab-size 99 --tokenizer-type NullTokenizer"))
    assert (
        build_gpt_recipe(run_config(f"{routed} --actual-vocab-size 100 --tokenizer-type NullTokenizer")).vocab_size
        == 100
    )
