# SPDX-License-Identifier: Apache-2.0
"""New tokens as text, piece by piece: whole characters only, and nothing of a stop word."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.tokenizers.base import Tokenizer

_CONTEXT_TOKENS = 8
"""Tokens before a piece that it is detokenised with, so that it keeps the space in front of it."""
_HALF_A_CHARACTER = "\ufffd"


class TextStream:
    """The text of one request. Each token is detokenised a few times, however long the text becomes."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, [stop for stop in stops if stop]
        self._tokens = list(prompt[-_CONTEXT_TOKENS:])
        self._begin, self._read = 0, len(self._tokens)
        self._held = ""  # what may be the beginning of a stop word
        self._longest_stop = max(map(len, self._stops), default=0)
        self.text = ""
        """All that has been given out."""
        self.is_stopped = False
        """True once a stop word has come; the text ends before it."""

    def add(self, tokens: Sequence[int]) -> str:
        """Take new tokens; returns the text that they complete."""
        self._tokens += tokens
        before = self._tokenizer.detokenize(self._tokens[self._begin : self._read])
        after = self._tokenizer.detokenize(self._tokens[self._begin :])
        if after.endswith(_HALF_A_CHARACTER) or len(after) <= len(before):
            return ""
        self._begin, self._read = max(self._begin, self._read - _CONTEXT_TOKENS), len(self._tokens)
        return self._give(after[len(before) :], is_end=False)

    def finish(self) -> str:
        """The rest, when no token comes any more."""
        before = self._tokenizer.detokenize(self._tokens[self._begin : self._read])
        rest = self._tokenizer.detokenize(self._tokens[self._begin :])[len(before) :]
        self._read = len(self._tokens)
        return self._give(rest, is_end=True)

    def _give(self, piece: str, *, is_end: bool) -> str:
        if self.is_stopped:
            return ""
        found = self._held + piece
        places = [place for stop in self._stops if (place := found.find(stop)) >= 0]
        if places:
            self.is_stopped, keep = True, min(places)
        else:
            keep = len(found) if is_end else len(found) - self._count_held(found)
        self._held = found[keep:]
        self.text += found[:keep]
        return found[:keep]

    def _count_held(self, found: str) -> int:
        """Characters at the end that begin a stop word."""
        for count in range(min(self._longest_stop - 1, len(found)), 0, -1):
            if any(stop.startswith(found[-count:]) for stop in self._stops):
                return count
        return 0
