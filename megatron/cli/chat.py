# SPDX-License-Identifier: Apache-2.0
"""A conversation with a trained model, in a terminal or through a pipe: `generate --chat`.

With a chat template the model answers messages; without one it is a base model, and continues the text so far. Answers
go to standard output as they are written, everything else to standard error.
"""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

from megatron.core.errors import ConfigError, MegatronError, say
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.chat import Message

PROMPT = "> "
NEW = "/new"
_CONTEXT_TOKENS = 8
"""Of the prompt, so that the first new word keeps the space in front of it."""
_HALF_A_CHARACTER = "\ufffd"


class History(ABC):
    """Conversation so far, as the tokens that the model reads next."""

    def __init__(self, tokenizer: Tokenizer, most_tokens: int) -> None:
        """most_tokens: the longest prompt, so that there is room for an answer."""
        self.tokenizer, self.most_tokens = tokenizer, most_tokens
        self.ends: list[int] = []
        """Tokens that end an answer."""
        if tokenizer.eod is not None and tokenizer.eod >= 0:
            self.ends.append(tokenizer.eod)

    @abstractmethod
    def describe(self) -> str:
        """Return what the model will do, in a sentence."""

    @abstractmethod
    def forget(self) -> None:
        """Forget the conversation."""

    @abstractmethod
    def read(self, line: str) -> tuple[list[int], bool]:
        """Take what the user typed; return the prompt, and whether the beginning was dropped from it.

        Raises MegatronError where there is nothing to read, or the tokenizer cannot take it, or it is longer than the
        model can read. The history is then what it was.
        """

    @abstractmethod
    def write(self, tokens: Sequence[int], text: str) -> None:
        """Take the answer, or as much of it as was written."""


class Messages(History):
    """A conversation, through the tokenizer's chat template. Where it is too long, the oldest exchanges are dropped."""

    def __init__(self, tokenizer: Tokenizer, most_tokens: int, system: str | None = None) -> None:
        super().__init__(tokenizer, most_tokens)
        self.first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[Message] = []
        self.ends += [token for token in tokenizer.find_answer_ends(self.first) if token not in self.ends]

    def describe(self) -> str:
        return "the model answers through its tokenizer's chat template"

    def forget(self) -> None:
        self.messages = []

    def read(self, line: str) -> tuple[list[int], bool]:
        if not line.strip():
            raise ConfigError("the message is empty; type something")
        messages: list[Message] = [*self.messages, {"role": "user", "content": line}]
        is_cut = False
        while len(tokens := self._tokenize(messages)) > self.most_tokens:
            if len(messages) <= 1:
                raise ConfigError(
                    f"the message has {len(tokens)} tokens, and beside an answer the model reads {self.most_tokens}; "
                    "shorten it, or make room with a smaller --max-new-tokens"
                )
            # A question goes with its answer, as templates insist on their taking turns.
            messages, is_cut = messages[2:], True
        self.messages = messages
        return tokens, is_cut

    def write(self, tokens: Sequence[int], text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def _tokenize(self, messages: Sequence[Message]) -> list[int]:
        return self.tokenizer.apply_chat_template([*self.first, *messages], add_generation_prompt=True)


class Text(History):
    """One text, which the user and the model write in turns. Where it is too long, its beginning is dropped."""

    def __init__(self, tokenizer: Tokenizer, most_tokens: int) -> None:
        super().__init__(tokenizer, most_tokens)
        self.tokens: list[int] = []

    def describe(self) -> str:
        return "the tokenizer has no chat template: this is a base model, which continues the text that you type"

    def forget(self) -> None:
        self.tokens = []

    def read(self, line: str) -> tuple[list[int], bool]:
        # What some tokenizers put in front of a text belongs at its beginning only.
        tokenize = self.tokenizer.tokenize_as_is if self.tokens else self.tokenizer.tokenize
        tokens = [*self.tokens, *(tokenize(line) if line else [])]
        if not tokens:
            raise ConfigError("there is no text to continue yet; type some")
        self.tokens = tokens[-self.most_tokens :]
        return list(self.tokens), len(tokens) > self.most_tokens

    def write(self, tokens: Sequence[int], text: str) -> None:
        self.tokens += tokens


class Writer:
    """Prints tokens as text while they come."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.before = list(prompt[-_CONTEXT_TOKENS:])
        self.tokens: list[int] = []
        self._shown = self._whole = tokenizer.detokenize(self.before)
        self._start = len(self._shown)

    def add(self, row: int, tokens: list[int]) -> None:
        """Take new tokens, and print what is whole characters. row: of the batch, which has one."""
        self.tokens += tokens
        self._whole = self.tokenizer.detokenize([*self.before, *self.tokens])
        # A character of several bytes may come in several tokens.
        if not self._whole.endswith(_HALF_A_CHARACTER):
            self._show()

    def finish(self) -> str:
        """Print the rest; returns the text."""
        self._show()
        sys.stdout.write("\n")
        sys.stdout.flush()
        return self._whole[self._start :]

    def _show(self) -> None:
        sys.stdout.write(self._whole[len(self._shown) :])
        sys.stdout.flush()
        self._shown = self._whole


Answer = Callable[[list[int], list[int], Callable[[int, list[int]], None]], bool]
"""(prompt, tokens that end an answer, what is called with new ones) -> whether it was cut off for its length."""


def read_lines() -> Iterator[str]:
    """Yield what the user types, line by line, until Ctrl-D; or the lines of a pipe."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.rstrip("\n")
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() then lets one edit the line, and bring back earlier ones
    while True:
        try:
            yield input(PROMPT)
        except EOFError:
            say("", sys.stderr)
            return
        except KeyboardInterrupt:
            say("\nCtrl-D ends the conversation", sys.stderr)


def talk(history: History, answer: Answer, lines: Iterator[str]) -> None:
    """Read lines and print answers until there are no more lines. Ctrl-C ends an answer, and not the conversation."""
    say(f"{history.describe()}. Ctrl-C stops an answer, {NEW} begins anew, Ctrl-D ends.", sys.stderr)
    for line in lines:
        if line.strip() == NEW:
            history.forget()
            say("the conversation begins anew", sys.stderr)
            continue
        try:
            prompt, is_cut = history.read(line)
        except MegatronError as error:
            say(f"note: {error}", sys.stderr)
            continue
        if is_cut:
            say(f"note: the beginning was dropped: the model reads {history.most_tokens} tokens", sys.stderr)
        writer = Writer(history.tokenizer, prompt)
        try:
            if answer(prompt, history.ends, writer.add):
                ending = f"note: stopped after {len(writer.tokens)} tokens; --max-new-tokens allows more"
            else:
                ending = ""
        except KeyboardInterrupt:
            ending = "note: stopped"
        history.write(writer.tokens, writer.finish())
        if ending and isinstance(history, Messages):
            say(ending, sys.stderr)
