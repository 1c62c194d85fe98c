# SPDX-License-Identifier: Apache-2.0
"""Interface of every tokenizer to preprocessing, datasets, training and generation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from megatron.core.errors import ConfigError
from megatron.core.tokenizers.chat import Message, render_template


class Tokenizer(ABC):
    """Text to token ids and back.

    Ids are Python ints in `[0, max_id]`. A special token that the tokenizer does not have is None.
    """

    vocab_size: int
    """Number of tokens, added and special ones included, before padding."""
    eod: int | None
    """Id that ends a document (`--append-eod`)."""
    pad: int | None
    """Id that fills up short samples; -1 or None where the tokenizer has none."""
    bos: int | None = None
    """Id that begins a text."""
    unique_identifiers: Mapping[str, str]
    """Facts that tell this tokenizer from every other one, for names of cached indices."""
    special_token_texts: Mapping[str, str] = MappingProxyType({})
    """Text of each special token by role (bos_token, eos_token, ...), for chat templates."""
    chat_template: str | None = None
    """Jinja template that turns a conversation into text."""

    @property
    def max_id(self) -> int:
        """Largest id that `tokenize` can return; it decides whether 16 bits are enough in a .bin file."""
        return self.vocab_size - 1

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text. Raises DataError for a text that the tokenizer cannot take."""

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of several texts, the same as `tokenize` of each."""
        return [self.tokenize(text) for text in texts]

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens shown as text."""

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = False, **variables: Any) -> str:
        """The text of a conversation, as the chat template writes it.

        Raises ConfigError without a template, DataError for one that fails.
        """
        if self.chat_template is None:
            raise ConfigError("the tokenizer has no chat template; give one with --chat-template")
        names = {**self.special_token_texts, **variables}
        return render_template(self.chat_template, messages, add_generation_prompt=add_generation_prompt, **names)

    def apply_chat_template(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False, **variables: Any
    ) -> list[int]:
        """Token ids of a conversation; special tokens are those that the template writes, no others."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.tokenize_as_is(text)

    def tokenize_as_is(self, text: str) -> list[int]:
        """Token ids of a text, without the special tokens that `tokenize` puts around it."""
        return self.tokenize(text)

    def find_answer_ends(self, first: Sequence[Message] = ()) -> list[int]:
        """The special token that the chat template writes after an answer, if it writes one; it need not be the one
        that ends documents. first: messages before a conversation."""
        answer = "An answer."
        turns: list[Message] = [{"role": "user", "content": "A question?"}, {"role": "assistant", "content": answer}]
        text = self.render_chat([*first, *turns])
        after = text.rpartition(answer)[2].strip()
        found = self.tokenize_as_is(after)[:1]
        # A word of several characters that is one token, and stands in angle or square brackets, is no piece of text.
        is_special = bool(found) and len(word := self.detokenize(found).strip()) > 2 and word[0] in "<["
        return found if is_special and after.startswith(word) else []
