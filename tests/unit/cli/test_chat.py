# SPDX-License-Identifier: Apache-2.0
"""generate --chat: what the model reads, what is dropped, and what is printed while it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from megatron.cli.chat import History, Messages, Text, Writer, talk
from megatron.core.errors import ConfigError, DataError
from megatron.core.inference.generate import generate
from megatron.core.inference.sampling import Sampling
from megatron.core.tokenizers.base import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
BOS, EOD, END = 256, 257, 258


class Bytes(Tokenizer):
    """A token for each byte of UTF-8; a text begins with BOS, and <|end|> is one token."""

    vocab_size = 259  # type: ignore[assignment]
    eod = EOD  # type: ignore[assignment]
    pad = None  # type: ignore[assignment]
    unique_identifiers: dict[str, str] = {}  # type: ignore[assignment]

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def tokenize(self, text: str) -> list[int]:
        return [BOS, *self.tokenize_as_is(text)]

    def tokenize_as_is(self, text: str) -> list[int]:
        if "\t" in text:
            raise DataError("tabs cannot be read")
        parts = [list(part.encode()) for part in text.split("<|end|>")]
        return [token for number, part in enumerate(parts) for token in ([END] if number else []) + part]

    def detokenize(self, ids: Sequence[int]) -> str:
        special = {BOS: b"", EOD: b"<|eod|>", END: b"<|end|>"}
        return b"".join(special.get(token, bytes([token % 256])) for token in ids).decode(errors="replace")


def converse(
    history: History, lines: Sequence[str], answers: Sequence[str | Callable[[], str]], stop_after: int | None = None
) -> list[str]:
    """Hold a conversation with a model that says these answers; returns the prompts it was given."""
    prompts: list[str] = []
    coming = iter(answers)

    def answer(prompt: list[int], ends: list[int], on_tokens: Callable[[int, list[int]], None]) -> bool:
        prompts.append(history.tokenizer.detokenize(prompt))
        for number, token in enumerate(str(next(coming)).encode()):
            if number == stop_after:
                raise KeyboardInterrupt
            on_tokens(0, [token])
        return False

    def typed() -> Iterator[str]:
        yield from lines

    talk(history, answer, typed())
    return prompts


def test_messages_go_through_the_template(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jinja2")
    history = Messages(Bytes(TEMPLATE), 1000, system="Be brief.")
    assert history.ends == [EOD, END]
    prompts = converse(history, ["Hi", "", "And you?", "/new", "Hi"], ["Hello.", "Fine.", "Hello again."])
    begin = "<system>Be brief.<|end|>\n<user>Hi<|end|>\n<assistant>"
    assert prompts == [begin, f"{begin}Hello.<|end|>\n<user>And you?<|end|>\n<assistant>", begin]
    printed = capsys.readouterr()
    assert printed.out == "Hello.\nFine.\nHello again.\n"
    assert "the model answers through its tokenizer's chat template" in printed.err
    assert "note: the message is empty" in printed.err


def test_the_oldest_exchanges_are_dropped_and_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jinja2")
    history = Messages(Bytes(TEMPLATE), 50)
    prompts = converse(history, ["one", "two", "x" * 100, "three"], ["first answer", "second answer", "third"])
    assert "first answer" not in prompts[1] and prompts[1].startswith("<user>two")
    assert prompts[2].startswith("<user>three")
    said = capsys.readouterr().err
    assert "note: the beginning was dropped: the model reads 50 tokens" in said
    assert "note: the message has 119 tokens, and beside an answer the model reads 50" in said


def test_an_answer_that_was_stopped_is_part_of_the_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jinja2")
    history = Messages(Bytes(TEMPLATE), 1000)
    prompts = converse(history, ["Hi", "Go on"], ["abcdefgh", "ijklmnop"], stop_after=3)
    assert "<assistant>abc<|end|>" in prompts[1]
    printed = capsys.readouterr()
    assert printed.out == "abc\nijk\n" and printed.err.count("note: stopped") == 2


def test_a_base_model_continues_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    history = Text(Bytes(), 20)
    prompts = converse(history, ["Once upon", "", "\t", " then"], [" a time", " there", " was a king"])
    assert prompts == ["Once upon", "Once upon a time", "on a time there then"]
    printed = capsys.readouterr()
    assert printed.out == " a time\n there\n was a king\n"
    assert "this is a base model, which continues the text that you type" in printed.err
    assert "note: tabs cannot be read" in printed.err and "the beginning was dropped" in printed.err
    with pytest.raises(ConfigError, match="no text to continue yet"):
        Text(Bytes(), 20).read("")


def test_a_character_of_several_tokens_appears_whole(capsys: pytest.CaptureFixture[str]) -> None:
    writer = Writer(Bytes(), [])
    shown = []
    for token in "aé😀b".encode():
        writer.add(0, [token])
        shown.append(capsys.readouterr().out)
    assert shown == ["a", "", "é", "", "", "", "😀", "b"]
    assert writer.finish() == "aé😀b"


def test_generation_hands_over_each_token_and_ends_at_any_end() -> None:
    class Counts(torch.nn.Module):
        """The next token is one more than the last."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, tokens: torch.Tensor, *_: object, inference_context: object) -> torch.Tensor:
            return torch.nn.functional.one_hot(tokens + 1, 20).float()

    for end, expected in (([9, 12], [[5, 6, 7, 8], [11]]), (7, [[5, 6], [11, 12, 13, 14, 15]])):
        seen: list[list[int]] = [[], []]
        done = generate(
            Counts(), [[4], [10]], max_new_tokens=5, sampling=Sampling(greedy=True), eod=end, use_cache=False,
            on_tokens=lambda row, tokens, seen=seen: seen[row].extend(tokens),
        )  # fmt: skip
        assert seen == [completion.tokens for completion in done] == expected
