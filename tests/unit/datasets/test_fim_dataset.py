# SPDX-License-Identifier: Apache-2.0
"""Fill-in-the-middle: rearranged documents can be put together again, and every flag has its effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.datasets.fim_dataset import GPTFIMDataset
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.errors import ConfigError
from megatron.training.recipes.gpt_data import build_gpt_datasets
from tests.support.run_flags import SMALLEST_RUN, run_config

PREFIX, MIDDLE, SUFFIX, FILL, END, SPLIT = 200, 201, 202, 203, 204, 205
SENTINELS = {"<fim_prefix>": PREFIX, "<fim_middle>": MIDDLE, "<fim_suffix>": SUFFIX, "<fim_pad>": FILL}
TEXTS = SENTINELS | {"<|endoftext|>": END, "<file>": SPLIT}


class Letters:
    """One token per character, and the sentinels."""

    eod, pad, vocab_size = END, -1, 256
    unique_identifiers: dict[str, str] = {}

    def tokenize_as_is(self, text: str) -> list[int]:
        return [TEXTS[text]] if text in TEXTS else [ord(letter) for letter in text]

    def detokenize(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


DOCUMENTS = ["abcdefghij" * n for n in (1, 3, 2, 5, 4)] + ["NOklmno", "xyz"] * 8


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    with IndexedDatasetBuilder(f"{tmp_path / 'text'}.bin", dtype=np.uint16) as builder:
        for text in DOCUMENTS:
            builder.add_document([*map(ord, text), END], [len(text) + 1])
        builder.finalize(f"{tmp_path / 'text'}.idx")
    return str(tmp_path / "text")


def train(prefix: str, flags: str, samples: int = 12) -> Any:
    base = SMALLEST_RUN.replace("--mock-data ", "")
    config = run_config(f"--data-path {prefix} --split 1,0,0 {flags}", base)
    return build_gpt_datasets(config, Letters(), (samples, 0, 0))[0]  # type: ignore[arg-type]


def original(tokens: list[int]) -> list[int] | None:
    """The document that a rearranged one was, with sentinels where they can be told apart; None if it was none."""
    if not tokens or tokens[0] != PREFIX or MIDDLE not in tokens or SUFFIX not in tokens:
        return None
    suffix_at, middle_at = tokens.index(SUFFIX), tokens.index(MIDDLE)
    prefix, suffix, middle = tokens[1:suffix_at], tokens[suffix_at + 1 : middle_at], tokens[middle_at + 1 :]
    # SPM has nothing between the first two sentinels; what follows the third is prefix and middle.
    return [*prefix, *middle, *suffix] if prefix or suffix_at > 1 else [*middle, *suffix]


def documents(sample: dict[str, torch.Tensor]) -> list[list[int]]:
    """The whole documents of a sample: those followed by an end of document, without the first (it may be a rest)."""
    tokens = sample["tokens"].tolist()
    ends = [i for i, token in enumerate(tokens) if token == END]
    return [tokens[a + 1 : b] for a, b in zip(ends, ends[1:], strict=False)]


@pytest.mark.flags("--fim-data", "--fim-rate")
def test_rearranged_documents_have_the_same_text(prefix: str) -> None:
    whole = {tuple(map(ord, text)) for text in DOCUMENTS}
    dataset = train(prefix, "--fim-data --fim-rate 1")
    assert isinstance(dataset, GPTFIMDataset)
    found = [document for i in range(12) for document in documents(dataset[i])]
    assert len(found) > 12
    assert all(tuple(original(document) or ()) in whole for document in found)
    cuts = {(document.index(SUFFIX), document.index(MIDDLE)) for document in found}
    assert len(cuts) > 3, "the cuts are not always the same"
    plain = train(prefix, "")
    none = train(prefix, "--fim-data --fim-rate 0")
    assert all(torch.equal(plain[i]["tokens"], none[i]["tokens"]) for i in range(12))


@pytest.mark.flags("--fim-rate")
def test_rate_is_a_share(prefix: str) -> None:
    dataset = train(prefix, "--fim-data --fim-rate 0.5", samples=60)
    found = [document for i in range(60) for document in documents(dataset[i])]
    share = sum(PREFIX in document for document in found) / len(found)
    assert 0.3 < share < 0.7


@pytest.mark.flags("--fim-spm-rate")
def test_order(prefix: str) -> None:
    for rate, is_spm in ((0, False), (1, True)):
        dataset = train(prefix, f"--fim-data --fim-rate 1 --fim-spm-rate {rate}")
        starts = [document[:2] for i in range(12) for document in documents(dataset[i])]
        assert (
            all((start == [PREFIX, SUFFIX]) for start in starts)
            if is_spm
            else starts.count([PREFIX, SUFFIX]) < len(starts) / 2
        )


@pytest.mark.flags("--fim-no-prefix")
def test_no_prefix(prefix: str) -> None:
    dataset = train(prefix, "--fim-data --fim-rate 1 --fim-no-prefix NO")
    found = [document for i in range(12) for document in documents(dataset[i])]
    assert list(map(ord, "NOklmno")) in found
    assert all(PREFIX in document or document[:2] == [ord("N"), ord("O")] for document in found)


@pytest.mark.flags("--fim-split-sample", "--fim-fragment-rate")
def test_parts_are_rearranged_one_by_one(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(f"{tmp_path / 'repository'}.bin", dtype=np.uint16) as builder:
        for _ in range(10):
            tokens = [*map(ord, "abcd"), SPLIT, *map(ord, "efghi"), SPLIT, *map(ord, "jk"), END]
            builder.add_document(tokens, [len(tokens)])
        builder.finalize(f"{tmp_path / 'repository'}.idx")
    flags = "--fim-data --fim-rate 1 --fim-split-sample <file> --fim-fragment-rate"
    dataset = train(str(tmp_path / "repository"), f"{flags} 1", samples=3)
    for document in documents(dataset[0]):
        parts = " ".join(map(str, document)).split(f" {SPLIT} ")
        assert [original([int(token) for token in part.split()]) for part in parts] == [
            list(map(ord, text)) for text in ("abcd", "efghi", "jk")
        ]
    untouched = train(str(tmp_path / "repository"), f"{flags} 0", samples=3)
    assert documents(untouched[0]) and all(PREFIX not in document for document in documents(untouched[0]))
    with pytest.raises(ConfigError, match="--fim-split-sample <file> needs --fim-fragment-rate"):
        train(str(tmp_path / "repository"), "--fim-data --fim-split-sample <file>")


@pytest.mark.flags(
    "--fim-prefix-token", "--fim-middle-token", "--fim-suffix-token", "--fim-pad-token", "--fim-eod-token"
)
@pytest.mark.parametrize("role", ["prefix", "middle", "suffix", "pad", "eod"])
def test_sentinels_must_be_single_tokens(prefix: str, role: str) -> None:
    with pytest.raises(ConfigError, match=f"--fim-{role}-token '<two>' is not one token of the tokenizer, but 5"):
        train(prefix, f"--fim-data --fim-{role}-token <two>")


@pytest.mark.flags("--fim-prefix-token", "--fim-middle-token", "--fim-suffix-token")
def test_sentinels_are_the_named_ones(prefix: str) -> None:
    dataset = train(prefix, "--fim-data --fim-rate 1 --fim-prefix-token P --fim-middle-token M --fim-suffix-token S")
    found = [document for i in range(12) for document in documents(dataset[i])]
    assert all(document[0] == ord("P") and {ord("M"), ord("S")} <= set(document) for document in found)


@pytest.mark.flags("--fim-eod-token")
def test_end_of_document_must_be_the_tokenizers(prefix: str) -> None:
    with pytest.raises(ConfigError, match="--fim-eod-token Z is token 90, but documents end with token 204"):
        train(prefix, "--fim-data --fim-eod-token Z")


@pytest.mark.flags("--fim-pad-token")
def test_a_sample_that_shrank_is_filled_up_without_loss(tmp_path: Path) -> None:
    """Tokens that merge when their text is tokenized again make a sample shorter."""

    class Pairs(Letters):
        def tokenize_as_is(self, text: str) -> list[int]:
            return [TEXTS[text]] if text in TEXTS else [ord(text[i]) for i in range(0, len(text), 2)]

    with IndexedDatasetBuilder(f"{tmp_path / 'long'}.bin", dtype=np.uint16) as builder:
        for _ in range(4):
            builder.add_document([ord("a")] * 200 + [END], [201])
        builder.finalize(f"{tmp_path / 'long'}.idx")
    base = SMALLEST_RUN.replace("--mock-data ", "")
    flags = f"--data-path {tmp_path / 'long'} --split 1,0,0 --fim-data --fim-rate 1 --fim-pad-token F"
    dataset = build_gpt_datasets(run_config(flags, base), Pairs(), (4, 0, 0))[0]  # type: ignore[arg-type]
    sample = dataset[0]
    fill = sample["labels"] == ord("F")
    assert 20 < int(fill.sum()) < 40 and sample["tokens"].shape == (64,)
    assert (sample["loss_mask"] == (~fill).float()).all()


def test_a_sample_depends_on_nothing_but_its_number(prefix: str) -> None:
    """Upstream draws from one stream: there, what was read before matters."""
    first, again = (train(prefix, "--fim-data --fim-rate 0.7") for _ in range(2))
    forwards = [first[i]["tokens"] for i in range(12)]
    backwards = [again[i]["tokens"] for i in reversed(range(12))][::-1]
    assert all(map(torch.equal, forwards, backwards))
    other = train(prefix, "--fim-data --fim-rate 0.7 --seed 99")
    assert any(not torch.equal(other[i]["tokens"], forwards[i]) for i in range(12))


def test_what_does_not_go_together(prefix: str) -> None:
    with pytest.raises(ConfigError, match="--fim-data moves the ends of documents"):
        train(prefix, "--fim-data --dataloader-inter-document-masking")
    with pytest.raises(ConfigError, match="--mock-data has none"):
        run_config("--fim-data")
    notes = run_config("--fim-spm-rate 0.1").notes
    assert any("--fim-spm-rate 0.1 has no effect without --fim-data" in note for note in notes)
