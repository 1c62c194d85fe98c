# SPDX-License-Identifier: Apache-2.0
"""Instruction tuning: what has loss, that packing changes no loss, how much is padding, and what is refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.datasets.blend import DataSplit
from megatron.core.datasets.megatron_dataset import PackedDocuments
from megatron.core.datasets.sft_dataset import ConversationFile, SFTDataset, encode, pack
from megatron.core.errors import ConfigError, DataError
from megatron.core.packed_seq_params import pack_batch
from megatron.core.tokenizers.base import Tokenizer
from megatron.training.recipes.gpt import build_gpt_model
from megatron.training.recipes.gpt_data import build_gpt_datasets
from tests.support.gpt_models import read_config
from tests.support.run_flags import SMALLEST_RUN, run_config

END = 127
TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }};{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


class Letters(Tokenizer):
    """One token per character."""

    chat_template = TEMPLATE
    vocab_size, eod, pad = 128, END, None  # type: ignore[assignment]
    unique_identifiers: dict[str, str] = {}  # type: ignore[assignment]

    def tokenize(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def detokenize(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids)


def conversation(question: str, answer: str, *more: str) -> list[dict[str, str]]:
    turns = [question, answer, *more]
    return [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(turns)]


CONVERSATIONS = [
    conversation("q" * (i % 9), "abcdefghijklmnop"[: 1 + i % 13], *["more", "yes"] * (i % 3)) for i in range(60)
]


def write(path: Path, conversations: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "chat.jsonl", CONVERSATIONS)


def datasets(flags: str, sizes: tuple[Any, Any, Any] = (None, 0, 0), tokenizer: Any = None) -> list[Any]:
    base = SMALLEST_RUN.replace("--mock-data ", "")
    return list(build_gpt_datasets(run_config(f"--sft {flags}", base), tokenizer or Letters(), sizes))


def learned(sample: dict[str, torch.Tensor]) -> str:
    """The labels that have loss."""
    return "".join(chr(i) for i in sample["labels"][sample["loss_mask"] > 0].tolist())


# ---- conversations


def test_answers_and_the_end_are_learned() -> None:
    ids, counts = encode(conversation("hi", "yo", "and", "so"), Letters(), "here")
    text = "".join(map(chr, ids))
    assert text == f"<u>hi;<a>yo;<u>and;<a>so;{chr(END)}"
    assert "".join(letter for letter, has_loss in zip(text, counts, strict=True) if has_loss) == f"yo;so;{chr(END)}"


def test_what_follows_the_last_answer_is_left_out() -> None:
    ids, _ = encode(conversation("hi", "yo", "unanswered"), Letters(), "here")
    assert "".join(map(chr, ids)) == f"<u>hi;<a>yo;{chr(END)}"
    assert encode(conversation("hi", "yo")[:1], Letters(), "here") == ([], [])


def test_an_end_that_the_template_writes_is_not_doubled() -> None:
    tokenizer = Letters()
    tokenizer.chat_template = TEMPLATE.replace(";", chr(END))
    assert encode(conversation("hi", "yo"), tokenizer, "here")[0][-2:] == [ord("o"), END]


def test_a_template_that_rewrites_the_past_is_refused() -> None:
    tokenizer = Letters()
    tokenizer.chat_template = "{{ messages | length }}" + TEMPLATE
    with pytest.raises(DataError, match="here: the chat template writes earlier messages differently"):
        encode(conversation("hi", "yo"), tokenizer, "here")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 3: not JSON"),
        ("[]", "line 3: expected an object"),
        ('{"messages": []}', "line 3: expected an object"),
        ('{"messages": ["hi"]}', "line 3: expected an object"),
        ('{"messages": [{"content": "x"}]}', "line 3: expected an object"),
        ('{"messages": [{"role": "assistant", "content": ""}]}', "line 3: message 1, the assistant's, is empty"),
    ],
)
def test_bad_lines_are_named(file: Path, line: str, complaint: str) -> None:
    file.write_text(f"{file.read_text().splitlines()[0]}\n\n{line}\n")
    assert len(ConversationFile(str(file))) == 2, "blank lines do not count"
    with pytest.raises(DataError, match=f"chat.jsonl, {complaint}"):
        datasets(f"--data-path {file} --split 1,0,0")


def test_files_without_conversations(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="is empty"):
        datasets(f"--data-path {tmp_path / 'empty.jsonl'} --split 1,0,0")
    with pytest.raises(DataError, match="absent.jsonl: no such file; give one that exists$"):
        datasets(f"--data-path {tmp_path / 'absent.jsonl'} --split 1,0,0")
    write(tmp_path / "questions.jsonl", [conversation("q", "a")[:1]] * 3)
    with pytest.raises(DataError, match="none of the 3 conversations of the train split has an answer"):
        datasets(f"--data-path {tmp_path / 'questions.jsonl'} --split 1,0,0")


# ---- packing


@pytest.mark.parametrize("seed", range(5))
def test_packing_loses_nothing_and_overfills_nothing(seed: int) -> None:
    random = np.random.RandomState(seed)
    lengths = random.randint(1, 101, size=500)
    order, bounds = pack(lengths, 100, random)
    assert sorted(order.tolist()) == list(range(500))
    filled = np.add.reduceat(lengths[order], bounds[:-1])
    assert filled.max() <= 100 and bounds[-1] == 500
    assert 1 - filled.sum() / (100 * (len(bounds) - 1)) < 0.03, "of this mixture little is left over"


# ---- samples


@pytest.mark.flags("--sft")
def test_every_answer_is_there_once(file: Path) -> None:
    (dataset, _, _) = datasets(f"--data-path {file} --split 1,0,0")
    assert isinstance(dataset, SFTDataset)
    found = "".join(learned(dataset[i]) for i in range(len(dataset)))
    expected = [
        message["content"] + ";" for turns in CONVERSATIONS for message in turns if message["role"] == "assistant"
    ]
    assert len(found) == len("".join(expected)) + len(CONVERSATIONS), "and the end of each conversation"
    for answer in set(expected):
        assert answer in found


@pytest.mark.flags("--sft")
def test_the_loss_is_that_of_the_conversations_alone(file: Path) -> None:
    (dataset, _, _) = datasets(f"--data-path {file} --split 1,0,0")
    model = build_gpt_model(read_config("--seq-length 64 --max-position-embeddings 64"), 128).eval()
    packed = alone = 0.0
    with torch.no_grad():
        for i in range(len(dataset)):
            batch, bounds = pack_batch({name: value[None] for name, value in dataset[i].items()})
            losses = model(
                batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=bounds
            )
            packed += float((losses * batch["loss_mask"]).sum())
        for turns in CONVERSATIONS:
            ids, counts = encode(turns, Letters(), "here")
            tokens, weights = torch.tensor([ids]), torch.tensor(counts[1:]).float()
            places = torch.arange(len(ids) - 1)[None]
            losses = model(tokens[:, :-1], places, None, labels=tokens[:, 1:])
            alone += float((losses[0] * weights).sum())
    assert packed == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("paths", ["{file}", "0.3 {file} 0.7 {other}"], ids=["one file", "blend"])
def test_conversations_one_by_one_are_those_of_the_samples(file: Path, tmp_path: Path, paths: str) -> None:
    other = write(tmp_path / "other.jsonl", CONVERSATIONS[::-1][:20])
    (dataset, _, _) = datasets(f"--data-path {paths.format(file=file, other=other)} --split 1,0,0", (12, 0, 0))
    assert isinstance(dataset, PackedDocuments)
    for i in range(len(dataset)):
        sample, lengths = dataset[i], dataset.document_lengths(i)
        bounds = np.cumsum([0, *lengths]).tolist()
        assert sample["cu_seqlens"][: len(bounds)].tolist() == bounds and sample["loss_mask"][bounds[-1] :].sum() == 0
        for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
            document = dataset.document(i, number)
            assert set(document) == {"tokens", "labels", "position_ids", "loss_mask"}
            for name, values in document.items():
                assert values.dtype == sample[name].dtype and torch.equal(values, sample[name][begin:end]), name


def test_padding_is_reported(file: Path) -> None:
    (dataset, _, _) = datasets(f"--data-path {file} --split 1,0,0")
    used = sum(len(encode(turns, Letters(), "")[0]) - 1 for turns in CONVERSATIONS)
    share = 100 * (1 - used / (64 * len(dataset)))
    assert dataset.summary() == (
        f"train data: 60 conversations packed into {len(dataset)} sequences, {share:.2f} % padding"
    )
    assert share < 10


def test_what_is_too_long_is_cut_and_counted(tmp_path: Path) -> None:
    conversations = [conversation("q", "a" * 200), conversation("q" * 200, "a"), conversation("q", "a")]
    (dataset, _, _) = datasets(f"--data-path {write(tmp_path / 'long.jsonl', conversations)} --split 1,0,0")
    assert "2 conversations packed into 2 sequences" in dataset.summary()
    assert dataset.summary().endswith(", 2 cut to the sequence length, 1 left out without an answer")
    assert {learned(dataset[i]) for i in range(2)} == {f"a;{chr(END)}", "a" * (65 - len("<u>q;<a>"))}


def test_epochs_are_shuffled_and_splits_are_apart(file: Path) -> None:
    train, valid, _ = datasets(f"--data-path {file} --split 50,50,0", (50, None, 0))
    sequences = len(train.pack_bounds) - 1
    first, second = train.shuffle_index[:sequences].tolist(), train.shuffle_index[sequences : 2 * sequences].tolist()
    assert len(train) == 50 and sorted(first) == sorted(second) == list(range(sequences)) and first != second
    assert train.lines.max() == 29 and valid.lines.min() == 30 and valid.index_split is DataSplit.valid
    assert train.locate(0).startswith(f"{file}, line ")
    assert train[None]["loss_mask"].sum() == 0


def test_it_is_tokenized_once_for_all_starts(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = datasets(f"--data-path {file} --split 1,0,0")[0]
    monkeypatch.setattr(SFTDataset, "_build_indices", lambda self: pytest.fail("the cache was not used"))
    again = datasets(f"--data-path {file} --split 1,0,0")[0]
    assert all(torch.equal(first[i]["tokens"], again[i]["tokens"]) for i in range(len(first)))
    other = Letters()
    other.chat_template = TEMPLATE.replace(";", "!")
    with pytest.raises(pytest.fail.Exception):
        datasets(f"--data-path {file} --split 1,0,0", tokenizer=other)


def test_blends_of_conversations(file: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other.jsonl", [conversation("x", "Z" * 50)] * 20)
    (blend, _, _) = datasets(f"--data-path 1 {file} 3 {other} --split 1,0,0", (16, 0, 0))
    assert sum("Z" in learned(blend[i]) for i in range(16)) == 12


@pytest.mark.flags("--sft")
def test_what_does_not_go_together() -> None:
    for flags, complaint in (
        ("--sft", "--sft needs conversations, --mock-data has none"),
        ("--sft --fim-data", "--sft and --fim-data are different kinds of data"),
        ("--sft --reset-position-ids", "--reset-position-ids says nothing about --sft"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            run_config(flags)
