"""Conversations for instruction tuning: a JSONL file of messages, and their token ids through a chat template.

A line is an object {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}, …]}.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from megatron.core.datasets.indexed_format import file_size
from megatron.core.datasets.object_storage import is_object
from megatron.core.errors import ConfigError, DataError, StorageError

_ROLES_WITH_LOSS = ("assistant",)


class ConversationFile:
    """The lines of a JSONL file, by number; blank lines do not count."""

    def __init__(self, path: str) -> None:
        self.path = path
        if is_object(path):
            raise ConfigError(f"{path}: conversations are read from a disk only; copy the file to one")
        if file_size(path) == 0:
            raise DataError(f"{path}: is empty; give a file with a conversation on each line")
        try:
            with open(path, "rb") as file:
                self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror}") from error
        self._lines = np.asarray(list(self._places()), dtype=np.int64).reshape(-1, 3)
        if not len(self):
            raise DataError(f"{path}: has blank lines only; give a file with a conversation on each line")

    def __len__(self) -> int:
        return len(self._lines)

    def messages(self, index: int) -> list[dict[str, Any]]:
        """The messages of conversation `index`. Raises DataError naming the line."""
        begin, end, number = self._lines[index].tolist()
        try:
            line = json.loads(self._content[begin:end])
        except ValueError as error:
            raise DataError(f"{self.path}, line {number}: not JSON: {error}") from error
        messages = line.get("messages") if isinstance(line, dict) else None
        is_list = isinstance(messages, list) and messages
        if not is_list or not all(isinstance(message, dict) and "role" in message for message in messages or []):
            raise DataError(
                f'{self.path}, line {number}: expected an object {{"messages": [{{"role": ..., "content": ...}}, ...]}}'
            )
        return list(messages or [])

    def place(self, index: int) -> str:
        """Where a conversation stands, for messages."""
        return f"{self.path}, line {int(self._lines[index, 2])}"

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the content."""
        digest = hashlib.blake2b(self._content, digest_size=16).hexdigest()
        return {"bytes": os.path.getsize(self.path), "blake2b": digest}

    def _places(self) -> Iterator[tuple[int, int, int]]:
        """(begin, end, line number) of each line that is not blank."""
        begin = number = 0
        while begin < len(self._content):
            end = self._content.find(b"\n", begin)
            end = len(self._content) if end < 0 else end
            number += 1
            if self._content[begin:end].strip():
                yield begin, end, number
            begin = end + 1


def encode(messages: Sequence[dict[str, Any]], tokenizer: Any, place: str) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation, and which of them the model is to learn: the assistant's answers.

    The text is that of the chat template. It is cut where an answer begins and ends, and the parts are tokenized one by
    one, so that an answer has the tokens it would have when it is generated. The end-of-document token is added unless
    the template writes it. Raises DataError for a template that rewrites earlier messages.
    """
    ids: list[int] = []
    counts: list[bool] = []
    done = ""

    def add(text: str, has_loss: bool) -> None:
        nonlocal done
        if not text.startswith(done):
            raise DataError(
                f"{place}: the chat template writes earlier messages differently when later ones follow, so that the "
                "tokens of the answers cannot be told; give another --chat-template"
            )
        new = tokenizer.tokenize_as_is(text[len(done) :]) if len(text) > len(done) else []
        ids.extend(new)
        counts.extend([has_loss] * len(new))
        done = text

    for number, message in enumerate(messages):
        if message["role"] in _ROLES_WITH_LOSS:
            if number > 0:
                add(tokenizer.render_chat(messages[:number], add_generation_prompt=True), has_loss=False)
            add(tokenizer.render_chat(messages[: number + 1]), has_loss=True)
    if tokenizer.eod is not None and ids and ids[-1] != tokenizer.eod:
        ids.append(tokenizer.eod)
        counts.append(True)
    return ids, counts
